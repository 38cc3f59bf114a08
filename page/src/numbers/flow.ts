/** A head as one flow of equations: X W_Q = Q, Q Kᵀ, softmax, P V. */

import type { HeadMatrices } from "./headmatrices";

/** A part of an equation: a sign, a matrix that is shown there, or one that is shown before, by its symbol. */
export type Part = { sign: string } | { at: number } | { again: number; symbol: string };

export interface Equation {
  heading: string;
  parts: Part[];
}

/** Signs and matrices by their numbers, −1 for one that the head does not have. */
type Draft = (string | number)[];

/** The equations by their headings: what is multiplied, and what it makes. */
function drafts(head: HeadMatrices): [heading: string, draft: Draft][] {
  const of = (name: string): number => head.indexOf(name);
  const source = of("source") < 0 ? of("input") : of("source");
  const scores = head.all.map((_, at) => at).slice(of("values") + 1, of("lse"));
  return [
    ["Queries", [of("input"), "·", of("query projection"), "=", of("projected queries"), "→", of("queries")]],
    ["Keys", [source, "·", of("key projection"), "=", of("projected keys"), "→", of("keys")]],
    ["Values", [source, "·", of("value projection"), "=", of("values")]],
    ["Scores", [of("queries"), "·", of("keys"), "=", ...scores.flatMap((at, k) => (k ? ["→", at] : [at]))]],
    ["Softmax", ["exp (", scores[scores.length - 1] ?? -1, "−", of("lse"), ") =", of("softmax")]],
    ["Output", [of("softmax"), "·", of("values"), "=", of("output")]],
    ["All heads", [of("heads side by side"), "·", of("output projection"), "=", of("written")]],
  ];
}

/** The equations of a head in order. Those of projections are left out where these are not known. */
export function flowOf(head: HeadMatrices): Equation[] {
  const shown = new Set<number>();
  const part = (one: string | number): Part => {
    if (typeof one === "string") return { sign: one };
    const { symbol, name } = head.all[one];
    if (shown.has(one)) return { again: one, symbol: name === "keys" ? `${symbol}ᵀ` : symbol };
    shown.add(one);
    return { at: one };
  };
  return drafts(head).flatMap(([heading, draft]) => {
    const left = draft.slice(0, 3).includes(-1);
    // A step that is missing in between goes with the sign after it.
    const known = draft.filter((one, k) => one !== -1 && !(typeof one === "string" && draft[k - 1] === -1));
    return left ? [] : [{ heading, parts: known.map(part) }];
  });
}
