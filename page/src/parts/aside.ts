/** What lists leave aside unless they are told otherwise: most heads look at the first token, the token itself and its neighbours. */

import { h } from "../dom";
import { weightText } from "../numbers/format";
import type { Layer } from "../data";
import { sameTokens, type Context } from "../views/view";

/** Whether token t is left aside in the list of what tokens [from, to) attend to, or with `by`, of what attends to them. */
export function leavesAside(layer: Layer, from: number, to: number, by: boolean): (t: number) => boolean {
  if (!sameTokens(layer)) return () => false;
  return (t) => (t === 0 && !by) || (t >= from - 1 && t <= to);
}

/** Tokens in order without those that are left aside, and those; all of them where no other is left. */
export function split(order: readonly number[], leaves: (t: number) => boolean): [listed: number[], aside: number[]] {
  const listed = order.filter((t) => !leaves(t));
  return listed.length ? [listed, order.filter(leaves)] : [[...order], []];
}

/** The weights that are left aside, as text. */
export function asideSaid(aside: readonly number[], weights: Float32Array, from: number, to: number): string {
  const sums = { "the first token": 0, itself: 0, "its neighbours": 0 };
  for (const t of aside) {
    const name = t >= from && t < to ? "itself" : t === 0 ? "the first token" : "its neighbours";
    sums[name] += weights[t];
  }
  const said = Object.entries(sums).filter(([, sum]) => sum > 0);
  return said.map(([name, sum]) => `${name} ${weightText(sum)}`).join(", ");
}

/** Below a list: what it leaves aside, and the switch. */
export function asideLine({ store }: Context, said: string): HTMLElement {
  const { near } = store.state;
  const text = near ? "leave the first token, itself and its neighbours aside" : "show";
  const button = h("button", { type: "button", class: "link", click: () => store.set({ near: !near }) }, text);
  return h("p", { class: "help aside-line" }, ...(near ? [button] : [`Left aside: ${said} `, button]));
}

/** Where a weight belongs in a list of tokens whose weights fall. */
export const placeOf = (weight: number, order: readonly number[], weights: Float32Array): number =>
  order.filter((t) => weights[t] > weight).length;
