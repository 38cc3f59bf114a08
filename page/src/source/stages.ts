/** One weight step by step from what a saved file holds: the stages that the server tells, in the same words. */

import type { Stage } from "../data";
import { isUsual } from "../numbers/scaled";
import { six } from "./matrices";
import type { ComputedWeights } from "./weights";

const SHOWN = 256;

const finite = (x: number): number | null => (Number.isFinite(x) ? x : null);

const percent = (share: number): string => `${(100 * share).toFixed(2)}%`;

/** A pair of a head, and the numbers of its row. */
interface Pair {
  weights: ComputedWeights;
  i: number;
  j: number;
  /** Scores of the row before and after the mask, and its weights; NaN where a key is hidden. */
  unmasked: Float32Array;
  masked: Float32Array;
  row: Float32Array;
  /** The symbol of the pair's score. */
  s: string;
}

/** A stage of some features, each by its number. */
function features(name: string, formula: string, text: string, n: number, of: (a: number) => number): Stage {
  const shown = Array.from({ length: Math.min(n, SHOWN) }, (_, a) => a);
  return { name, formula, text, values: shown.map(of), labels: shown.map(String) };
}

/** From the features of the query and the key to their scaled product. */
function productStages({ weights, i, j, s }: Pair): Stage[] {
  const { q, k, d, scale } = weights;
  const factor = isUsual(scale, d) ? `\\frac{1}{\\sqrt{${d}}}` : `${six(scale)}`;
  const product = (a: number): number => q[i * d + a] * k[j * d + a];
  const dot = weights.dot(i, j);
  return [
    features("query", `q_{${i}}`, `the query of row ${i}: ${d} features`, d, (a) => q[i * d + a]),
    features("key", `k_{${j}}`, `the key of row ${j}: ${d} features`, d, (a) => k[j * d + a]),
    features("products", `q_{${i},a}\\,k_{${j},a}`, "feature by feature, what the two share", d, product),
    {
      name: "dot product",
      formula: `q_{${i}}\\cdot k_{${j}}=\\sum_a q_{${i},a}\\,k_{${j},a}`,
      text: "their sum",
      value: dot,
    },
    {
      name: "scale",
      formula: `${s}=${factor}\\;q_{${i}}\\cdot k_{${j}}`,
      text: `times ${six(scale)}`,
      value: scale * dot,
    },
  ];
}

/** What the head's rules make of the score. */
function ruleStages({ weights, i, j, unmasked, masked, s }: Pair): Stage[] {
  const { mask, score, sink } = weights.head;
  const sees = masked[j] !== -Infinity;
  const stages: Stage[] = [];
  if (score)
    stages.push({
      name: "rules",
      formula: `${s}\\leftarrow f(${s},${i},${j})`,
      text: `the score rule ${score}`,
      value: finite(unmasked[j]),
    });
  const hidden = `is hidden: its score becomes minus infinity, its weight 0${mask && ` by the mask ${mask}`}`;
  if (mask || score || sink || !sees)
    stages.push({
      name: "mask",
      formula: sees ? s : `${s}\\leftarrow-\\infty`,
      text: `key ${j} ${sees ? "is seen" : hidden}`,
      value: finite(masked[j]),
    });
  return stages;
}

/** From the scores of the row to the weight. `share`: the row's weight on the learned sink, if there is one. */
function softmaxStages({ weights, i, j, masked, row, s }: Pair, share?: number): Stage[] {
  const { sink } = weights.head;
  const lse = weights.lse[i];
  const seen = masked.reduce((count, x) => count + Number(x !== -Infinity), 0);
  const weight = row[j] || 0;
  const stages: Stage[] = [
    {
      name: "log-sum-exp",
      formula: `\\mathrm{lse}_{${i}}=\\log\\left(\\sum_j e^{s_{${i},j}}${sink ? "+e^{\\mathrm{sink}}" : ""}\\right)`,
      text: Number.isFinite(lse)
        ? `over the ${seen} keys that row ${i} sees${sink ? ", and the sink" : ""}`
        : `row ${i} sees no key: minus infinity`,
      value: finite(lse),
    },
  ];
  if (share !== undefined)
    stages.push({
      name: "sink",
      formula: `p_{${i},\\mathrm{sink}}=e^{\\mathrm{sink}-\\mathrm{lse}_{${i}}}`,
      text: `row ${i} leaves ${percent(share)} of its attention to the learned sink`,
      value: share,
    });
  stages.push({
    name: "softmax weight",
    formula: `p_{${i},${j}}=e^{${s}-\\mathrm{lse}_{${i}}}`,
    text: `row ${i} looks at row ${j} with ${percent(weight)} of its attention`,
    value: weight,
  });
  return stages;
}

/** The output of a row: the values of all keys, by their weights. */
function summed(row: Float32Array, v: Float32Array, d_v: number): Float64Array {
  const out = new Float64Array(d_v);
  row.forEach((share, key) => {
    if (share > 0) for (let b = 0; b < d_v; b++) out[b] += share * v[key * d_v + b];
  });
  return out;
}

/** From the weight to the output; a sentence in its place where values were not saved. */
function valueStages({ weights, i, j, row }: Pair): Stage[] {
  const sum = `o_{${i}}=\\sum_j p_{${i},j}\\,v_j`;
  const held = weights.values();
  if (!held) return [{ name: "weighted sum", formula: sum, text: `not shown: ${weights.head.no_values}`, value: null }];
  const { v, d_v } = held;
  const value = (b: number): number => v[j * d_v + b];
  const times = (b: number): number => (row[j] || 0) * value(b);
  const out = summed(row, v, d_v);
  return [
    features("value", `v_{${j}}`, `the value of row ${j}: ${d_v} features`, d_v, value),
    features("times value", `p_{${i},${j}}\\,v_{${j}}`, "what this key adds to the output", d_v, times),
    features("weighted sum", sum, `over all keys: the output of row ${i}`, d_v, (b) => out[b]),
  ];
}

/** share: the weight of query i on the learned sink, if there is one. */
export async function stagesOf(weights: ComputedWeights, i: number, j: number, share?: number): Promise<Stage[]> {
  const { n_k } = weights;
  const { unmasked, masked } = await weights.scores(i, i + 1, 0, n_k);
  const row = await weights.block(i, i + 1, 0, n_k);
  const pair = { weights, i, j, unmasked, masked, row, s: `s_{${i},${j}}` };
  return [...productStages(pair), ...ruleStages(pair), ...softmaxStages(pair, share), ...valueStages(pair)];
}
