/** What is said first of a head and a token: why it is shown, where the token looks, what is expected next. */

import type { Finding, HeadRow, Scene, Words } from "../data";
import { headAt, headName, type Context } from "../views/view";
import { kindsOf } from "./headgrid";
import { expects, looks } from "./sentences";
import { definitionOf } from "./terms";

/** Pairs in all heads up to which kinds are measured without being asked for: some ten seconds of work. */
const LONG = 2 ** 33;

/** The pairs of all heads of a scene. */
export const pairsOf = (scene: Scene): number =>
  scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);

/** Whether the kinds of a scene's heads are told: where that takes long, once they were asked for. */
export function areMeasured({ data, store, scene }: Context): boolean {
  return data.source.kind === "file" || pairsOf(scene) <= LONG || data.measured.has(store.state.scene);
}

/** The sentence on a head: its finding if the scene opens on it, else its kinds. */
function ofHead(scene: Scene, words: Words, finding: Finding, layer: number, head: number, row?: HeadRow): string {
  if (finding.layer === layer && finding.head === head) return `${finding.why}${finding.how ? ` ${finding.how}` : ""}`;
  const name = headName(scene, layer, head);
  const kind = row?.kinds[0];
  return `${name}: ${row && kind ? `${kindsOf(row)}. ${definitionOf(kind.kind, words)}` : "no notable kind."}`;
}

/** The sentences on the chosen head, and on query i whose weights are given. */
export async function sayings(
  context: Context,
  weights: Float32Array,
  i: number,
  tokens: { query: readonly string[] | null; key: readonly string[] | null },
  kinds: readonly HeadRow[],
): Promise<string[]> {
  const { data, store, scene, words } = context;
  const { layer, head } = headAt(store.state);
  const finding = await data.finding(store.state.scene);
  if (finding.i === i && finding.layer === layer && finding.head === head) return [finding.why];
  const row = kinds.find((one) => one.layer === layer && one.head === head);
  const { query, key } = tokens;
  return [
    ofHead(scene, words, finding, layer, head, row),
    looks(words, scene, weights, i, query && key ? { query, key } : null),
    expects(words, scene),
  ].filter(Boolean);
}
