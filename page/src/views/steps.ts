import { h, redraw } from "../dom";
import { tokenChooser } from "../parts/chooser";
import { matricesPanel, MOST } from "../parts/matrices";
import { rowStrips } from "../parts/rowstrips";
import { stageCards } from "../parts/stagecards";
import { orRefused, Refused } from "../source/source";
import { chosen, headAt, latest, layerOf, tokensOf, touches, type Context, type MakeView } from "./view";

const NO_PROJECTIONS = "A saved page holds queries, keys and values: start `regard look` to see what made them.";
const TOO_LONG = `All matrices are shown of up to ${MOST} tokens: type a shorter text to see them.`;

/** Choosers of the query and the key. */
function pairControls(context: Context) {
  const { store } = context;
  const element = h("div", { class: "controls" });
  const show = (): void => {
    const { n_q, n_k } = layerOf(context);
    const { i, j } = chosen(context);
    redraw(
      element,
      tokenChooser(context, "Query", "query", i, n_q, (to) => store.set({ i: to })),
      tokenChooser(context, "Key", "key", j, n_k, (to) => store.set({ j: to })),
    );
  };
  return { element, show };
}

/** The weight of the chosen pair number by number, and the row that it is of; a sentence if these cannot be told. */
function onePair(context: Context) {
  const { data, store } = context;
  const missing = h("p", { class: "empty", role: "status" });
  const strips = rowStrips(context);
  const stages = h("ol", { class: "stages" });
  const heading = h("h2", {}, "One query and one key, number by number");
  const pair = h("section", { class: "one-pair", "aria-label": "One pair" }, heading, stages);
  const load = latest(context.fail);
  const show = (): void =>
    load(async (current) => {
      const [at, { i, j }] = [headAt(store.state), chosen(context)];
      const answer = await orRefused(data.stages(at, i, j));
      if (!current()) return;
      const refused = answer instanceof Refused;
      missing.textContent = refused ? answer.message : "";
      stages.replaceChildren(...(refused ? [] : stageCards(answer)));
      strips.element.hidden = pair.hidden = refused;
      if (refused) return;
      const scores = await data.scores(at, i);
      if (current()) strips.show(scores, i, j);
    });
  return { missing, strips, pair, show };
}

/** Every matrix of a small head, and a sentence about what is not shown. */
function allMatrices(context: Context) {
  const { data, store, scene } = context;
  const panel = matricesPanel(context);
  const note = h("p", { class: "help long" });
  const ownModel = ["example", "hand", "cross"].includes(scene.kind);
  const unknown = ownModel && data.source.kind === "file" && !scene.editable ? NO_PROJECTIONS : "";
  const fits = (): boolean => Math.max(layerOf(context).n_q, layerOf(context).n_k) <= MOST;
  const load = latest(context.fail);
  const show = (): void => {
    const { n_q, n_k } = layerOf(context);
    panel.element.hidden = !fits();
    note.textContent = fits() ? unknown : TOO_LONG;
    if (!fits()) return;
    const { i, j } = chosen(context);
    load(async (current) => {
      const tokens = tokensOf(context);
      await Promise.all([tokens.query?.load(0, n_q), tokens.key?.load(0, n_k)]);
      const matrices = await orRefused(data.matrices(headAt(store.state)));
      if (!current()) return;
      panel.element.hidden = matrices instanceof Refused;
      if (!(matrices instanceof Refused)) panel.show(matrices, i, j);
    });
  };
  const mark = (): void => {
    const { i, j } = chosen(context);
    if (fits()) panel.mark(i, j);
  };
  return { panel, note, show, mark };
}

/** One weight, from query and key to the output; its row; and every matrix of a small head. */
export const stepsView: MakeView = (context) => {
  const controls = pairControls(context);
  const one = onePair(context);
  const all = allMatrices(context);
  const parts = [controls.element, one.missing, all.panel.element, all.note, one.strips.element, one.pair];
  return {
    element: h("section", { class: "view steps", "aria-label": "Step by step" }, ...parts),
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head", "i", "j", "scale")) {
        controls.show();
        one.show();
      }
      if (touches(changed, "scene", "layer", "head", "scale")) all.show();
      else if (touches(changed, "i", "j")) all.mark();
    },
    destroy: () => one.strips.destroy(),
  };
};
