/** Statistics of heads, as `regard.insight` defines them, and profiles along a text, from rows of weights. */

import type { Finding, HeadRow, NamedKind, Profile } from "../data";

export const KINDS = [
  "previous token",
  "duplicate token",
  "induction",
  "first-token sink",
  "current token",
  "n tokens back",
];

/** The score from which a head is called by its kind, and that from which the kind is certain. */
export const NOTABLE = 0.25;
const CLEAR = 0.5;

export const DISTANCES = [2, 3, 4, 5];
/** Rows that a distance must have. */
export const LEAST_ROWS = 8;

/** What is summed over the rows of one head; NaN where a score has no meaning. */
export interface Summary {
  scores: Record<string, number>;
  /** The distance of "n tokens back". */
  distance: number | null;
  entropy: number;
  normalizedEntropy: number;
  profiles: Record<string, Profile>;
}

class Mean {
  private sum = 0;
  count = 0;
  add(x: number): void {
    this.sum += x;
    this.count++;
  }
  get value(): number {
    return this.count ? this.sum / this.count : 0;
  }
}

/** Whether some run of so many tokens occurs twice. */
function repeats(ids: Uint8Array, length: number): boolean {
  const seen = new Set<string>();
  for (let i = 0; i + length <= ids.length; i++) {
    const run = ids.subarray(i, i + length).join();
    if (seen.has(run)) return true;
    seen.add(run);
  }
  return false;
}

/** The keys before each token whose last `length` tokens are its own. */
export function copiesOf(ids: Uint8Array, length: number): number[][] {
  return Array.from(ids, (_, i) => {
    const found: number[] = [];
    for (let j = length - 1; j < i; j++) {
      let back = 0;
      while (back < length && ids[i - back] === ids[j - back]) back++;
      if (back === length) found.push(j);
    }
    return found;
  });
}

/**
 * Statistics of a head on a text of n tokens.
 *
 * row: weights of query i, 0 where a key is hidden. lse: of each query. labels: of profiles.
 */
export function summaryOf(
  row: (i: number) => ArrayLike<number>,
  lse: Float32Array,
  ids: Uint8Array,
  prefix: number,
  causal: boolean,
  labels: Record<string, string>,
): Summary {
  const n = ids.length;
  const [previous, duplicate, induction, sink, current, entropy, normalized] = Array.from(
    { length: 7 },
    () => new Mean(),
  );
  const back = DISTANCES.map(() => new Mean());
  const [copies, runs] = [copiesOf(ids, 1), copiesOf(ids, prefix)];
  const [entropies, evenness, first] = [new Float64Array(n), new Float64Array(n), new Float64Array(n)];
  const [received, byDistance] = [new Float64Array(n), new Float64Array(2 * n - 1)];
  for (let i = 0; i < n; i++) {
    const w = row(i);
    for (let j = 0; j < n; j++) {
      const weight = w[j];
      received[j] += weight;
      byDistance[i - j + n - 1] += weight;
      if (weight > 0) entropies[i] -= weight * Math.log(weight);
    }
    evenness[i] = entropies[i] / Math.log(Math.max(causal ? i + 1 : n, 2));
    first[i] = w[0];
    const sumOver = (keys: number[], by: number): number => keys.reduce((sum, j) => sum + w[j + by], 0);
    if (copies[i].length) duplicate.add(sumOver(copies[i], 0));
    if (runs[i].length) induction.add(sumOver(runs[i], 1));
    DISTANCES.forEach((distance, k) => i > distance && back[k].add(w[i - distance]));
    if (!i) continue;
    previous.add(w[i - 1]);
    current.add(w[i]);
    sink.add(w[0]);
    entropy.add(entropies[i]);
    normalized.add(evenness[i]);
  }
  const known = back.map((mean) => (mean.count >= LEAST_ROWS ? mean.value : -1));
  const best = Math.max(...known);
  const values = [
    previous.value,
    repeats(ids, 1) ? duplicate.value : NaN,
    repeats(ids, prefix) ? induction.value : NaN,
    sink.value,
    current.value,
    Math.max(0, best),
  ];
  const plain = (name: string, x: ArrayLike<number>): Profile => ({
    start: 0,
    step: 1,
    label: labels[name],
    values: finite(x),
  });
  return {
    scores: Object.fromEntries(KINDS.map((kind, k) => [kind, values[k]])),
    distance: best >= 0 ? DISTANCES[known.indexOf(best)] : null,
    entropy: entropy.value,
    normalizedEntropy: normalized.value,
    profiles: {
      offset: alongDistances(byDistance, n, causal, labels.offset),
      entropy: plain("entropy", entropies),
      normalized_entropy: plain("normalized_entropy", evenness),
      received: plain("received", received),
      sink: plain("sink", first),
      lse: plain("lse", lse),
    },
  };
}

