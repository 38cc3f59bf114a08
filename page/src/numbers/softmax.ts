/** The softmax of a row of scores, and what is said of it. */

/** exp(factor · x − max) over its sum and a sink's, whose score is as it is; NaN where x is NaN, which is hidden. */
export function softmax(scores: ArrayLike<number>, factor: number, sink = -Infinity): Float64Array {
  let top = sink;
  for (let j = 0; j < scores.length; j++) if (factor * scores[j] > top) top = factor * scores[j];
  const out = new Float64Array(scores.length);
  let sum = sink > -Infinity ? Math.exp(sink - top) : 0;
  for (let j = 0; j < scores.length; j++) {
    out[j] = Math.exp(factor * scores[j] - top);
    if (!Number.isNaN(out[j])) sum += out[j];
  }
  return out.map((x) => x / sum);
}

/** What weights on keys leave to the sink. */
export const restOf = (weights: Float64Array): number =>
  Math.max(0, 1 - weights.reduce((sum, weight) => sum + (weight || 0), 0));

/** Weights as they are drawn: before those of keys that of the sink, as wide as a 24th of them, and a gap. */
export function afterSink(shown: Float64Array, rest: number): Float64Array {
  const wide = Math.ceil(shown.length / 24);
  const column = new Float64Array(2 * wide).fill(NaN).fill(rest, 0, wide);
  return Float64Array.from([...column, ...shown]);
}

export interface RowMeasures {
  /** −Σ p log p, in nats. */
  entropy: number;
  largest: number;
  /** Σ p (1 − p), the trace of the softmax's Jacobian: 0 where one key has all. */
  gradient: number;
}

export function measures(weights: ArrayLike<number>): RowMeasures {
  let [entropy, largest, squares] = [0, 0, 0];
  for (let j = 0; j < weights.length; j++) {
    const p = weights[j];
    if (!(p > 0)) continue;
    entropy -= p * Math.log(p);
    squares += p * p;
    if (p > largest) largest = p;
  }
  return { entropy: Math.max(0, entropy), largest, gradient: Math.max(0, 1 - squares) };
}

/** Normal random numbers, the same ones every time. */
export function normals(count: number): Float64Array {
  let state = 1;
  const uniform = (): number => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state + 0.5) / 2 ** 32;
  };
  return Float64Array.from(
    { length: count },
    () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform()),
  );
}
