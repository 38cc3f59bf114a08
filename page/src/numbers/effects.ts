/** What a model loses without one of its heads: what is drawn of it, by the page and by its figures. */

import type { Ablation, Ablations } from "../data";

/** Nats that count as a change where a token is shaded. */
const LEAST = 0.02;

/** Nats by which the loss of a text changes at least where it is said to rise or fall. */
const STILL = 0.0005;

/** A change of the loss with its sign, in nats. */
export const change = (nats: number): string => `${nats < 0 ? "−" : "+"}${Math.abs(nats).toFixed(3)}`;

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

const mean = (x: readonly number[]): number => x.reduce((sum, one) => sum + one, 0) / x.length;

/** The loss of the text with the head and without it, as a sentence. */
export function outcome({ before, after }: Ablation["losses"]): string {
  const [from, to] = [mean(before), mean(after)];
  if (Math.abs(to - from) <= STILL) return `The loss of this text stays as it is, ${from.toFixed(3)} nats a byte.`;
  const verb = to > from ? "rises" : "falls";
  return `The loss of this text ${verb} from ${from.toFixed(3)} to ${to.toFixed(3)} nats a byte.`;
}

/** By how much each token is harder to predict without the head, the first token left out, which is not predicted. */
export const harderBy = ({ before, after }: Ablation["losses"]): number[] =>
  after.map((nats, t) => nats - (before[t] ?? 0));

/** The place of each change on a scale from much harder, 0, to much easier, 1; null where it is too small to be shaded. */
export function shades(changes: readonly number[]): (number | null)[] {
  const most = Math.max(LEAST, ...changes.map(Math.abs));
  return changes.map((by) =>
    Math.abs(by) < LEAST ? null : 0.5 - (Math.sign(by) * Math.sqrt(Math.abs(by) / most)) / 2,
  );
}
