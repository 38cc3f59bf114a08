/** Earlier heads on the path through a key, computed in the page as `regard/interpret/paths.py` does. */

import type { Earlier, Layer, Words } from "../data";

/** Heads that are told. */
const LISTED = 12;

/** The arrays of a head, by its place in the model. */
export interface Heads {
  /** The weights of a query, NaN or 0 where a key is hidden. */
  row(layer: number, head: number, i: number): Promise<Float32Array>;
  /** The length of each value; none where values are not known. */
  norms(layer: number, head: number): Float32Array;
}

/** The heads of earlier layers with the largest product P[i, j] · P_g[j, r] · ‖v_g[r]‖, r another token than j. */
export function ranked(
  weight: number,
  j: number,
  rows: { layer: number; head: number; row: Float32Array; norms: Float32Array }[],
): Pick<Earlier, "values" | "heads"> {
  const values = rows.every(({ norms }) => norms.length);
  const heads = rows.map(({ layer, head, row, norms }) => {
    const moved = (r: number): number =>
      r === j || (r === 0 && !values) ? 0 : (row[r] || 0) * (values ? norms[r] : 1);
    const key = row.reduce((best, _, r) => (moved(r) > moved(best) ? r : best), 0);
    const norm = values ? norms[key] : null;
    return { layer, head, key, weight: row[key] || 0, norm, product: weight * moved(key) };
  });
  const listed = heads.filter(({ product }) => product > 0).sort((a, b) => b.product - a.product);
  return { values, heads: listed.slice(0, LISTED) };
}

/** What the server answers about the earlier heads of a head, query i and key j. */
export async function earlierOf(
  heads: Heads,
  layers: readonly Layer[],
  at: { layer: number; head: number; i: number; j: number },
  words: Words,
): Promise<Earlier> {
  const { layer, head, i, j } = at;
  const of = layers[layer];
  const weight = (await heads.row(layer, head, i))[j] || 0;
  const query = j - (of.offset ?? 0);
  const { two_texts, first, cached } = words.unwritten;
  const why = of.cross ? two_texts : !layer ? first : query < 0 || query >= of.n_q ? cached : "";
  if (why) return { weight, values: false, heads: [], why };
  const rows = [];
  for (let number = 0; number < layer; number++)
    for (let k = 0; k < layers[number].heads; k++)
      rows.push({
        ...{ layer: number, head: k },
        ...{ row: await heads.row(number, k, query), norms: heads.norms(number, k) },
      });
  return { weight, ...ranked(weight, j, rows), why };
}
