import type { BothTokens, Data, HeadAt, Layer, Scene } from "../data";
import type { ScaleName } from "../numbers/colour";
import { count, printable, shortened } from "../numbers/format";
import type { Look } from "../parts/pictures";
import type { State, Store } from "../state";

/** What a view is given: data, state, and the page around it. */
export interface Context {
  readonly data: Data;
  readonly store: Store;
  readonly scenes: readonly Scene[];
  readonly scene: Scene;
  /** Shows what went wrong, until the next thing goes right. */
  fail(error: unknown): void;
  /** Told to screen readers. */
  say(text: string): void;
}

export interface View {
  readonly element: HTMLElement;
  update(state: State, changed: ReadonlySet<keyof State>): void;
  destroy?(): void;
}

export type MakeView = (context: Context) => View;

/** All that a view depends on, for the first time it is drawn. */
export const EVERYTHING: ReadonlySet<keyof State> = new Set([
  "view",
  "scene",
  "layer",
  "head",
  "i",
  "j",
  "kind",
  "tone",
  "scale",
  "hide",
  "by",
  "other",
  "sort",
  "filter",
  "least",
]);

/** Whether any of these changed. */
export const touches = (changed: ReadonlySet<keyof State>, ...keys: (keyof State)[]): boolean =>
  keys.some((key) => changed.has(key));

export const headAt = ({ scene, layer, head }: State): HeadAt => ({ scene, layer, head });

export const layerOf = (context: Context): Layer => context.scene.layers[context.store.state.layer];

/** The scale of colours: from paper to ink unless another was chosen, in both themes, so that pictures compare. */
export function scaleName(state: State): ScaleName {
  return state.scale === "auto" ? "ink" : state.scale;
}

export function lookOf(state: State): Look {
  return { kind: state.kind, tone: state.tone, scale: scaleName(state), hide: state.hide };
}

/** The chosen query, the last one unless chosen; and the chosen key, the first. */
export function chosen(state: State, layer: Layer): { i: number; j: number } {
  const within = (at: number, n: number, standard: number): number => (at < 0 ? standard : Math.min(at, n - 1));
  return { i: within(state.i, layer.n_q, layer.n_q - 1), j: within(state.j, layer.n_k, 0) };
}

/** A token as it is spoken of: its number, and itself where there is one. */
export async function named(context: Context, axis: "query" | "key", index: number): Promise<string> {
  const tokens = tokensOf(context)[axis];
  await tokens?.load(index, index + 1);
  const token = tokens?.at(index);
  return token === undefined ? count(index) : `${count(index)} “${shortened(printable(token))}”`;
}

export function tokensOf(context: Context): BothTokens {
  const { scene } = context.store.state;
  if (!context.scene.has_tokens) return { query: null, key: null };
  return { query: context.data.tokens(scene, "query"), key: context.data.tokens(scene, "key") };
}

/** Runs what answers later; what was asked before is dropped when it answers after. */
export function latest(fail: (error: unknown) => void): (work: (current: () => boolean) => Promise<void>) => void {
  let turn = 0;
  return (work) => {
    const mine = ++turn;
    work(() => mine === turn).catch((error: unknown) => mine === turn && fail(error));
  };
}
