/** One weight step by step from what a saved file holds: the stages that the server tells, in the same words. */

import type { Stage } from "../data";
import type { ComputedWeights } from "./weights";

const SHOWN = 256;

const six = (x: number): string => String(Number(x.toPrecision(6)));

const finite = (x: number): number | null => (Number.isFinite(x) ? x : null);

/** share: the weight of query i on the learned sink, if there is one. */
export async function stagesOf(weights: ComputedWeights, i: number, j: number, share?: number): Promise<Stage[]> {
  const { q, k, d, n_k, scale, lse } = weights;
  const { mask, score, sink, no_values } = weights.head;
  const { unmasked, masked } = await weights.scores(i, i + 1, 0, n_k);
  const row = await weights.block(i, i + 1, 0, n_k); // NaN where it is hidden
  const s = `s_{${i},${j}}`;
  const features = (name: string, formula: string, text: string, n: number, of: (a: number) => number): Stage => {
    const shown = Array.from({ length: Math.min(n, SHOWN) }, (_, a) => a);
    return { name, formula, text, values: shown.map(of), labels: shown.map(String) };
  };
  const product = (a: number): number => q[i * d + a] * k[j * d + a];
  const sees = masked[j] !== -Infinity;
  const weight = row[j] || 0;
  const seen = masked.reduce((count, x) => count + Number(x !== -Infinity), 0);
  const factor = Math.abs(scale * Math.sqrt(d) - 1) < 1e-6 ? `\\frac{1}{\\sqrt{${d}}}` : six(scale);
  const stages = [
    features("query", `q_{${i}}`, `the query of row ${i}: ${d} features`, d, (a) => q[i * d + a]),
    features("key", `k_{${j}}`, `the key of row ${j}: ${d} features`, d, (a) => k[j * d + a]),
    features("products", `q_{${i},a}\\,k_{${j},a}`, "feature by feature, what the two share", d, product),
    {
      name: "dot product",
      formula: `q_{${i}}\\cdot k_{${j}}=\\sum_a q_{${i},a}\\,k_{${j},a}`,
      text: "their sum",
      value: weights.dot(i, j),
    },
    {
      name: "scale",
      formula: `${s}=${factor}\\;q_{${i}}\\cdot k_{${j}}`,
      text: `times ${six(scale)}`,
      value: scale * weights.dot(i, j),
    },
    ...(score
      ? [
          {
            name: "rules",
            formula: `${s}\\leftarrow f(${s},${i},${j})`,
            text: `the score rule ${score}`,
            value: finite(unmasked[j]),
          },
        ]
      : []),
    ...(mask || score || sink || !sees
      ? [
          {
            name: "mask",
            formula: sees ? s : `${s}\\leftarrow-\\infty`,
            text: `key ${j} ${sees ? "is seen" : `is hidden: its score becomes minus infinity, its weight 0${mask && ` by the mask ${mask}`}`}`,
            value: finite(masked[j]),
          },
        ]
      : []),
    {
      name: "log-sum-exp",
      formula: `\\mathrm{lse}_{${i}}=\\log\\left(\\sum_j e^{s_{${i},j}}${sink ? "+e^{\\mathrm{sink}}" : ""}\\right)`,
      text: Number.isFinite(lse[i])
        ? `over the ${seen} keys that row ${i} sees${sink ? ", and the sink" : ""}`
        : `row ${i} sees no key: minus infinity`,
      value: finite(lse[i]),
    },
    ...(share === undefined
      ? []
      : [
          {
            name: "sink",
            formula: `p_{${i},\\mathrm{sink}}=e^{\\mathrm{sink}-\\mathrm{lse}_{${i}}}`,
            text: `row ${i} leaves ${(100 * share).toFixed(2)}% of its attention to the learned sink`,
            value: share,
          },
        ]),
    {
      name: "softmax weight",
      formula: `p_{${i},${j}}=e^{${s}-\\mathrm{lse}_{${i}}}`,
      text: `row ${i} looks at row ${j} with ${(100 * weight).toFixed(2)}% of its attention`,
      value: weight,
    },
  ];
  const sum = `o_{${i}}=\\sum_j p_{${i},j}\\,v_j`;
  const held = weights.values();
  if (!held) return [...stages, { name: "weighted sum", formula: sum, text: `not shown: ${no_values}`, value: null }];
  const { v, d_v } = held;
  const out = new Float64Array(d_v);
  for (let key = 0; key < n_k; key++) {
    const share = row[key];
    if (share > 0) for (let b = 0; b < d_v; b++) out[b] += share * v[key * d_v + b];
  }
  return [
    ...stages,
    features("value", `v_{${j}}`, `the value of row ${j}: ${d_v} features`, d_v, (b) => v[j * d_v + b]),
    features(
      "times value",
      `p_{${i},${j}}\\,v_{${j}}`,
      "what this key adds to the output",
      d_v,
      (b) => weight * v[j * d_v + b],
    ),
    features("weighted sum", sum, `over all keys: the output of row ${i}`, d_v, (b) => out[b]),
  ];
}