/** The mean weight of the pairs at each distance i − j. */
function alongDistances(totals: Float64Array, n: number, causal: boolean, label: string): Profile {
  const from = causal ? totals.findIndex((x) => x !== 0) : 0;
  const to = causal ? totals.findLastIndex((x) => x !== 0) + 1 : totals.length;
  const start = from - n + 1;
  const distances = Array.from({ length: to - from }, (_, k) => start + k);
  const pairs = distances.map((distance) => n - Math.abs(distance));
  return {
    start,
    step: 1,
    label,
    values: pairs.map((count, k) => totals[from + k] / count),
    edges: [...distances, start + distances.length],
    pairs,
  };
}

const finite = (x: ArrayLike<number>): (number | null)[] => Array.from(x, (y) => (Number.isFinite(y) ? y : null));

/** A head's row in the table of all. */
export function headRow(layer: number, head: number, summary: Summary): HeadRow {
  const { scores, distance, entropy, normalizedEntropy } = summary;
  const kinds: NamedKind[] = KINDS.filter((kind) => scores[kind] >= NOTABLE)
    // Heads rest on the first token where they find nothing else: that is always last.
    .sort((a, b) => Number(a === "first-token sink") - Number(b === "first-token sink") || scores[b] - scores[a])
    .map((kind) => ({
      kind,
      name: kind === "n tokens back" && distance ? `${distance} tokens back` : kind,
      score: scores[kind],
      tentative: scores[kind] < CLEAR,
    }));
  const numbers = { ...scores, entropy, "normalized entropy": normalizedEntropy };
  const told = Object.fromEntries(Object.entries(numbers).map(([name, x]) => [name, Number.isFinite(x) ? x : null]));
  return { layer, head, kv_head: head, kind: kinds[0]?.kind ?? null, kinds, scores: told };
}

/** The head to open on: the strongest induction head, or else the one with the most concentrated weights. */
export function findingOf(rows: readonly HeadRow[]): Finding {
  const score = (row: HeadRow, of: string): number => row.scores[of] ?? -1;
  const best = rows.reduce((one, other) => (score(other, "induction") > score(one, "induction") ? other : one));
  const free = rows.filter((row) => !(score(row, "first-token sink") >= CLEAR));
  const evenness = (row: HeadRow): number => row.scores["normalized entropy"] ?? Infinity;
  const least = (free.length ? free : rows).reduce((one, other) => (evenness(other) < evenness(one) ? other : one));
  const { layer, head } = score(best, "induction") >= NOTABLE ? best : least;
  return { layer, head, i: -1, how: "" };
}

/** The induction score of a causal head that attends evenly. */
export function byChance(ids: Uint8Array, prefix: number): number {
  const rows = copiesOf(ids, prefix)
    .map((found, i) => found.length / (i + 1))
    .filter((share) => share > 0);
  return rows.length ? rows.reduce((sum, x) => sum + x, 0) / rows.length : 0;
}
