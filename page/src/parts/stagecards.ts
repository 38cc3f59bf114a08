/** One weight step by step: a card for each stage, with its formula and its numbers. */

import "katex/dist/katex.min.css";

import drawings from "virtual:formulas";

import type { Stage } from "../data";
import { h } from "../dom";
import { figure } from "../numbers/format";
import { drawn } from "../numbers/formulas";
import { questionOf } from "./matrixwords";

/** The matrices by the stages of one pair. */
const PLURAL: Record<string, string> = { query: "queries", key: "keys", value: "values", "weighted sum": "output" };

function formulaElement(formula: string): HTMLElement {
  const element = h("div", { class: "formula" });
  const html = drawn(formula, drawings);
  if (html === undefined) element.textContent = formula;
  else element.innerHTML = html;
  return element;
}

/** Signed numbers as bars around a line; each says its label and number. */
function bars(values: readonly (number | null)[], labels: readonly string[]): HTMLElement {
  const most = Math.max(...values.map((value) => Math.abs(value ?? 0))) || 1;
  const low = Math.min(0, ...values.map((value) => value ?? 0));
  const high = Math.max(0, ...values.map((value) => value ?? 0));
  const box = h("div", {
    class: low < 0 ? "bars signed" : "bars",
    role: "img",
    "aria-label": `${values.length} numbers from ${figure(low)} to ${figure(high)}`,
  });
  values.forEach((value, k) => {
    const bar = h("span", { class: (value ?? 0) < 0 ? "negative" : "", title: `${labels[k] ?? k}: ${figure(value)}` });
    bar.style.setProperty("--size", String(Math.abs(value ?? 0) / most));
    box.append(bar);
  });
  return box;
}

function stageCard({ name, formula, text, value, values, labels }: Stage, number: number): HTMLElement {
  const question = questionOf(PLURAL[name] ?? name);
  const output = (): HTMLElement => h("output", { "data-stage": name, "data-value": String(value) }, figure(value));
  return h(
    "li",
    { class: "stage-card" },
    h("h2", {}, h("span", { class: "number", "aria-hidden": "true" }, String(number)), name),
    question && h("em", {}, question),
    formulaElement(formula),
    h("p", {}, text),
    values && bars(values, labels ?? []),
    value !== undefined && h("p", { class: "value" }, output()),
  );
}

export const stageCards = (stages: readonly Stage[]): HTMLElement[] =>
  stages.map((stage, k) => stageCard(stage, k + 1));
