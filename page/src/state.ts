/** What is looked at: all that a link to a view has to say, kept in the address after `#`. */

import type { ScaleName, Tone } from "./numbers/colour";
import type { Kind } from "./data";

export interface State {
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
  /** Whether the text is shaded by what attends to the chosen token, not by what it attends to. */
  by: boolean;
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
}

export const START: State = {
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
  by: false,
  other: "",
  sort: "place",
  filter: "all",
  least: 0,
  type: false,
  tour: 0,
  without: "zero",
};

export function toHash(state: State): string {
  const pairs = (Object.keys(START) as (keyof State)[])
    .filter((key) => state[key] !== START[key] || key === "view")
    .map((key) => [key, String(state[key])]);
  return `#${new URLSearchParams(pairs)}`;
}

/** Reads what is there; what is missing or of another type stays as at the start. */
export function fromHash(hash: string): State {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const entries = Object.entries(START).map(([key, standard]) => {
    const text = given.get(key);
    if (text === null) return [key, standard];
    if (typeof standard === "number") return [key, Number.isFinite(Number(text)) ? Number(text) : standard];
    return [key, typeof standard === "boolean" ? text === "true" : text];
  });
  return Object.fromEntries(entries) as unknown as State;
}

type Listener = (state: State, changed: ReadonlySet<keyof State>) => void;

/** The state, and who wants to know when it changes. */
export class Store {
  state: State;
  private readonly listeners = new Set<Listener>();

  constructor(state: State) {
    this.state = state;
  }

  set(part: Partial<State>): void {
    const before = this.state;
    const after = { ...before, ...part };
    const changed = new Set((Object.keys(after) as (keyof State)[]).filter((key) => after[key] !== before[key]));
    if (!changed.size) return;
    this.state = after;
    for (const listener of [...this.listeners]) listener(after, changed);
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
  const forget = store.listen((state, changed) => {
    own = toHash(state);
    if (own === location.hash) return;
    if ([...changed].some((key) => PLACES.has(key))) history.pushState(null, "", own);
    else history.replaceState(null, "", own);
  });
  const read = (): void => {
    if (location.hash !== own) store.set(fromHash(location.hash));
  };
  window.addEventListener("popstate", read);
  window.addEventListener("hashchange", read);
  return () => {
    forget();
    window.removeEventListener("popstate", read);
    window.removeEventListener("hashchange", read);
  };
}
