/** Tokens grouped into words: the bytes of a letter, the pieces of a word, a blank with the word behind it. */

/** Where each word begins, and at last how many tokens there are. */
export function wordStarts(tokens: readonly string[]): number[] {
  const starts: number[] = [];
  let before = "";
  tokens.forEach((token, t) => {
    if (t === 0 || !joins(before, token)) starts.push(t);
    before = token;
  });
  return [...starts, tokens.length];
}

/** Whether a token goes on with the word of the one before. */
function joins(before: string, token: string): boolean {
  if (/^[₂₃₄]$/.test(token) || token.startsWith("##")) return true; // a byte of the same letter; WordPiece's mark
  if (/[\n\r]$/.test(before) || /^[\n\r]/.test(token)) return false;
  if (/^\s/.test(token)) return /^\s+$/.test(before);
  if (/^\s+$/.test(before)) return true;
  if (/\s$/.test(before)) return false;
  return WORD.test(first(token)) && WORD.test(last(before));
}

/** Letters, digits and what stands inside of words; scripts without blanks have a word a token. */
const WORD = /^(?!\p{Script=Han}|\p{Script=Hiragana}|\p{Script=Katakana}|\p{Script=Thai})[\p{L}\p{M}\p{N}_'’₂₃₄]$/u;

const first = (text: string): string => Array.from(text)[0] ?? "";
const last = (text: string): string => Array.from(text).pop() ?? "";

/** The word that holds a token, as [start, stop). */
export function wordOf(starts: readonly number[], token: number): [number, number] {
  let [low, high] = [0, starts.length - 2];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return [starts[low] ?? 0, starts[low + 1] ?? 0];
}

/** Of weights by key, the sum of each word; by query, its mean; NaN where all of it is hidden. Each token has its word's. */
export function byWords(weights: Float32Array, starts: readonly number[], how: "sum" | "mean"): Float32Array {
  const out = new Float32Array(weights.length);
  for (let k = 0; k + 1 < starts.length; k++) {
    const part = weights.subarray(starts[k], starts[k + 1]);
    const total = totalOf(part);
    out.fill(how === "sum" ? total : total / part.length, starts[k], starts[k + 1]);
  }
  return out;
}

function totalOf(part: Float32Array): number {
  let [sum, seen] = [0, 0];
  for (const weight of part) if (!Number.isNaN(weight)) [sum, seen] = [sum + weight, seen + 1];
  return seen ? sum : NaN;
}
