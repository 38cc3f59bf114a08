/** What is looked at: all that a link to a view has to say, kept in the address after `#`. */

import { SCALES, type ScaleName, type Tone } from "./numbers/colour";
import type { Kind, Scene, Settings } from "./data";

/** All that a link says. */
export interface Linked {
  view: string;
  /** Id of the scene, `id:b` for a batch element other than the first. */
  scene: string;
  /** The chosen head; −1: the one of the scene's finding. */
  layer: number;
  head: number;
  /** The chosen query and key; −1: the last query, and the key that it looks at most. */
  i: number;
  j: number;
  kind: Kind;
  tone: Tone;
  scale: ScaleName | "auto";
  /** Whether the first key is left out. */
  hide: boolean;
  /** Whether lists of what a token looks at name the first token, the token itself and its neighbours too. */
  near: boolean;
  /** Whether the text is shaded by what attends to the chosen token, not by what it attends to. */
  by: boolean;
  /** Whether tokens are taken together as words. */
  words: boolean;
  /** The other end of a choice of several tokens that begins at the chosen one; −1: there is one. */
  span: number;
  /** The other head that is compared: scene/layer/head. */
  other: string;
  sort: string;
  filter: string;
  /** The least score that is shown. */
  least: number;
  type: boolean;
  /** The step of the tour that is shown, from 1 on; 0: none. */
  tour: number;
  /** What is put in place of a head that is switched off: zero or mean. */
  without: string;
  /** What a picture is heated by: a head, the mean of its layer or of all layers, or rollout. */
  heat: string;
  /** The picture that is shown, of several. */
  grid: number;
  /** The part of a map that is seen, as `DeepMap.part` writes it; empty: all of it. */
  zoom: string;
  /** Settings of a scene that was typed, so that a link to it can be followed when it is gone; no text: none was. */
  text: string;
  temperature: number;
  scaled: boolean;
  causal: boolean;
}

export interface State extends Linked {
  /** Whether the page is dark, which is the reader's affair and in no link. */
  dark: boolean;
}

export const START: Linked = {
  view: "overview",
  scene: "",
  layer: -1,
  head: -1,
  i: -1,
  j: -1,
  kind: "max",
  tone: "root",
  scale: "auto",
  hide: false,
  near: false,
  by: false,
  words: false,
  span: -1,
  other: "",
  sort: "place",
  filter: "all",
  least: 0,
  type: false,
  tour: 0,
  without: "zero",
  heat: "head",
  grid: 0,
  zoom: "",
  text: "",
  temperature: 1,
  scaled: true,
  causal: true,
};

/** The only values of keys that are no free text. */
const ALLOWED: { [K in keyof State]?: readonly string[] } = {
  kind: ["mass", "max"],
  tone: ["linear", "root", "log"],
  scale: ["auto", ...Object.keys(SCALES)],
  without: ["zero", "mean"],
  heat: ["head", "layer", "all", "rollout"],
};

/** Numbers that are no indices. */
const REAL: ReadonlySet<string> = new Set(["least", "temperature"]);

export function toHash(state: Linked): string {
  const pairs = (Object.keys(START) as (keyof Linked)[])
    .filter((key) => state[key] !== START[key] || key === "view")
    .map((key) => [key, String(state[key])]);
  return `#${new URLSearchParams(pairs)}`;
}

/** Reads what is there; what is missing, of another type or no value of its key stays as at the start. */
export function fromHash(hash: string): Linked {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const entries = Object.entries(START).map(([key, standard]) => {
    const text = given.get(key);
    if (text === null) return [key, standard];
    if (typeof standard === "number") {
      const sound = REAL.has(key) ? Number.isFinite(Number(text)) : Number.isSafeInteger(Number(text));
      return [key, text.trim() && sound ? Number(text) : standard];
    }
    if (typeof standard === "boolean") return [key, text === "true" || text === "false" ? text === "true" : standard];
    const allowed = ALLOWED[key as keyof State];
    return [key, !allowed || allowed.includes(text) ? text : standard];
  });
  return Object.fromEntries(entries) as unknown as Linked;
}

type Typed = Pick<State, "text" | "temperature" | "scaled" | "causal">;

/** What the address holds of a scene: its settings, if somebody typed them. */
export function typedOf(scene: Scene | undefined): Typed {
  const { temperature, scaled, causal } = START;
  const { text, ...others } = (!scene?.given && scene?.settings) || START;
  return {
    text,
    temperature: others.temperature ?? temperature,
    scaled: others.scaled ?? scaled,
    causal: others.causal ?? causal,
  };
}

/** Those of some settings that a scene's model has. */
export function settingsFor(scene: Scene, settings: Settings): Settings {
  const names = Object.keys(scene.settings ?? settings);
  return Object.fromEntries(Object.entries(settings).filter(([name]) => names.includes(name))) as unknown as Settings;
}

/** The settings that a link holds, null if it is not to a typed text. */
export function settingsIn({ text, temperature, scaled, causal }: Typed): Settings | null {
  return text ? { text, temperature, scaled, causal } : null;
}

/** How a state comes about: a step that can be gone back from, a refinement of the last one, or a link. */
export type Way = "step" | "refine" | "link";

type Listener = (state: State, changed: ReadonlySet<keyof State>, way: Way) => void;

/** The state, and who wants to know when it changes. */
export class Store {
  state: State;
  private readonly listeners = new Set<Listener>();

  constructor(linked: Linked) {
    this.state = { ...linked, dark: false };
  }

  set(part: Partial<State>, way: Way = "step"): void {
    const before = this.state;
    // Another token ends a choice of several.
    const after = { ...before, ...("i" in part || "j" in part ? { span: -1 } : {}), ...part };
    const changed = new Set((Object.keys(after) as (keyof State)[]).filter((key) => after[key] !== before[key]));
    if (!changed.size) return;
    this.state = after;
    for (const listener of [...this.listeners]) listener(after, changed, way);
  }

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** Steps worth going back to; choosing a token or a colour only rewrites the address. */
const PLACES: ReadonlySet<keyof State> = new Set(["view", "scene", "layer", "head", "tour"]);

/** Keeps the address and the state the same. */
export function followAddress(store: Store): () => void {
  let own = "";
  const forget = store.listen((state, changed, way) => {
    own = toHash(state);
    if (own === location.hash) return;
    if (way === "step" && [...changed].some((key) => PLACES.has(key))) history.pushState(null, "", own);
    else history.replaceState(null, "", own);
  });
  const read = (): void => {
    if (location.hash !== own) store.set(fromHash(location.hash), "link");
  };
  window.addEventListener("popstate", read);
  window.addEventListener("hashchange", read);
  return () => {
    forget();
    window.removeEventListener("popstate", read);
    window.removeEventListener("hashchange", read);
  };
}
