/** Attention with and without 1/√d: what a block of dot products becomes, and what is measured against what. */

import { measures, normals, restOf, softmax, type RowMeasures } from "./softmax";

/** Pairs up to which a whole head is shown; of a larger one the rows up to the chosen query. */
const WHOLE = 2 ** 16;
const ROWS = 64;
const MOST_VALUES = 2 ** 20;

/** Random scores that stand for a row at any d. */
const RANDOM = 512;

const TEMPERATURES = Array.from({ length: 61 }, (_, k) => 10 ** (-1.5 + k / 20));
const FEATURES = Array.from({ length: 51 }, (_, k) => 2 ** (k / 5));

/** Whether a scale is 1/√d, which is the usual one. */
export const isUsual = (scale: number, d: number): boolean => Math.abs(scale * Math.sqrt(d) - 1) < 1e-6;

export type Against = "temperature" | "d";

/** Both sides of the view: with 1/√d, and without. */
export const SIDES = [0, 1] as const;
export type Side = (typeof SIDES)[number];

/** The rows [r0, r1) of a head that are shown with query i. */
export function rowsWith(i: number, n_q: number, n_k: number): [r0: number, r1: number] {
  if (n_q * n_k <= WHOLE) return [0, n_q];
  const rows = Math.max(1, Math.min(ROWS, Math.floor(MOST_VALUES / n_k)));
  return [Math.max(0, i + 1 - rows), i + 1];
}

/** Dot products of rows [r0, r1) of a head with d features, row-major; NaN where a key is hidden. */
export interface DotBlock {
  dots: Float32Array;
  r0: number;
  r1: number;
  n_k: number;
  d: number;
  /** The score of the head's learned sink, −∞ without one. */
  sink: number;
}

export const rowOf = ({ dots, r0, n_k }: DotBlock, i: number): Float32Array =>
  dots.subarray((i - r0) * n_k, (i - r0 + 1) * n_k);

/** What a side multiplies dot products with. */
const factorOf = (side: Side, d: number, temperature: number): number =>
  side === 0 ? 1 / (Math.sqrt(d) * temperature) : 1 / temperature;

/** The weights of each row of a block on one side. */
export function weightsOf(block: DotBlock, side: Side, temperature: number): Float64Array[] {
  const factor = factorOf(side, block.d, temperature);
  return Array.from({ length: block.r1 - block.r0 }, (_, r) =>
    softmax(rowOf(block, block.r0 + r), factor, block.sink / temperature),
  );
}

export interface Curves {
  x: number[];
  /** Measures of each side, one for each x. */
  sides: RowMeasures[][];
}

/** How a row is measured at any temperature. */
function byTemperature(row: Float32Array, d: number, sink: number): Curves {
  const seen = row.filter((x) => !Number.isNaN(x));
  const at = (side: Side) => TEMPERATURES.map((t) => measured(softmax(seen, factorOf(side, d, t), sink / t), sink));
  return { x: TEMPERATURES, sides: SIDES.map(at) };
}

/** How a row of random vectors is measured at any d: their dot products have the variance d. */
function byFeatures(row: Float32Array, temperature: number, sink: number): Curves {
  const seen = row.filter((x) => !Number.isNaN(x)).length;
  const random = normals(Math.min(RANDOM, Math.max(2, seen)));
  const at = (side: Side) =>
    FEATURES.map((d) =>
      measured(softmax(random, Math.sqrt(d) * factorOf(side, d, temperature), sink / temperature), sink),
    );
  return { x: FEATURES, sides: SIDES.map(at) };
}

/** How the chosen row of a block is measured against the temperature or d. */
export function curvesOf(block: DotBlock, i: number, against: Against, temperature: number): Curves {
  const row = rowOf(block, i);
  return against === "d" ? byFeatures(row, temperature, block.sink) : byTemperature(row, block.d, block.sink);
}

/** What is said of a row of weights, that of a learned sink among them. */
export const measured = (weights: Float64Array, sink: number): RowMeasures =>
  measures(sink > -Infinity ? [...weights, restOf(weights)] : weights);

/** The largest of each of at most so many parts; NaN where a part holds nothing. */
export function pooled(values: Float64Array, parts: number): Float64Array {
  if (values.length <= parts) return values;
  const out = new Float64Array(parts).fill(NaN);
  values.forEach((value, j) => {
    const at = Math.floor((j * parts) / values.length);
    if (!(value <= out[at])) out[at] = Number.isNaN(value) ? out[at] : value;
  });
  return out;
}
