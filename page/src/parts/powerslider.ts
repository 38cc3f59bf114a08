import { h } from "../dom";
import { figure } from "../numbers/format";

/** A labelled slider over powers of ten, with the number that it stands at: two digits of it. */
export function powerSlider(
  label: string,
  [min, max, step]: readonly [min: number, max: number, step: number],
  value: number,
  set: (value: number) => void,
): HTMLLabelElement {
  const shown = h("output", {}, figure(value));
  const input = (): void => {
    const chosen = Number((10 ** Number(slider.value)).toPrecision(2));
    shown.textContent = figure(chosen);
    set(chosen);
  };
  const slider = h("input", { type: "range", min, max, step, value: Math.log10(value), "aria-label": label, input });
  return h("label", { class: "field" }, h("span", {}, label), slider, shown);
}
