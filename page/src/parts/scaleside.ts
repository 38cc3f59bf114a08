/** A head's weights on one scale of dot products: a map, the chosen row as bars, and its measures in words. */

import { h } from "../dom";
import { css, ramp, SCALES, toned, type ScaleName } from "../numbers/colour";
import { scoreText, weightText } from "../numbers/format";
import { measured, pooled } from "../numbers/scaled";
import { afterSink, restOf } from "../numbers/softmax";

/** Columns and bars that are drawn; of more, the largest weight of each. */
const COLUMNS = 512;
const BARS = 128;

export interface ScaleSide {
  readonly element: HTMLElement;
  readonly title: HTMLElement;
  /** Shows the weights of some rows, one of them marked; sink: the score of a learned sink, −∞ without one. */
  show(rows: readonly Float64Array[], marked: number, scale: ScaleName, sink: number): void;
}

/** Weights on at most so many parts of the keys, after that of a learned sink. */
function drawn(weights: Float64Array, parts: number, sink: number): Float64Array {
  const shown = pooled(weights, parts);
  return sink > -Infinity ? afterSink(shown, restOf(weights)) : shown;
}

function drawMap(canvas: HTMLCanvasElement, rows: readonly Float64Array[], scale: ScaleName, sink: number): void {
  [canvas.width, canvas.height] = [drawn(rows[0], COLUMNS, sink).length, rows.length];
  const brush = canvas.getContext("2d") as CanvasRenderingContext2D;
  rows.forEach((weights, r) =>
    drawn(weights, COLUMNS, sink).forEach((weight, x) => {
      if (Number.isNaN(weight)) return;
      brush.fillStyle = css(ramp(SCALES[scale], toned(weight, 1, "root")));
      brush.fillRect(x, r, 1, 1);
    }),
  );
}

const barElements = (weights: Float64Array, sink: number): HTMLElement[] =>
  Array.from(drawn(weights, BARS, sink), (weight) => {
    const bar = h("span", {});
    bar.style.setProperty("--size", String(weight || 0));
    return bar;
  });

export function scaleSide(name: string): ScaleSide {
  const title = h("h2", {}, name);
  const canvas = h("canvas", { role: "img" });
  const mark = h("span", { "aria-hidden": "true" });
  const bars = h("div", { class: "bars", role: "img" });
  const told = h("p", { class: "told" });
  return {
    element: h("div", { class: "side" }, title, h("div", { class: "drawn sheet" }, canvas, mark), bars, told),
    title,
    show(rows, marked, scale, sink) {
      drawMap(canvas, rows, scale, sink);
      mark.style.top = `${(100 * marked) / rows.length}%`;
      mark.style.height = `${100 / rows.length}%`;
      bars.replaceChildren(...barElements(rows[marked], sink));
      const { entropy, largest, gradient } = measured(rows[marked], sink);
      const said = [
        ["largest weight", weightText(largest)],
        ["entropy", scoreText(entropy)],
        ["gradient", scoreText(gradient)],
      ] as const;
      told.textContent = said.map(([what, x]) => `${what} ${x}`).join(", ");
      canvas.setAttribute("aria-label", `Map ${name}; the chosen row: ${told.textContent}`);
      bars.setAttribute("aria-label", `The chosen row ${name}: ${told.textContent}`);
    },
  };
}
