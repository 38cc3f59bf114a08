import type { Layer } from "../data";
import { choice, h, redraw } from "../dom";
import { figure } from "../numbers/format";
import { curvesOf, isUsual, rowsWith, SIDES, weightsOf, type Against, type DotBlock } from "../numbers/scaled";
import { tokenChooser } from "../parts/chooser";
import { powerSlider } from "../parts/powerslider";
import { measureCharts, varianceChart } from "../parts/scalecharts";
import { scaleSide } from "../parts/scaleside";
import { nameOf } from "../parts/sentences";
import { orRefused, Refused } from "../source/source";
import {
  chosenQuery,
  headAt,
  headName,
  latest,
  layerOf,
  scaleName,
  tokensOf,
  touches,
  type Context,
  type MakeView,
} from "./view";

/** What a reader sets, besides what the page's state holds. */
interface Settings {
  temperature: number;
  against: Against;
}

/** What is shown: the rows around query i of one head, and the variances of its dot products. */
interface Shown {
  block: DotBlock;
  i: number;
  variance: number[];
}

/** The settings, and their controls with that of the query; `changed` is called when they are others. */
function scaleControls(context: Context, changed: () => void) {
  const settings: Settings = { temperature: 1, against: "temperature" };
  const element = h("div", { class: "controls" });
  const temperature = (): HTMLElement =>
    powerSlider("Temperature", [-1.5, 1.5, 0.05], settings.temperature, (to) => {
      settings.temperature = to;
      changed();
    });
  const axes = (["temperature", "d"] as const).map((name) => [name, name] as const);
  const axis = (): HTMLElement =>
    choice("Curves against", axes, settings.against, (to) => {
      settings.against = to as Against;
      changed();
    });
  const show = (): void => {
    const { store } = context;
    const layer = layerOf(context);
    const i = chosenQuery(store.state, layer);
    const query = tokenChooser(context, "Query", "query", i, layer.n_q, (to) => store.set({ i: to }));
    redraw(element, query, temperature(), axis());
  };
  return { element, settings, show };
}

/** What is said below the maps. */
function noteOf({ scale, d, plain, rules, n_q }: Layer, { r0, r1 }: DotBlock, token: string): string {
  const some = r1 - r0 === n_q ? "" : `, rows ${r0} to ${r1 - 1}`;
  const parts = [
    `Both maps have one colour scale, from 0 to 1${some}. The marked row, also as bars, is query ${token}.`,
    isUsual(scale, d) ? "" : `This layer scales by ${figure(scale)} itself.`,
    plain ? "" : `Of its rules (${rules}) only what hides keys is applied here.`,
  ];
  return parts.filter(Boolean).join(" ");
}

/** The maps, bars and charts of what is shown. */
function scaleMain(context: Context) {
  const sides = [scaleSide("with 1/√d"), scaleSide("without")];
  const pair = h("div", { class: "pair" }, ...sides.map(({ element }) => element));
  const charts = h("div", { class: "charts" });
  const name = (title: string, d: number): void => {
    sides[0].title.textContent = `${title} with 1/√d, d = ${d}`;
    sides[1].title.textContent = `${title} without`;
  };
  const hide = (hidden: boolean): void => void (pair.hidden = charts.hidden = hidden);
  const draw = ({ block, i, variance }: Shown, { temperature, against }: Settings): void => {
    const colours = scaleName(context.store.state);
    for (const side of SIDES) sides[side].show(weightsOf(block, side, temperature), i - block.r0, colours, block.sink);
    const curves = curvesOf(block, i, against, temperature);
    const [axis, mark] = against === "d" ? ["d, features of random vectors", block.d] : ["temperature", temperature];
    charts.replaceChildren(
      ...measureCharts(curves, axis, mark),
      ...(variance.length > 1 ? [varianceChart(variance)] : []),
    );
  };
  return { element: h("div", { class: "scale-main" }, pair, charts), name, hide, draw };
}

/** Asks for what is shown of the chosen query, its token included. */
async function shownOf(context: Context): Promise<Shown> {
  const { data, store } = context;
  const [at, layer] = [headAt(store.state), layerOf(context)];
  const i = chosenQuery(store.state, layer);
  const sink = layer.sinks?.[at.head] ?? -Infinity;
  const [r0, r1] = rowsWith(i, layer.n_q, layer.n_k);
  const [dots, variance] = await Promise.all([
    data.dots(at, r0, r1, 0, layer.n_k),
    data.variance(at),
    tokensOf(context).query?.load(i, i + 1),
  ]);
  return { block: { dots, r0, r1, n_k: layer.n_k, d: layer.d, sink }, i, variance };
}

/** Scores with and without 1/√d side by side, at any temperature. */
export const scaleView: MakeView = (context) => {
  const { store, scene } = context;
  let shown: Shown | null = null;
  const main = scaleMain(context);
  const draw = (): void => void (shown && main.draw(shown, controls.settings));
  const controls = scaleControls(context, draw);
  const missing = h("p", { class: "empty", role: "status" });
  const note = h("p", { class: "note" });
  const load = latest(context.fail);
  const show = (): void => {
    controls.show();
    load(async (current) => {
      const answer = await orRefused(shownOf(context));
      if (!current()) return;
      const refused = answer instanceof Refused;
      shown = refused ? null : answer;
      missing.textContent = refused ? answer.message : "";
      main.hide(refused);
      if (refused) return;
      const [{ layer, head }, tokens] = [store.state, tokensOf(context).query];
      const token = nameOf(tokens && { [answer.i]: tokens.at(answer.i) ?? "" }, answer.i);
      main.name(headName(scene, layer, head), answer.block.d);
      note.textContent = noteOf(layerOf(context), answer.block, token);
      draw();
    });
  };
  const attributes = { class: "view scale", "aria-label": "Scale", tabindex: 0 };
  return {
    element: h("section", attributes, controls.element, missing, main.element, note),
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head", "i")) show();
      else if (changed.has("scale")) draw();
    },
  };
};
