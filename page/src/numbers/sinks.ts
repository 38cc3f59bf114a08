/** Weights on a learned sink, which stands beside the keys and is none of them. */

import type { Kind, Layer } from "../data";

/** Weights in float32 sum to 1 as well as this. */
const ROUNDING = 1e-6;

/** The weight of a whole row that is on no key: that of the learned sink; null in a layer without one. */
export function sinkShare({ sink }: Pick<Layer, "sink">, row: Float32Array): number | null {
  if (!sink) return null;
  const share = 1 - row.reduce((sum, weight) => sum + (weight || 0), 0);
  return share < ROUNDING ? 0 : share;
}

const largest = (weights: Float32Array): number => weights.reduce((most, weight) => Math.max(most, weight), 0);

/** Weights on the sink in rows [r0, r1) of pixels of `step` queries each: their mean, or the largest. */
export function pooledSinks(sinks: Float32Array, step: number, kind: Kind, r0: number, r1: number): Float32Array {
  return Float32Array.from({ length: r1 - r0 }, (_, r) => {
    const part = sinks.subarray((r0 + r) * step, (r0 + r + 1) * step);
    return kind === "max" ? largest(part) : part.reduce((sum, weight) => sum + weight, 0) / part.length;
  });
}

/** The largest weight on the sink in pixels of `step` queries each. */
export const largestSink = (sinks: Float32Array, step: number, kind: Kind): number =>
  largest(pooledSinks(sinks, step, kind, 0, Math.ceil(sinks.length / step)));

/** The largest weight of each of `parts` parts of a column; what is shorter is repeated. */
export function columnOf(weights: Float32Array, parts: number): Float32Array {
  const n = weights.length;
  return Float32Array.from({ length: parts }, (_, r) => {
    const from = Math.floor((r * n) / parts);
    return largest(weights.subarray(from, Math.max(from + 1, Math.floor(((r + 1) * n) / parts))));
  });
}
