/** What stands above every view: what is chosen, and what can be done with it. */

import type { Scene } from "../data";
import { choice, h } from "../dom";
import { count } from "../numbers/format";
import { START, type Store } from "../state";

export type Theme = "auto" | "light" | "dark";

/** What the buttons of the header do. */
export interface Acts {
  /** None where there is no tour. */
  tour?(): void;
  share(): void;
  turn(): void;
  help(): void;
}

const SIGNS: Record<Theme, string> = { auto: "◐", light: "☀", dark: "☾" };

const named = (names: readonly number[]): (readonly [string, string])[] =>
  names.map((name, k) => [String(k), String(name)] as const);

const nameOf = (one: Scene): string => (one.n_tokens ? `${one.name} (${count(one.n_tokens)})` : one.name);

/** The lists of texts, layers and heads, and of batch elements where there are several. */
export function choices(store: Store, scenes: readonly Scene[], scene: Scene): HTMLElement[] {
  const { state } = store;
  const layer = scene.layers[state.layer];
  const texts = scenes.map((one) => [one.id, nameOf(one)] as const);
  const layers = named(scene.layers.map((one) => one.number));
  const pick = (id: string): void => {
    const same = scenes.find((one) => one.id === id)?.editable && scene.editable; // the same head of the same model
    store.set({ scene: id, i: -1, j: -1, ...(same ? {} : { layer: -1, head: -1 }), ...viewFor(id) });
  };
  /** A picture is first seen as one, and a text has none. */
  const viewFor = (id: string): { view?: string } => {
    const pictures = Boolean(scenes.find((one) => one.id === id)?.grids?.length);
    if (pictures === Boolean(scene.grids?.length)) return {};
    return pictures ? { view: "picture" } : state.view === "picture" ? { view: START.view } : {};
  };
  const batch = (to: string): void => store.set({ scene: to === "0" ? scene.id : `${scene.id}:${to}` });
  return [
    choice("Text", texts, scene.id, pick),
    choice("Layer", layers, String(state.layer), (l) => store.set({ layer: Number(l) })),
    choice("Head", named(layer.numbers), String(state.head), (k) => store.set({ head: Number(k) })),
    ...(scene.batch > 1
      ? [choice("Batch", named([...Array(scene.batch).keys()]), state.scene.split(":")[1] ?? "0", batch)]
      : []),
  ];
}

function icon(sign: string, key: string, title: string, label: string, act: () => void): HTMLElement {
  return h(
    "button",
    { type: "button", class: "icon", "data-focus": key, title, "aria-label": label, click: act },
    sign,
  );
}

/** The buttons beside the lists. typed: the scene whose text can be changed, if there is one. */
export function buttons(store: Store, typed: Scene | undefined, theme: Theme, acts: Acts): (HTMLElement | undefined)[] {
  const { type, scene } = store.state;
  const there = scene.split(":")[0] === typed?.id;
  const anew = { scene: typed?.id, type: true, layer: -1, head: -1, i: -1, j: -1 };
  const typing = {
    type: "button",
    class: "type",
    "data-focus": "type",
    "aria-expanded": String(type && there),
    click: () => store.set(there ? { type: !type } : anew),
  };
  const tour = { type: "button", class: "take", "data-focus": "tour", click: acts.tour };
  const seen = `Light or dark: now ${theme}`;
  return [
    ...(typed ? [h("button", typing, "Type your own text")] : []),
    acts.tour && h("button", tour, "Take the tour"),
    h("span", { class: "gap" }),
    icon("Save", "save", "Save and share (s)", "Save", acts.share),
    icon(SIGNS[theme], "theme", `${seen} (t)`, seen, acts.turn),
    icon("?", "help", "Keys and glossary (?)", "Keys and glossary", acts.help),
  ];
}

/** The tabs of the views. */
export const tabsOf = (store: Store, titles: Record<string, string>): HTMLElement[] =>
  Object.entries(titles).map(([id, title]) =>
    h(
      "button",
      {
        type: "button",
        "aria-current": id === store.state.view ? "page" : undefined,
        "data-view": id,
        "data-focus": id,
        click: () => store.set({ view: id }),
      },
      title,
    ),
  );
