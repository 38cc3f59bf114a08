import { h } from "../dom";
import { printable } from "../numbers/format";
import { inside } from "../numbers/windows";
import { tokensOf, type Context } from "../views/view";

/** A number that chooses a token, the ones before and after it, and the token itself. */
export function tokenChooser(
  context: Context,
  label: string,
  axis: "query" | "key",
  value: number,
  n: number,
  set: (to: number) => void,
): HTMLElement {
  const tokens = tokensOf(context)[axis];
  const word = h("span", { class: "word" });
  void tokens?.load(value, value + 1).then(
    () => (word.textContent = printable(tokens.at(value) ?? "")),
    () => {},
  );
  const input = h("input", {
    type: "number",
    min: 0,
    max: n - 1,
    value,
    "data-focus": label,
    change: () => set(inside(Math.round(Number(input.value) || 0), n)),
  });
  const go = (by: number, text: string, title: string): HTMLElement =>
    h(
      "button",
      {
        type: "button",
        class: "icon",
        title,
        "aria-label": title,
        "data-focus": title,
        click: () => set(inside(value + by, n)),
      },
      text,
    );
  return h(
    "div",
    { class: "field" },
    h("label", {}, h("span", {}, label), input),
    go(-1, "‹", `${label} before`),
    go(1, "›", `${label} after`),
    word,
  );
}
