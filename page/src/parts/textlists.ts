/** Lists beside a text: what has weight, in other heads, and in the other direction. */

import type { TokenRow } from "../data";
import { h } from "../dom";
import { count, figure, printable, shortened, weightText } from "../numbers/format";
import { wordOf } from "../numbers/words";
import { headName, layerOf, sameTokens, type Context } from "../views/view";
import { asideLine, asideSaid, leavesAside, placeOf, split } from "./aside";
import { TAKEN } from "./moved";

export const LISTED = 10;
/** Pixels of a listed token, and above the list. */
const ENTRY = [28, 60] as const;

/** A list of tokens with weights. */
export interface Listing {
  heading: string;
  weights: Float32Array;
  /** Weights times the lengths of values; empty where those are not known. */
  taken: Float32Array;
  tokens: readonly string[];
  /** Where words begin, if tokens are listed by words. */
  starts?: readonly number[];
  /** The tokens [from, to) of which this is said, and whether it is what attends to them. */
  of: readonly [number, number];
  by: boolean;
  /** The weight on the learned sink; null where there is none. */
  sink: number | null;
  most: number;
  act(token: number): void;
}

/** Those of the tokens that have weight, the heaviest first. */
const largestOf = (of: Float32Array, among: readonly number[] = Array.from(of.keys())): number[] =>
  among.filter((t) => of[t] > 0).sort((a, b) => of[b] - of[a]);

/** A line of a list: a token with its weight, and perhaps how much of it is taken along. */
function entry(word: string | null, t: number | null, weight: number, more: number | null, act?: () => void) {
  const share = h("span", { class: "share" });
  share.style.setProperty("--share", String(weight));
  const parts = [
    word !== null && h("span", { class: "which" }, shortened(word)),
    h("small", {}, t === null ? "" : count(t)),
    share,
    h("b", {}, weightText(weight)),
    more !== null && h("b", { title: TAKEN, "data-taken": more }, figure(more)),
  ];
  return act && t !== null
    ? h("button", { type: "button", click: act, "data-weight": String(weight), "data-token": t }, ...parts)
    : h("span", { class: "row" }, ...parts);
}

const wordAt = ({ tokens, starts }: Pick<Listing, "tokens" | "starts">, t: number): string => {
  const [from, to] = starts ? wordOf(starts, t) : [t, t + 1];
  return tokens
    .slice(from, Math.min(to, from + 80))
    .map(printable)
    .join("");
};

/** A heading, the heaviest tokens, the learned sink, and what is left aside. */
export function listOf(context: Context, listing: Listing): HTMLElement[] {
  const { weights, taken, starts, of, by, sink, most } = listing;
  const layer = layerOf(context);
  const leaves = context.store.state.near ? () => false : leavesAside(layer, of[0], of[1], by);
  const leavesWord = (t: number): boolean => {
    const [from, to] = starts ? wordOf(starts, t) : [t, t + 1];
    return Array.from({ length: to - from }, (_, k) => from + k).some(leaves);
  };
  const [listed, aside] = split(largestOf(weights, starts?.slice(0, -1)), leavesWord);
  const { has_tokens } = context.scene;
  const shown = listed.slice(0, most);
  const lines = shown.map((t) =>
    entry(has_tokens ? wordAt(listing, t) : null, t, weights[t], taken.length ? taken[t] : null, () => listing.act(t)),
  );
  // A learned sink has no value: nothing of it is taken along.
  if (sink !== null) lines.splice(placeOf(sink, shown, weights), 0, entry("sink", null, sink, taken.length ? 0 : null));
  const switched = aside.length > 0 || (context.store.state.near && sameTokens(layer));
  return [
    h("h2", {}, listing.heading),
    h("p", { class: "columns", hidden: !taken.length }, h("b", {}, "weight"), h("b", { title: TAKEN }, "× ‖value‖")),
    h("ol", { class: "strongest" }, ...lines.map((line) => h("li", {}, line))),
    ...(switched ? [asideLine(context, asideSaid(aside, weights, ...of))] : []),
  ];
}

/** The key that a query looks at most in each head, of those that are not left aside. */
export function headsList(
  context: Context,
  rows: readonly TokenRow[],
  heading: string,
  i: number,
  tokens: readonly string[],
  most: number,
): HTMLElement[] {
  const { near } = context.store.state;
  const tops = rows.map((row) => {
    const leaves = near ? () => false : leavesAside(context.scene.layers[row.layer], i, i + 1, false);
    const k = row.keys.findIndex((key) => !leaves(key));
    return { ...row, key: row.keys[Math.max(0, k)], weight: k < 0 ? 0 : row.weights[k] };
  });
  const sorted = tops.filter(({ weight }) => weight > 0).sort((a, b) => b.weight - a.weight);
  if (!sorted.length) return [];
  const line = ({ layer, head, key, weight }: (typeof sorted)[number]): HTMLElement => {
    const word = context.scene.has_tokens ? printable(tokens[key]) : null;
    const button = entry(word, key, weight, null, () => context.store.set({ layer, head }));
    button.prepend(h("span", { class: "name" }, headName(context.scene, layer, head)));
    return h("li", {}, button);
  };
  return [h("h2", {}, heading), h("ol", { class: "strongest" }, ...sorted.slice(0, most).map(line))];
}

/** So many tokens fit into the list of a short text, which stands below it. */
export const fitting = (height: number): number => Math.max(LISTED, Math.floor((height - ENTRY[1]) / ENTRY[0]));
