/** What a model loses without one of its heads: what is drawn of it, by the page and by its figures. */

import type { Ablation, Ablations } from "../data";
import { lossText } from "./format";

/** Nats that count as a change where a token is shaded. */
const LEAST = 0.02;

/** Nats by which the loss of a text changes at least where it is said to rise or fall. */
const STILL = 0.0005;

export const percent = (share: number): string => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

/** A head by how much the loss rises without it. */
export interface Effect {
  layer: number;
  head: number;
  by: number;
  /** Of the largest change there is. */
  share: number;
}

/** The effects of all heads, of those whose loss rises most first. */
export function effectsOf({ loss, rows }: Ablations): Effect[] {
  const changes = rows.map(({ layer, head, loss: without }) => ({ layer, head, by: without - loss }));
  const most = Math.max(...changes.map(({ by }) => Math.abs(by))) || 1;
  return changes.sort((a, b) => b.by - a.by).map((one) => ({ ...one, share: Math.abs(one.by) / most }));
}

/** The place of a head among all of them, in order; nothing while they are not known. */
export function placeSaid(name: string, effects: readonly Effect[], at: { layer: number; head: number }): string {
  const place = effects.findIndex(({ layer, head }) => layer === at.layer && head === at.head);
  return place < 0 ? "" : `${name} is in place ${place + 1} of ${effects.length}.`;
}

/** The mean of those that are known. */
function mean(x: readonly (number | null)[]): number {
  const known = x.filter((one) => one !== null);
  return known.reduce((sum, one) => sum + one, 0) / known.length;
}

/** The loss of the text with the head and without it, as a sentence. */
export function outcome({ before, after }: Ablation["losses"]): string {
  const [from, to] = [mean(before), mean(after)];
  if (Math.abs(to - from) <= STILL) return `The loss of this text stays as it is, ${lossText(from)} nats a token.`;
  const verb = to > from ? "rises" : "falls";
  return `The loss of this text ${verb} from ${lossText(from)} to ${lossText(to)} nats a token.`;
}

/** By how much each of n tokens is harder to predict without the head; null for those that are not predicted. */
export function harderBy({ losses: { before, after }, first, predicts }: Ablation, n: number): (number | null)[] {
  const changes = Array<number | null>(n).fill(null);
  after.forEach((nats, k) => {
    const from = before[k];
    const t = first + k + (predicts === "next" ? 1 : 0);
    if (nats !== null && from !== null && t < n) changes[t] = nats - from;
  });
  return changes;
}

/** The place of each change on a scale from much harder, 0, to much easier, 1; null where it is too small to be shaded. */
export function shades(changes: readonly (number | null)[]): (number | null)[] {
  const most = Math.max(LEAST, ...changes.map((by) => Math.abs(by ?? 0)));
  return changes.map((by) =>
    by === null || Math.abs(by) < LEAST ? null : 0.5 - (Math.sign(by) * Math.sqrt(Math.abs(by) / most)) / 2,
  );
}
