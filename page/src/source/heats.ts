/** What a server answers about pictures, computed in the page from rows and columns of heads. */

import type { Grid, Heats, Layer } from "../data";
import { laid } from "../numbers/grids";
import { rolledOut } from "../numbers/heats";
import type { Weights } from "./weights";

type HeadOf = (layer: number, head: number) => Weights;

/** NaN is null in JSON. */
export const plain = (x: Float32Array): (number | null)[] =>
  Array.from(x, (weight) => (Number.isNaN(weight) ? null : weight));

/** The weights of a token on the patches of a grid, or of the patches on it, by layer and head. */
export async function heatOf(
  layers: readonly Layer[],
  of: HeadOf,
  grid: Grid,
  token: number,
  side: string,
): Promise<Heats> {
  const row = async ({ n_q, n_k }: Layer, weights: Weights): Promise<Float32Array> =>
    side === "row" ? weights.block(token, token + 1, 0, n_k) : weights.block(0, n_q, token, token + 1);
  const heads = layers.map((layer, l) =>
    Promise.all(Array.from({ length: layer.heads }, async (_, k) => plain(laid(grid, await row(layer, of(l, k)))))),
  );
  return { layers: await Promise.all(heads) };
}

/** The weights of a token on the patches of a grid through all layers. */
export async function rolloutOf(
  layers: readonly Layer[],
  of: HeadOf,
  grid: Grid,
  token: number,
): Promise<{ weights: (number | null)[] }> {
  const { n_k } = layers[0];
  const mean = async (layer: number, row: number): Promise<Float32Array> => {
    const made = new Float32Array(n_k);
    const { heads } = layers[layer];
    for (let head = 0; head < heads; head++) {
      const weights = await of(layer, head).block(row, row + 1, 0, n_k);
      weights.forEach((weight, j) => (made[j] += (weight || 0) / heads));
    }
    return made;
  };
  return { weights: plain(laid(grid, await rolledOut(layers.length, n_k, token, mean))) };
}
