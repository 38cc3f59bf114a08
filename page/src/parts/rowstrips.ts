/** One query's scores of every key before and after the mask, and its weights after the softmax, as bars. */

import { fitted, h } from "../dom";
import { count, figure, printable } from "../numbers/format";
import { sinkShare } from "../numbers/sinks";
import { inside } from "../numbers/windows";
import { layerOf, tokensOf, type Context } from "../views/view";

const TITLES = [
  ["Scores before the mask", "how well each key fits"],
  ["Scores after the mask", "a hidden key has −∞ (striped)"],
  ["Weights after the softmax", "exp of the score over the sum of all"],
] as const;

export interface RowStrips {
  readonly element: HTMLElement;
  /** Shows the scores of query i, three rows of n, with key j marked. */
  show(scores: Float32Array, i: number, j: number): void;
  destroy(): void;
}

/** Draws a row of numbers as bars between two ends, key j marked; keys that are −∞ in `masked` are striped. */
function drawStrip(
  canvas: HTMLCanvasElement,
  row: Float32Array,
  masked: Float32Array | null,
  [low, high]: [number, number],
  key: number,
): void {
  const style = getComputedStyle(canvas);
  const colour = (name: string): string => style.getPropertyValue(name);
  const brush = fitted(canvas);
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const up = (x: number): number => ((high - x) / (high - low)) * (height - 2) + 1;
  const step = width / row.length;
  const thick = Math.max(1, step - (step > 4 ? 1 : 0));
  row.forEach((x, j) => {
    const at = j * step;
    if (masked?.[j] === -Infinity) {
      brush.fillStyle = colour("--line");
      for (let y = (j % 2) * 3; y < height; y += 6) brush.fillRect(at, y, thick, 2);
      return;
    }
    if (!Number.isFinite(x)) return;
    brush.fillStyle = colour(j === key ? "--mark" : "--accent");
    brush.fillRect(at, Math.min(up(x), up(0)), thick, Math.max(1, Math.abs(up(x) - up(0))));
  });
  brush.fillStyle = colour("--line-strong");
  brush.fillRect(0, up(0), width, 1);
  brush.fillStyle = colour("--mark");
  brush.fillRect((key + 0.5) * step - 4, height - 3, 8, 3);
}

export function rowStrips(context: Context): RowStrips {
  const heading = h("h2", {});
  const canvases = TITLES.map(() => h("canvas", { role: "img" }));
  const facts = TITLES.map(() => h("small", {}));
  const element = h(
    "section",
    { class: "strips", "aria-label": "The whole row" },
    heading,
    ...TITLES.map(([title, help], k) =>
      h("figure", {}, h("figcaption", {}, h("b", {}, title), ` ${help}. `, facts[k]), canvases[k]),
    ),
  );
  let scores: Float32Array = new Float32Array(0);
  let key = 0;
  const n = (): number => scores.length / 3;
  const rowOf = (k: number): Float32Array => scores.subarray(k * n(), (k + 1) * n());

  /** The largest and the smallest finite number of the scores; both strips of them have one scale. */
  function range(k: number): [number, number] {
    if (k === 2) return [0, 1];
    let [low, high] = [0, 0];
    for (const x of scores.subarray(0, 2 * n()))
      if (Number.isFinite(x)) [low, high] = [Math.min(low, x), Math.max(high, x)];
    return [low, high === low ? low + 1 : high];
  }

  function draw(): void {
    if (!n()) return;
    canvases.forEach((canvas, k) => {
      const row = rowOf(k);
      drawStrip(canvas, row, k > 0 ? rowOf(1) : null, range(k), key);
      const best = row.reduce((top, x, j) => (x > row[top] ? j : top), 0);
      const at = (j: number): string => figure(row[j]);
      const sink = sinkShare(layerOf(context), row);
      const sums = k < 2 ? "" : sink === null ? "; they sum to 1" : `; the learned sink: ${figure(sink)}`;
      facts[k].textContent = `Key ${count(key)}: ${at(key)}; largest: key ${count(best)}, ${at(best)}${sums}`;
      canvas.setAttribute("aria-label", `${TITLES[k][0]}. ${facts[k].textContent}`);
    });
  }

  canvases.forEach((canvas, k) => {
    const under = (event: MouseEvent): number => {
      const box = canvas.getBoundingClientRect();
      return inside(Math.floor(((event.clientX - box.left) / box.width) * n()), n());
    };
    canvas.addEventListener("click", (event) => context.store.set({ j: under(event) }));
    canvas.addEventListener("pointermove", (event) => {
      const j = under(event);
      const token = tokensOf(context).key?.at(j);
      canvas.title = `${count(j)}${token === undefined ? "" : ` “${printable(token)}”`}: ${figure(rowOf(k)[j])}`;
    });
  });
  const watch = new ResizeObserver(draw);
  watch.observe(element);

  return {
    element,
    show(found, i, j) {
      scores = found;
      key = j;
      heading.textContent = `The whole row of query ${count(i)}, from scores to weights`;
      draw();
    },
    destroy: () => watch.disconnect(),
  };
}
