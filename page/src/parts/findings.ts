/** What is said first of a head and a token: what the eye sees, where the token looks, what is expected next. */

import type { HeadAt, Scene } from "../data";
import type { ScaleName } from "../numbers/colour";
import { headName, layerOf, sameTokens, type Context } from "../views/view";
import { expects, looks, saysOf } from "./sentences";

/** Pairs in all heads up to which kinds are measured without being asked for: some ten seconds of work. */
const LONG = 2 ** 33;

/** The pairs of all heads of a scene. */
export const pairsOf = (scene: Scene): number =>
  scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);

/** Whether the kinds of a scene's heads are told: where that takes long, once they were asked for. */
export function areMeasured({ data, store, scene }: Context): boolean {
  return data.source.kind === "file" || pairsOf(scene) <= LONG || data.measured.has(store.state.scene);
}

/** The sentences on a head, and on query i whose weights are given; of the last, what follows it. */
export async function sayings(
  context: Context,
  at: HeadAt,
  weights: Float32Array,
  i: number,
  tokens: { query: readonly string[] | null; key: readonly string[] | null },
  scale: ScaleName,
): Promise<string[]> {
  const { data, scene, words } = context;
  const { layer, head } = at;
  const finding = await data.finding(at.scene);
  if (finding.why && finding.i === i && finding.layer === layer && finding.head === head) return [finding.why];
  const claims = await data.claims(at.scene, layer);
  const { query, key } = tokens;
  return [
    `${headName(scene, layer, head)}: ${saysOf(claims[head], words, scale !== "ink")}`,
    finding.how,
    looks(words, scene, weights, i, query && key ? { query, key } : null, sameTokens(scene.layers[layer])),
    isLast(context, i) ? expects(words, scene) : "",
  ].filter(Boolean);
}

/** Whether what the model expects next follows query i. */
export const isLast = (context: Context, i: number): boolean => i === layerOf(context).n_q - 1;

/** What stands above what the model expects next, beside query i. */
export const expectsTitle = (context: Context, i: number): string =>
  isLast(context, i) ? "The model expects next" : "After the last token, the model expects";
