/** The model without the chosen head: its loss, what it expects next, and where in the text it is missed. */

import type { Ablation } from "../data";
import { h } from "../dom";
import { css, ramp, readableOn, SIGNED } from "../numbers/colour";
import { change, harderBy, outcome, percent, shades } from "../numbers/effects";
import { printable, readable } from "../numbers/format";
import { amount } from "./amount";
import { nameOf } from "./sentences";

/** Tokens of a long text that are shown, those around the chosen one. */
const SHOWN = 600;

function oddsRow({ token, before, after, actual }: Ablation["odds"][number]): HTMLElement {
  const word = h("span", { class: "word" }, printable(token));
  return h(
    "tr",
    { "data-odds": token },
    h("th", { scope: "row" }, word, actual && h("small", {}, " comes next")),
    h("td", { "data-before": before }, amount(before, percent(before), "before")),
    h("td", { "data-after": after }, amount(after, percent(after), "after")),
  );
}

function oddsTable(odds: Ablation["odds"]): HTMLElement {
  const heads = ["token", "with the head", "without it"].map((text) => h("th", { scope: "col" }, text));
  return h("table", { class: "odds" }, h("thead", {}, h("tr", {}, ...heads)), h("tbody", {}, ...odds.map(oddsRow)));
}

/** Token t, shaded by how much harder it is to predict without the head. */
function shadedToken(tokens: readonly string[], t: number, by: number, shade: number | null): HTMLElement {
  const text = readable(tokens[t]).replaceAll("\n", "↵") || "∅";
  const title = t ? `${nameOf(tokens, t)}: ${change(by)} nats` : "the beginning is given, not predicted";
  const span = h("span", { class: "token", "data-token": t, title }, text);
  if (shade === null) return span;
  const colour = ramp(SIGNED, shade);
  span.style.background = css(colour);
  span.style.color = readableOn(colour);
  return span;
}

/** The text around token i, shaded by how much harder each token is to predict without the head. */
function harderText(losses: Ablation["losses"], tokens: readonly string[], i: number): HTMLElement {
  const start = Math.max(0, Math.min(tokens.length - SHOWN, i - (SHOWN >> 1)));
  const stop = Math.min(tokens.length, start + SHOWN);
  const changes = [0, ...harderBy(losses)]; // the first token is not predicted
  const places = shades(changes);
  const spans = tokens.slice(start, stop).map((_, k) => {
    const t = start + k;
    return shadedToken(tokens, t, changes[t], places[t]);
  });
  spans[i - start]?.classList.add("query");
  return h("p", { class: "shaded" }, start > 0 && "… ", ...spans, stop < tokens.length && " …");
}

/** What is said of the model without a head, at token i. */
export const withoutHead = (head: string, { odds, losses }: Ablation, tokens: readonly string[], i: number): Node[] => [
  h("h2", {}, `Without ${head}`),
  h("p", { class: "outcome" }, outcome(losses)),
  h("h2", {}, `What the model expects after ${nameOf(tokens, i)}`),
  oddsTable(odds),
  h("h2", {}, "Where in the text"),
  h(
    "p",
    { class: "help" },
    "Orange: harder to predict without the head; blue: easier. Choose a token to see its odds.",
  ),
  harderText(losses, tokens, i),
];
