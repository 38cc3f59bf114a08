/** The model without the chosen head: its loss, what it expects next, and where in the text it is missed. */

import type { Ablation } from "../data";
import { h } from "../dom";
import { css, ramp, readableOn, SIGNED } from "../numbers/colour";
import { harderBy, outcome, percent, shades } from "../numbers/effects";
import { changeText, printable, readable } from "../numbers/format";
import { amount } from "./amount";
import { nameOf } from "./sentences";

/** Tokens of a long text that are shown, those around the chosen one. */
const SHOWN = 600;

function oddsRow({ token, before, after, actual }: Ablation["odds"][number], stands: string): HTMLElement {
  const word = h("span", { class: "word" }, printable(token));
  return h(
    "tr",
    { "data-odds": token },
    h("th", { scope: "row" }, word, actual && h("small", {}, stands)),
    h("td", { "data-before": before }, amount(before, percent(before), "before")),
    h("td", { "data-after": after }, amount(after, percent(after), "after")),
  );
}

function oddsTable(odds: Ablation["odds"], stands: string): HTMLElement {
  const heads = ["token", "with the head", "without it"].map((text) => h("th", { scope: "col" }, text));
  return h(
    "table",
    { class: "odds" },
    h("thead", {}, h("tr", {}, ...heads)),
    h("tbody", {}, ...odds.map((one) => oddsRow(one, stands))),
  );
}

/** Token t, shaded by how much harder it is to predict without the head. */
function shadedToken(tokens: readonly string[], t: number, by: number | null, shade: number | null): HTMLElement {
  const text = readable(tokens[t]).replaceAll("\n", "↵") || "∅";
  const title = by === null ? "given, not predicted" : `${nameOf(tokens, t)}: ${changeText(by)} nats`;
  const span = h("span", { class: "token", "data-token": t, title }, text);
  if (shade === null) return span;
  const colour = ramp(SIGNED, shade);
  span.style.background = css(colour);
  span.style.color = readableOn(colour);
  return span;
}

/** The text around token i, shaded by how much harder each token is to predict without the head. */
function harderText(ablation: Ablation, tokens: readonly string[], i: number): HTMLElement {
  const start = Math.max(0, Math.min(tokens.length - SHOWN, i - (SHOWN >> 1)));
  const stop = Math.min(tokens.length, start + SHOWN);
  const changes = harderBy(ablation, tokens.length);
  const places = shades(changes);
  const spans = tokens.slice(start, stop).map((_, k) => {
    const t = start + k;
    return shadedToken(tokens, t, changes[t], places[t]);
  });
  spans[i - start]?.classList.add("query");
  return h("p", { class: "shaded" }, start > 0 && "… ", ...spans, stop < tokens.length && " …");
}

/** What is said of the model without a head, at token i. */
export function withoutHead(head: string, ablation: Ablation, tokens: readonly string[], i: number): Node[] {
  const odds = oddsTable(ablation.odds, ablation.predicts === "masked" ? " stands here" : " comes next");
  const said = [h("h2", {}, `Without ${head}`), h("p", { class: "outcome" }, outcome(ablation.losses))];
  if (!ablation.predicts) return [...said, h("h2", {}, "What the model answers last"), odds];
  const place = ablation.predicts === "masked" ? "in place of" : "after";
  return [
    ...said,
    h("h2", {}, `What the model expects ${place} ${nameOf(tokens, i)}`),
    odds,
    h("h2", {}, "Where in the text"),
    h(
      "p",
      { class: "help" },
      "Orange: harder to predict without the head; blue: easier. Choose a token to see its odds.",
    ),
    harderText(ablation, tokens, i),
  ];
}
