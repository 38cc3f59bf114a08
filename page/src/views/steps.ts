import "katex/dist/katex.min.css";

import drawings from "virtual:formulas";

import type { Stage } from "../data";
import { drawn } from "../numbers/formulas";
import { h } from "../dom";
import { figure } from "../numbers/format";
import { tokenChooser } from "../parts/chooser";
import { matricesPanel, MOST, questionOf } from "../parts/matrices";
import { rowStrips } from "../parts/rowstrips";
import { Refused } from "../source/source";
import { chosen, headAt, latest, layerOf, tokensOf, touches, type MakeView } from "./view";

/** The matrices by the stages of one pair. */
const PLURAL: Record<string, string> = { query: "queries", key: "keys", value: "values", "weighted sum": "output" };

const NO_PROJECTIONS = "A saved page holds queries, keys and values: start `regard look` to see what made them.";

/** One weight, from query and key to the output; its row; and every matrix of a small head. */
export const stepsView: MakeView = (context) => {
  const { data, store } = context;
  const controls = h("div", { class: "controls" });
  const stages = h("ol", { class: "stages" });
  const missing = h("p", { class: "empty", role: "status" });
  const element = h("section", { class: "view steps", "aria-label": "Step by step" }, controls, missing);
  const all = matricesPanel(context);
  const strips = rowStrips(context);
  const long = h("p", { class: "help long" });
  const one = h(
    "section",
    { class: "one-pair", "aria-label": "One pair" },
    h("h2", {}, "One query and one key, number by number"),
    stages,
  );
  element.append(all.element, long, strips.element, one);

  function stageElement(stage: Stage, number: number): HTMLElement {
    const formula = h("div", { class: "formula" });
    const html = drawn(stage.formula, drawings);
    if (html === undefined) formula.textContent = stage.formula;
    else formula.innerHTML = html;
    const item = h(
      "li",
      { class: "stage-card" },
      h("h2", {}, h("span", { class: "number", "aria-hidden": "true" }, String(number)), stage.name),
      questionOf(PLURAL[stage.name] ?? stage.name) && h("em", {}, questionOf(PLURAL[stage.name] ?? stage.name)),
      formula,
      h("p", {}, stage.text),
    );
    if (stage.values) item.append(bars(stage.values, stage.labels ?? []));
    if (stage.value !== undefined)
      item.append(
        h(
          "p",
          { class: "value" },
          h("output", { "data-stage": stage.name, "data-value": String(stage.value) }, figure(stage.value)),
        ),
      );
    return item;
  }

  const load = latest(context.fail);
  const show = (): void => {
    const layer = layerOf(context);
    const { i, j } = chosen(context);
    const active = controls.contains(document.activeElement) ? document.activeElement?.getAttribute("title") : null;
    controls.replaceChildren(
      tokenChooser(context, "Query", "query", i, layer.n_q, (to) => store.set({ i: to })),
      tokenChooser(context, "Key", "key", j, layer.n_k, (to) => store.set({ j: to })),
    );
    if (active) controls.querySelector<HTMLElement>(`[title="${active}"]`)?.focus();
    load(async (current) => {
      const answer = await data.stages(headAt(store.state), i, j).catch((error: unknown) => {
        if (!(error instanceof Refused)) throw error;
        return error.message;
      });
      if (!current()) return;
      missing.textContent = typeof answer === "string" ? answer : "";
      stages.replaceChildren(
        ...(typeof answer === "string" ? [] : answer.map((stage, k) => stageElement(stage, k + 1))),
      );
      strips.element.hidden = one.hidden = typeof answer === "string";
      if (typeof answer === "string") return;
      const scores = await data.scores(headAt(store.state), i);
      if (current()) strips.show(scores, i, j);
    });
  };

  const fetchAll = latest(context.fail);
  /** The matrices anew, or what is chosen in them. */
  const showAll = (anew: boolean): void => {
    const { n_q, n_k } = layerOf(context);
    const few = Math.max(n_q, n_k) <= MOST;
    const { i, j } = chosen(context);
    all.element.hidden = !few;
    const own = context.scene.kind === "example" || context.scene.kind === "cross";
    const unknown = own && data.source.kind === "file" && !context.scene.editable ? NO_PROJECTIONS : "";
    long.textContent = few
      ? unknown
      : `All matrices are shown of up to ${MOST} tokens: type a shorter text to see them.`;
    if (!few) return;
    if (!anew) {
      all.mark(i, j);
      return;
    }
    fetchAll(async (current) => {
      const tokens = tokensOf(context);
      await Promise.all([tokens.query?.load(0, n_q), tokens.key?.load(0, n_k)]);
      const matrices = await data.matrices(headAt(store.state)).catch((error: unknown) => {
        if (!(error instanceof Refused)) throw error;
        return null;
      });
      if (!current()) return;
      all.element.hidden = !matrices;
      if (matrices) all.show(matrices, i, j);
    });
  };

  return {
    element,
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head", "i", "j", "scale")) show();
      if (touches(changed, "scene", "layer", "head", "scale")) showAll(true);
      else if (touches(changed, "i", "j")) showAll(false);
    },
    destroy: () => strips.destroy(),
  };
};

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
