/** What is said of the matrices of a head: a question each answers, and one number of them. */

import { printable } from "../numbers/format";
import { pairOf, type HeadMatrices, type Spot, type Value } from "../numbers/headmatrices";
import { originOf, said, type Origin } from "../numbers/origins";

const QUESTIONS: Record<string, string> = {
  input: "What is known of each token?",
  source: "What is known of each token looked at?",
  "query projection": "Which of it says what a token looks for?",
  "projected queries": "Before the rotary embedding",
  "key projection": "Which of it says what a token contains?",
  "projected keys": "Before the rotary embedding",
  "value projection": "What does a token pass on?",
  "heads side by side": "The outputs of all heads, concatenated",
  "output projection": "What becomes of it?",
  written: "What does the layer add to each token?",
  queries: "What do I look for?",
  keys: "What do I contain?",
  values: "What do I provide?",
  "raw scores": "How well do they fit?",
  scaled: "The same on a moderate scale",
  masked: "Whom may I see?",
  lse: "The logarithm of the softmax's denominator",
  softmax: "How much do I look at each?",
  output: "The weighted sum of the values",
};

/** The question that a quantity of the head answers, in a token's words. */
export const questionOf = (name: string): string => QUESTIONS[name] ?? "";

/** A query's or a key's token, if it is known. */
export type TokenAt = (axis: "query" | "key", index: number) => string | undefined;

/** The sentence about one number. */
export interface Told {
  value: Value;
  name: string;
  /** The number with its indices: S[1,2] = 0.5. */
  number: string;
  /** How it came about, and whose it is. */
  about: string;
  from: Origin["from"];
}

export function toldOf(head: HeadMatrices, spot: Spot, tokenAt: TokenAt): Told {
  const matrix = head.all[spot.at];
  const { symbol, name, tensor } = matrix;
  const { how, from } = originOf(head, spot);
  const value = head.valueAt(spot);
  const indices = tensor.includes(",") ? `${spot.row},${spot.col}` : String(spot.row);
  const { i, j } = pairOf(matrix, spot);
  const token = (axis: "query" | "key", index: number | undefined): string[] => {
    if (index === undefined) return [];
    const text = tokenAt(axis, index);
    return [`${axis} ${index}${text === undefined ? "" : ` “${printable(text)}”`}`];
  };
  const whose = [...token("query", i), ...token("key", j)].join(", ") || "the same for every token";
  return {
    value,
    name,
    number: `${symbol}[${indices}] = ${said(value)}`,
    about: `  ${how}  (${name}; ${whose})`,
    from,
  };
}
