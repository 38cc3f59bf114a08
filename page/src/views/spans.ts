/** Weights of several tokens together: of queries their mean, on keys their sum. */

import type { Data, HeadAt } from "../data";

/** Weights that are asked for at once. */
const AT_ONCE = 2 ** 20;

/**
 * For each key the mean weight of queries [from, to), or with `by` for each query the sum of its weights on keys
 * [from, to): n numbers, NaN where every pair is hidden.
 */
export async function spanWeights(
  data: Data,
  at: HeadAt,
  [from, to]: readonly [number, number],
  n: number,
  by: boolean,
): Promise<Float32Array> {
  const span = to - from;
  const sums = new Float64Array(n);
  const seen = new Uint8Array(n);
  const add = (place: number, weight: number): void => {
    if (Number.isNaN(weight)) return;
    sums[place] += weight;
    seen[place] = 1;
  };
  if (by) {
    const band = Math.max(1, Math.floor(AT_ONCE / span));
    for (let r = 0; r < n; r += band) {
      const block = await data.values(at, r, Math.min(n, r + band), from, to);
      block.forEach((weight, p) => add(r + Math.floor(p / span), weight));
    }
  } else {
    const band = Math.max(1, Math.floor(AT_ONCE / n));
    for (let r = from; r < to; r += band) {
      const block = await data.values(at, r, Math.min(to, r + band), 0, n);
      block.forEach((weight, p) => add(p % n, weight));
    }
  }
  return Float32Array.from(sums, (sum, k) => (seen[k] ? (by ? sum : sum / span) : NaN));
}
