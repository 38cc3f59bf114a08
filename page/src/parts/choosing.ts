/** A text of its own in which a token is chosen, where the shaded text is another one: of cross-attention, or of a longer past. */

import { h } from "../dom";
import { count, printable, readable } from "../numbers/format";
import { inside, windowAround } from "../numbers/windows";
import { tokensOf, type Context } from "../views/view";
import { stepOf } from "./shadedlines";

/** Tokens that are shown, around the chosen one. */
const SHOWN = 400;
/** Tokens that the arrow keys up and down go. */
const FAR = 10;

export class Choosing {
  private readonly label = h("b", {});
  private readonly text = h("p", { class: "choosing-text", role: "listbox", tabindex: 0 });
  readonly element = h("div", { class: "choosing sheet" }, this.label, this.text);
  private from = 0;
  private n = 0;

  /** pick: called with a token, and whether it ends a choice of several. */
  constructor(
    private readonly context: Context,
    private readonly pick: (token: number, several: boolean) => void,
  ) {
    this.text.addEventListener("click", (event) => {
      const token = (event.target as HTMLElement).closest("[data-token]")?.getAttribute("data-token");
      if (token) pick(Number(token), event.shiftKey);
    });
    this.text.addEventListener("keydown", (event) => this.key(event));
  }

  /** Shows the tokens of an axis of n, with [from, to) chosen. */
  async show(axis: "query" | "key", n: number, [from, to]: readonly [number, number]): Promise<void> {
    [this.from, this.n] = [from, n];
    const name = axis === "query" ? "Queries" : "Keys";
    const { start, stop } = windowAround(from, n, SHOWN);
    const tokens = tokensOf(this.context)[axis];
    await tokens?.load(start, stop);
    this.element.dataset.axis = axis;
    this.label.textContent = `${name}: choose one`;
    this.text.setAttribute("aria-label", `${name}. Arrow keys choose one.`);
    this.text.replaceChildren(
      start > 0 ? "… " : "",
      ...Array.from({ length: stop - start }, (_, k) => {
        const t = start + k;
        const token = tokens?.at(t);
        const chosen = t >= from && t < to;
        return h(
          "span",
          {
            class: chosen ? "token chosen" : "token",
            "data-token": t,
            role: "option",
            "aria-selected": String(chosen),
            title: token === undefined ? count(t) : `${count(t)} “${printable(token)}”`,
          },
          token === undefined ? `${t} ` : readable(token).replaceAll("\n", "↵") || "∅",
        );
      }),
      stop < n ? " …" : "",
    );
  }

  private key(event: KeyboardEvent): void {
    const step = stepOf(event.key, FAR);
    if (step === undefined) return;
    event.preventDefault();
    this.pick(inside(this.from + step, this.n), event.shiftKey);
  }
}
