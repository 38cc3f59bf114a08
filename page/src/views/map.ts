import { h } from "../dom";
import { figure } from "../numbers/format";
import { DeepMap, type Cell } from "../parts/deepmap";
import { Legend } from "../parts/legend";
import { mapControls } from "../parts/mapcontrols";
import { HeadPicture } from "../parts/pictures";
import { chosen, headAt, latest, layerOf, lookOf, named, tokensOf, type MakeView } from "./view";

/** One head as a map of queries × keys. */
export const mapView: MakeView = (context) => {
  const { data, store } = context;
  const legend = new Legend();
  const readout = h("p", { class: "readout" });
  let picture: HeadPicture | null = null;

  const write = latest(context.fail);
  const describe = (cell: Cell, aloud: boolean): void =>
    write(async (current) => {
      if (!picture) return;
      const names = `query ${named(context, "query", cell.i)} → key ${named(context, "key", cell.j)}`;
      const weight = await data.weight(headAt(store.state), picture.info, cell.i, cell.j);
      if (!current()) return;
      const value = Number.isNaN(weight) ? "hidden by the mask" : figure(weight);
      readout.replaceChildren(names, " ", h("output", { "data-weight": String(weight) }, value));
      if (aloud) context.say(`${names}: ${value}`);
    });

  const map = new DeepMap({
    label: "Map of the weights of a head. Arrow keys move the chosen pair, plus and minus zoom, zero shows all.",
    minimap: true,
    onPoint: (cell) => describe(cell ?? chosen(store.state, layerOf(context)), false),
    onPick: (cell) => store.set(cell),
    onMove: (moved) => picture && legend.show(picture, moved.level),
    onError: context.fail,
  });

  const load = latest(context.fail);
  const show = (): void =>
    load(async (current) => {
      const made = await HeadPicture.of(data, headAt(store.state), lookOf(store.state, context.dark()));
      if (!current()) return;
      picture = made;
      map.show(made, tokensOf(context));
      pick();
    });
  const pick = (): void => {
    const cell = chosen(store.state, layerOf(context));
    map.choose(cell);
    describe(cell, document.activeElement?.classList.contains("stage") ?? false);
  };

  const button = (text: string, title: string, act: () => void): HTMLElement =>
    h("button", { type: "button", class: "icon", title, "aria-label": title, click: act }, text);
  const element = h(
    "section",
    { class: "view map", "aria-label": "Map" },
    mapControls(
      store,
      h(
        "div",
        { class: "buttons" },
        button("−", "Zoom out (-)", () => map.zoom(1 / 1.8)),
        button("+", "Zoom in (+)", () => map.zoom(1.8)),
        button("⤢", "Show all (0)", () => map.home()),
        button("⌖", "Go to the chosen pair (Enter)", () => map.reveal(chosen(store.state, layerOf(context)), 48)),
      ),
    ),
    map.element,
    h("div", { class: "below" }, readout, legend.element),
  );

  return {
    element,
    update(state, changed) {
      if (changed.has("scene") || changed.has("layer") || changed.has("head")) show();
      else if (picture && ["kind", "tone", "scale", "hide"].some((key) => changed.has(key as keyof typeof state))) {
        picture.look = lookOf(state, context.dark());
        map.recolour();
        legend.show(picture, map.level);
      }
      if (picture && (changed.has("i") || changed.has("j"))) pick();
    },
    destroy: () => map.destroy(),
  };
};
