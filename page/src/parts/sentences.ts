/** What is said of a row, filled into the patterns that the terminal uses too. */

import type { Scene, Told, Words } from "../data";
import { count, printable, weightText } from "../numbers/format";
import { filled } from "./terms";

/** The weight from which a second key, or a learned sink, is worth a sentence. */
const WORTH = 0.05;

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

const peakOf = (row: Float32Array, leaves: (j: number) => boolean): number =>
  row.reduce((best, weight, j) => (weight > (best < 0 ? 0 : row[best]) && !leaves(j) ? j : best), -1);

/** Where query i looks most. `same`: query i and key i are the same token. */
export function looks(
  words: Words,
  scene: Scene,
  row: Float32Array,
  i: number,
  tokens: { query: readonly string[]; key: readonly string[] } | null,
  same = true,
): string {
  const query = nameOf(tokens && tokens.query, i);
  const { patterns } = words;
  const said = (pattern: string, j: number): string => {
    const after = tokens ? runBefore(tokens.query, tokens.key, i, j, scene.prefix) : "";
    return filled(pattern, {
      query,
      key: nameOf(tokens && tokens.key, j),
      weight: weightText(row[j]),
      repeats: after ? filled(patterns.repeats, { after: quoted(after) }) : "",
    });
  };
  const j = peakOf(row, () => false);
  if (j < 0) return filled(patterns.unseen, { query });
  const text = [said(i === scene.layers[0].n_q - 1 ? patterns.last : patterns.other, j)];
  const left = (t: number): boolean => t === 0 || Math.abs(t - i) <= 1;
  const other = same && left(j) ? peakOf(row, left) : -1;
  if (other >= 0 && row[other] >= WORTH) text.push(said(patterns.aside, other));
  const rest = 1 - row.reduce((sum, weight) => sum + (weight || 0), 0);
  if (rest > Math.max(WORTH, row[j])) text.push(filled(patterns.resting, { share: weightText(rest) }));
  return text.join(" ");
}

/** What is said of a head's map. `dark`: its scale goes from dark to light. */
export const saysOf = (claims: readonly Told[], words: Words, dark: boolean): string =>
  claims
    .map(({ name, parts }) => filled(words.claims[name], { ...parts, shade: words.shades[dark ? 1 : 0] }))
    .join(" ");

/** The first claim in a few letters, empty if it is that of a notable kind. */
export const shortOf = ([first]: readonly Told[], words: Words): string =>
  first ? filled(words.short[first.name] ?? "", first.parts) : "";

/** What the model expects next, with its odds; empty if that is not known. */
export function expects(words: Words, scene: Scene): string {
  const following = (scene.following ?? []).map(
    ({ token, probability }) => `${quoted(token)} ${(100 * probability).toFixed(1)}%`,
  );
  return following.length ? filled(words.patterns.expects, { tokens: following.join(", ") }) : "";
}
