/** Charts of what the scale of scores does: to the chosen row, and to the variance of q · k. */

import type { Curves } from "../numbers/scaled";
import type { RowMeasures } from "../numbers/softmax";
import { chart, type Line } from "./chart";

const LINES = [
  { name: "with 1/√d", kind: "first" },
  { name: "without", kind: "second" },
] as const;

const MEASURES: readonly (readonly [name: keyof RowMeasures, title: string, help: string])[] = [
  ["entropy", "Entropy of the row", "in nats; 0: one key has all"],
  ["largest", "Largest weight", "1: one key has all"],
  ["gradient", "Gradient of the softmax", "Σ p(1 − p); 0: nothing left to learn from"],
];

/** A chart of each measure of a row; `mark` is where the view is on the axis. */
export function measureCharts({ x, sides }: Curves, axis: string, mark: number): HTMLElement[] {
  return MEASURES.map(([measure, title, help]) => {
    const lines = LINES.map((line, side): Line => ({ ...line, values: sides[side].map((one) => one[measure]) }));
    return chart({ title, help, axis, x, logarithmic: true, mark, lines });
  });
}

/** Var(q · k) of the first features of a head, one for each number of them. */
export function varianceChart(variance: readonly number[]): HTMLElement {
  const d = variance.length;
  return chart({
    title: "Var(q · k) against d",
    help: "it grows with the number of features; 1/√d takes that back",
    axis: "features",
    x: variance.map((_, k) => k + 1),
    logarithmic: false,
    lines: [
      { name: "q · k of this head", kind: "second", values: [...variance] },
      { name: "growing with d", kind: "third", values: variance.map((_, k) => ((k + 1) * variance[d - 1]) / d) },
      { name: "q · k / √d", kind: "first", values: variance.map((v, k) => v / (k + 1)) },
    ],
  });
}
