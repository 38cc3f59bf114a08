import { h, s } from "../dom";
import { figure } from "../numbers/format";
import { DeepMap, type Cell } from "../parts/deepmap";
import { marksOf } from "../parts/gridmarks";
import { Legend } from "../parts/legend";
import { mapControls } from "../parts/mapcontrols";
import { HeadPicture } from "../parts/pictures";
import { nameOf } from "../parts/sentences";
import { largest, rowBars, rowTokens, shadedText } from "../parts/tokenrow";
import {
  chosen,
  headAt,
  headName,
  latest,
  layerOf,
  lookOf,
  named,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

/** Pairs of a head up to which the column of a key is looked at beside its map: of more it takes a pass. */
const SMALL = 2 ** 22;

/** One head as a map of queries × keys; beside it, where the screen is wide, the chosen row and column. */
export const mapView: MakeView = (context) => {
  const { data, store } = context;
  const aside = h("aside", { class: "token-row", "aria-label": "The chosen row and column", tabindex: 0 });
  const map = mapPane(context, aside);
  const write = latest(context.fail);
  const describe = (): void =>
    write(async (current) => {
      const [at, { i, j }, layer] = [headAt(store.state), chosen(context), layerOf(context)];
      const [row, norms, column] = await Promise.all([
        data.row(at, i),
        data.norms(at),
        layer.n_q * layer.n_k <= SMALL ? data.column(at, j) : null,
      ]);
      const tokens = await rowTokens(context, row, i, j);
      await Promise.all((column ? largest(column) : []).map((t) => tokensOf(context).query?.load(t, t + 1)));
      if (!current()) return;
      const lookers = tokens.query && tokens.query.map((token, t) => tokensOf(context).query?.at(t) ?? token);
      aside.replaceChildren(
        h("h2", {}, `Where ${nameOf(tokens.query, i)} looks`),
        shadedText(context, row, tokens.key, layer.cross ? null : i, j),
        rowBars(context, row, tokens.key, norms),
        ...(column
          ? [
              h("h2", {}, `What looks at ${nameOf(tokens.key, j)}`),
              rowBars(context, column, lookers, new Float32Array(0), "i"),
            ]
          : []),
      );
    });
  return {
    ...map,
    update(state, changed) {
      map.update(state, changed);
      if (touches(changed, "scene", "layer", "head", "i", "j", "scale", "tone", "near")) describe();
    },
  };
};

function button(path: string, title: string, act: () => void): HTMLElement {
  const sign = s(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", class: "sign" },
    s("path", { d: path }),
  );
  return h("button", { type: "button", class: "icon", title, "aria-label": title, click: act }, sign);
}

const zoomButtons = (context: Context, map: DeepMap): HTMLElement =>
  h(
    "div",
    { class: "buttons" },
    button("M3 8h10", "Zoom out (-)", () => map.zoom(1 / 1.8)),
    button("M3 8h10M8 3v10", "Zoom in (+)", () => map.zoom(1.8)),
    button("M2.5 6V2.5H6M10 2.5h3.5V6M13.5 10v3.5H10M6 13.5H2.5V10", "Show all (0)", () => map.home()),
    button(
      "M8 1v4M8 11v4M1 8h4M11 8h4M8 4.5a3.5 3.5 0 1 0 0 7a3.5 3.5 0 1 0 0-7",
      "Go to the chosen pair (Enter)",
      () => map.reveal(chosen(context), 48),
    ),
  );

/** The readout of a pair: its tokens, its weight, and the query's weight on the learned sink. */
async function factsOf(context: Context, { info, sinks }: HeadPicture, { i, j }: Cell) {
  const at = headAt(context.store.state);
  const [query, key, weight] = await Promise.all([
    named(context, "query", i),
    named(context, "key", j),
    context.data.weight(at, info, i, j),
  ]);
  return {
    names: `query ${query} → key ${key}`,
    weight,
    value: Number.isNaN(weight) ? "hidden by the mask" : figure(weight),
    sink: sinks.length ? ` · query → the learned sink ${figure(sinks[i])}` : "",
  };
}

function titleOf({ scene, store }: Context): string {
  const { layer, head } = store.state;
  return `${headName(scene, layer, head)}: a row for each query, a column for each key`;
}

/** A map with its controls and its legend, and what stands beside it. */
export const mapPane = (context: Context, aside: HTMLElement | null): View => {
  const { store } = context;
  const legend = new Legend();
  const title = h("h2", { class: "map-title" });
  const readout = h("p", { class: "readout" });
  let picture: HeadPicture | null = null;
  /** Whether the readout tells of the learned sink, whose weights may come late. */
  let told = false;

  const write = latest(context.fail);
  const describe = (cell: Cell, aloud: boolean): void =>
    write(async (current) => {
      if (!picture) return;
      const { names, weight, value, sink } = await factsOf(context, picture, cell);
      if (!current()) return;
      told = sink !== "";
      readout.replaceChildren(names, " ", h("output", { "data-weight": String(weight) }, value), sink);
      map.tag.show(value);
      if (aloud) context.say(`${names}: ${value}`);
    });

  const map = new DeepMap({
    label: "Map of the weights of a head. Arrow keys move the chosen pair, plus and minus zoom, zero shows all.",
    minimap: true,
    marks: marksOf(context.scene),
    onPoint: (cell) => describe(cell ?? chosen(context), false),
    onPick: (cell) => store.set(cell),
    onMove: (moved) => {
      if (!picture) return;
      legend.show(picture, moved.level);
      if (picture.sinks.length && !told) describe(chosen(context), false);
    },
    onError: context.fail,
    onRest: (zoom) => store.set({ zoom }, "refine"),
  });
  if (store.state.zoom) map.look(store.state.zoom);

  title.textContent = titleOf(context); // a heading is never empty, while the first tiles are on their way
  const load = latest(context.fail);
  const show = (): void =>
    load(async (current) => {
      const made = await HeadPicture.of(context, headAt(store.state), lookOf(store.state));
      if (!current()) return;
      picture = made;
      title.textContent = titleOf(context);
      map.show(made, tokensOf(context));
      pick();
    });
  const pick = (): void => {
    const cell = chosen(context);
    map.choose(cell);
    describe(cell, document.activeElement?.classList.contains("stage") ?? false);
  };

  const element = h(
    "section",
    { class: "view map", "aria-label": "Map" },
    mapControls(store, zoomButtons(context, map)),
    title,
    aside ? h("div", { class: "map-main" }, map.element, aside) : map.element,
    h("p", { class: "note in-cell" }, "Click the map to zoom it with the wheel."),
    h("div", { class: "below" }, readout, legend.element),
  );

  return {
    element,
    update(state, changed) {
      if (changed.has("scene") || changed.has("layer") || changed.has("head")) show();
      else if (picture && touches(changed, "kind", "tone", "scale", "hide")) {
        picture.look = lookOf(state);
        map.recolour();
        legend.show(picture, map.level);
      }
      if (picture && (changed.has("i") || changed.has("j"))) pick();
      if (picture && changed.has("zoom") && state.zoom !== map.part) map.look(state.zoom);
    },
    destroy: () => map.destroy(),
  };
};
