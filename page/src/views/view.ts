import type { BothTokens, Data, HeadAt, Layer, Scene, Words } from "../data";
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
  /** What is said, the same in the terminal. */
  readonly words: Words;
  /** Shows what went wrong, until the next thing goes right. */
  fail(error: unknown): void;
  /** Told to screen readers. */
  say(text: string): void;
}

export interface View {
  readonly element: HTMLElement;
  /** What is said above it, if not the line that every view has. */
  line?(): Node[];
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
  "without",
  "near",
  "heat",
  "grid",
]);

/** Whether any of these changed. */
export const touches = (changed: ReadonlySet<keyof State>, ...keys: (keyof State)[]): boolean =>
  keys.some((key) => changed.has(key));

export const headAt = ({ scene, layer, head }: State): HeadAt => ({ scene, layer, head });

export const layerOf = (context: Context): Layer => context.scene.layers[context.store.state.layer];

/** The weight of each query on a head's learned sink; none without one. */
export function sinksOf({ data, scenes }: Pick<Context, "data" | "scenes">, at: HeadAt): Promise<Float32Array> {
  const [id] = at.scene.split(":");
  const layer = scenes.find((scene) => scene.id === id)?.layers[at.layer];
  return layer?.sink ? data.sinks(at) : Promise.resolve(new Float32Array(0));
}

/** Whether query t and key t are the same token: not in cross-attention, nor where queries are the last of the keys. */
export const sameTokens = ({ cross, n_q, n_k }: Layer): boolean => !cross && n_q === n_k;

/** The key where query i stands in its text; null where the keys are of another text. */
export const keyOf = ({ cross, n_k, offset = 0 }: Layer, i: number): number | null =>
  cross ? null : Math.max(0, Math.min(n_k - 1, i + offset));

/** The scale of colours: unless another was chosen, from paper to ink, and from dark paper to light. */
export function scaleName(state: State): ScaleName {
  return state.scale === "auto" ? (state.dark ? "night" : "ink") : state.scale;
}

export function lookOf(state: State): Look {
  return { kind: state.kind, tone: state.tone, scale: scaleName(state), hide: state.hide };
}

const within = (at: number, n: number, standard: number): number => (at < 0 ? standard : Math.min(at, n - 1));

/** The chosen query, the last one unless chosen. */
export const chosenQuery = (state: State, layer: Layer): number => within(state.i, layer.n_q, layer.n_q - 1);

/** The chosen query and key; unless it was chosen, the key that the query looks at most. */
export function chosen(context: Context): { i: number; j: number } {
  const { state } = context.store;
  const layer = layerOf(context);
  const i = chosenQuery(state, layer);
  return { i, j: within(state.j, layer.n_k, Math.max(0, context.data.knownPeak(headAt(state), i) ?? 0)) };
}

/** A head as it is called: L2 H3, by the model's numbers. */
export function headName(scene: Scene, layer: number, head: number): string {
  const { number, numbers } = scene.layers[layer];
  return `L${number} H${numbers[head]}`;
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
  const { has_tokens, has_query_tokens } = context.scene;
  return {
    query: has_tokens || has_query_tokens ? context.data.tokens(scene, "query") : null,
    key: has_tokens ? context.data.tokens(scene, "key") : null,
  };
}

/** Runs what answers later; what was asked before is dropped when it answers after. */
export function latest(fail: (error: unknown) => void): (work: (current: () => boolean) => Promise<void>) => void {
  let turn = 0;
  return (work) => {
    const mine = ++turn;
    work(() => mine === turn).catch((error: unknown) => mine === turn && fail(error));
  };
}
