/** What is said of a row, filled into the patterns that the terminal uses too. */

import type { Scene, Words } from "../data";
import { count, printable } from "../numbers/format";
import { filled } from "./terms";

const LONGEST_RUN = 24;
const LONGEST_TOKEN = 24;

export function quoted(token: string): string {
  const text = Array.from(printable(token));
  const half = LONGEST_TOKEN >> 1;
  const shown =
    text.length <= LONGEST_TOKEN ? text.join("") : `${text.slice(0, half).join("")}…${text.slice(-half).join("")}`;
  return `“${shown}”`;
}

export const nameOf = (tokens: { readonly [index: number]: string } | null, index: number): string =>
  tokens ? `${count(index)} ${quoted(tokens[index] ?? "")}` : count(index);

/** The longest run of tokens that ends both at query i and before key j; empty if it is shorter than `least`. */
export function runBefore(
  queries: readonly string[],
  keys: readonly string[],
  i: number,
  j: number,
  least: number,
): string {
  let length = 0;
  while (length < LONGEST_RUN && length < Math.min(i + 1, j) && queries[i - length] === keys[j - 1 - length]) length++;
  return length >= least ? queries.slice(i - length + 1, i + 1).join("") : "";
}

/** Where query i looks most. */
export function looks(
  words: Words,
  scene: Scene,
  row: Float32Array,
  i: number,
  tokens: { query: readonly string[]; key: readonly string[] } | null,
): string {
  let j = -1;
  row.forEach((weight, at) => weight > (j < 0 ? 0 : row[j]) && (j = at));
  const query = nameOf(tokens && tokens.query, i);
  const { patterns } = words;
  if (j < 0) return filled(patterns.unseen, { query });
  const after = tokens ? runBefore(tokens.query, tokens.key, i, j, scene.prefix) : "";
  return filled(i === scene.layers[0].n_q - 1 ? patterns.last : patterns.other, {
    query,
    key: nameOf(tokens && tokens.key, j),
    weight: row[j].toFixed(2),
    repeats: after ? filled(patterns.repeats, { after: quoted(after) }) : "",
  });
}

/** What the model expects next, with its odds; empty if that is not known. */
export function expects(words: Words, scene: Scene): string {
  const following = (scene.following ?? []).map(
    ({ token, probability }) => `${quoted(token)} ${(100 * probability).toFixed(1)}%`,
  );
  return following.length ? filled(words.patterns.expects, { tokens: following.join(", ") }) : "";
}
