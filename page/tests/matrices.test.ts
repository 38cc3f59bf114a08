import { describe, expect, it } from "vitest";

import { matricesOf, scoresOf } from "../src/source/matrices";
import { arraysOf, ComputedWeights } from "../src/source/weights";

const base64 = (numbers: Float32Array): string =>
  btoa(String.fromCharCode(...new Uint8Array(numbers.buffer as ArrayBuffer)));

const [N_Q, N_K, D, D_V, SCALE, OFFSET] = [4, 6, 4, 2, 0.5, 1];

/** A causal head of 4 queries and 6 keys. */
function head(): { weights: ComputedWeights; scores: number[][]; v: Float32Array } {
  const q = Float32Array.from({ length: N_Q * D }, (_, k) => Math.sin(k * 1.7));
  const k = Float32Array.from({ length: N_K * D }, (_, p) => Math.cos(p * 0.9));
  const v = Float32Array.from({ length: N_K * D_V }, (_, p) => Math.sin(p * p));
  const scores = Array.from({ length: N_Q }, (_, i) =>
    Array.from({ length: N_K }, (__, j) => {
      const dot = Array.from({ length: D }, (___, a) => q[i * D + a] * k[j * D + a]).reduce((x, y) => x + y, 0);
      return j <= i + OFFSET ? SCALE * dot : -Infinity;
    }),
  );
  const lse = scores.map((row) => Math.log(row.reduce((sum, s) => sum + Math.exp(s), 0)));
  const stored = {
    ...{ n_q: N_Q, n_k: N_K, d: D, dtype: "f32" as const, q: base64(q), k: base64(k), v: base64(v), d_v: D_V },
    ...{ lse: base64(Float32Array.from(lse)), scale: SCALE, causal: true, offset: OFFSET, sink: false, no_values: "" },
    ...{ mask: "causal()", score: "" },
  };
  return { weights: new ComputedWeights(stored, arraysOf(stored)), scores, v };
}

describe("matrices of a saved head", async () => {
  const { weights, scores, v } = head();
  const all = await matricesOf(weights);
  const named = (name: string): (number | null)[][] => all.find((one) => one.name === name)!.values;

  it("are the steps, by their names and sizes", () => {
    const names = ["queries", "keys", "values", "raw scores", "scaled", "masked", "lse", "softmax", "output"];
    expect(all.map(({ name }) => name)).toEqual(names);
    expect(all.find(({ name }) => name === "scaled")!.formula).toBe("S[i,j] = R[i,j] / √4");
    expect(
      [named("queries"), named("values"), named("lse"), named("output")].map((x) => [x.length, x[0].length]),
    ).toEqual([
      [N_Q, D],
      [N_K, D_V],
      [N_Q, 1],
      [N_Q, D_V],
    ]);
  });

  it("hold scores, weights that sum to one, and what they take along", () => {
    scores.forEach((row, i) => {
      const sum = row.reduce((x, s) => x + Math.exp(s), 0);
      row.forEach((s, j) => {
        if (s === -Infinity) expect(named("masked")[i][j]).toBeNull();
        else expect(named("masked")[i][j]).toBeCloseTo(s, 4);
        expect(named("softmax")[i][j]).toBeCloseTo(Math.exp(s) / sum, 4);
        expect(named("raw scores")[i][j]! * SCALE).toBeCloseTo(named("scaled")[i][j]!, 4);
      });
      for (let b = 0; b < D_V; b++) {
        const out = row.reduce((x, s, j) => x + (Math.exp(s) / sum) * v[j * D_V + b], 0);
        expect(named("output")[i][b]).toBeCloseTo(out, 4);
      }
    });
  });

  it("have rows of scores before and after the mask", async () => {
    const row = await scoresOf(weights, 1);
    expect(row.length).toBe(3 * N_K);
    for (let j = 0; j < N_K; j++) {
      expect(row[j]).toBeCloseTo(named("scaled")[1][j]!, 4);
      expect(row[N_K + j]).toBeCloseTo(scores[1][j], 4);
      expect(row[2 * N_K + j]).toBeCloseTo(named("softmax")[1][j]!, 4);
    }
  });
});
