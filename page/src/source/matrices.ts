/** The matrices of one head, and the scores of one query, from what a saved file holds: as the server tells them. */

import type { Matrix } from "../data";
import { isUsual } from "../numbers/scaled";
import type { ComputedWeights } from "./weights";

export const six = (x: number): number | null => (Number.isFinite(x) ? Number(x.toPrecision(6)) : null);

export async function matricesOf(weights: ComputedWeights): Promise<Matrix[]> {
  const { n_q, n_k, d, scale, lse } = weights;
  const { mask, score } = weights.head;
  const { unmasked, masked } = await weights.scores(0, n_q, 0, n_k);
  const P = (await weights.block(0, n_q, 0, n_k)).map((weight) => weight || 0); // NaN where it is hidden
  const made = (n: number, width: number, of: (r: number, c: number) => number): (number | null)[][] =>
    Array.from({ length: n }, (_, r) => Array.from({ length: width }, (__, c) => six(of(r, c))));
  const raw = scale === 1 ? "S" : "R";
  const matrices: Matrix[] = [
    {
      name: "queries",
      symbol: "Q",
      tensor: "Q[i,a]",
      formula: "",
      values: made(n_q, d, (i, a) => weights.q[i * d + a]),
    },
    { name: "keys", symbol: "K", tensor: "K[j,a]", formula: "", values: made(n_k, d, (j, a) => weights.k[j * d + a]) },
  ];
  const held = weights.values();
  if (held) {
    const values = made(n_k, held.d_v, (j, b) => held.v[j * held.d_v + b]);
    matrices.push({ name: "values", symbol: "V", tensor: "V[j,b]", formula: "", values });
  }
  matrices.push({
    name: "raw scores",
    symbol: raw,
    tensor: `${raw}[i,j]`,
    formula: `${raw}[i,j] = Q[i,a] K[j,a]`,
    values: made(n_q, n_k, (i, j) => weights.dot(i, j)),
  });
  const scores = { symbol: "S", tensor: "S[i,j]" };
  if (scale !== 1) {
    const formula = `S[i,j] = ${isUsual(scale, d) ? `R[i,j] / √${d}` : `${six(scale)} · R[i,j]`}`;
    matrices.push({ name: "scaled", ...scores, formula, values: made(n_q, n_k, (i, j) => scale * weights.dot(i, j)) });
  }
  const pairs = (x: Float32Array): (number | null)[][] => made(n_q, n_k, (i, j) => x[i * n_k + j]);
  if (score) matrices.push({ name: "score", ...scores, formula: `S ← ${score}`, values: pairs(unmasked) });
  if (mask) matrices.push({ name: "masked", ...scores, formula: `S ← −∞ unless ${mask}`, values: pairs(masked) });
  const total = weights.head.sink ? "(Σ_j exp S[i,j] + exp sink)" : "Σ_j exp S[i,j]";
  matrices.push(
    {
      name: "lse",
      symbol: "lse",
      tensor: "lse[i]",
      formula: `lse[i] = log ${total}`,
      values: made(n_q, 1, (i) => lse[i]),
    },
    {
      name: "softmax",
      symbol: "P",
      tensor: "P[i,j]",
      formula: "P[i,j] = exp(S[i,j] − lse[i])",
      values: pairs(P),
    },
  );
  if (held) {
    const { v, d_v } = held;
    const out = (i: number, b: number): number => {
      let sum = 0;
      for (let j = 0; j < n_k; j++) sum += P[i * n_k + j] * v[j * d_v + b];
      return sum;
    };
    const formula = "O[i,b] = P[i,j] V[j,b]";
    matrices.push({ name: "output", symbol: "O", tensor: "O[i,b]", formula, values: made(n_q, d_v, out) });
  }
  return matrices;
}

/** Scores of query i before and after the mask, and its weights: three rows of n_k. */
export async function scoresOf(weights: ComputedWeights, i: number): Promise<Float32Array> {
  const { n_k } = weights;
  const { unmasked, masked } = await weights.scores(i, i + 1, 0, n_k);
  const row = await weights.block(i, i + 1, 0, n_k);
  return Float32Array.from([...unmasked, ...masked, ...row.map((weight) => weight || 0)]);
}
