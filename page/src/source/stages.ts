/** One weight step by step from what a saved file holds; the server's answer has the same form. */

import type { Stage } from "../data";
import type { ComputedWeights } from "./weights";

const SHOWN = 256;

export function stagesOf(weights: ComputedWeights, i: number, j: number): Stage[] {
  const { q, k, d, scale } = weights;
  const features = Array.from({ length: Math.min(d, SHOWN) }, (_, a) => a);
  const labels = features.map(String);
  const raw = weights.dot(i, j);
  const sees = weights.sees(i, j);
  const weight = sees ? weights.weight(i, j) : 0;
  const stages: Stage[] = [
    {
      name: "query",
      formula: "Q[i,a]",
      text: "The features of the query.",
      values: features.map((a) => q[i * d + a]),
      labels,
    },
    {
      name: "key",
      formula: "K[j,a]",
      text: "The features of the key.",
      values: features.map((a) => k[j * d + a]),
      labels,
    },
    {
      name: "products",
      formula: "Q[i,a]\\,K[j,a]",
      text: "Feature by feature: which of them agree.",
      values: features.map((a) => q[i * d + a] * k[j * d + a]),
      labels,
    },
    { name: "raw score", formula: "R[i,j]=\\sum_a Q[i,a]\\,K[j,a]", text: "Their sum.", value: raw },
    {
      name: "scaled",
      formula: `S[i,j]=${scale.toPrecision(4)}\\cdot R[i,j]`,
      text: "Times the scale, so that scores do not grow with the number of features.",
      value: raw * scale,
    },
    {
      name: "mask",
      formula: "S[i,j]=-\\infty\\ \\text{where}\\ j\\ \\text{is hidden}",
      text: sees ? "This query sees this key." : "This query does not see this key.",
      value: sees ? raw * scale : -Infinity,
    },
    {
      name: "lse",
      formula: "\\mathrm{lse}[i]=\\log\\sum_j \\exp S[i,j]",
      text: "The logarithm of the sum over every key that this query sees.",
      value: weights.lse[i],
    },
    {
      name: "softmax",
      formula: "P[i,j]=\\exp\\left(S[i,j]-\\mathrm{lse}[i]\\right)",
      text: "The weight: the share of this query's attention.",
      value: weight,
    },
  ];
  const held = weights.values();
  if (held) {
    const parts = Array.from({ length: Math.min(held.d_v, SHOWN) }, (_, b) => weight * held.v[j * held.d_v + b]);
    stages.push({
      name: "its part of the output",
      formula: "P[i,j]\\,V[j,b]",
      text: "What this key adds to the output of this query.",
      values: parts,
      labels: parts.map((_, b) => String(b)),
    });
  }
  return stages;
}
