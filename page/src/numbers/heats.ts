/** What a picture is heated by: the weights of a token, or those on a region, of one head or of several. */

import type { Grid, Layer } from "../data";
import type { State } from "../state";
import { meanOf, patchOf, regionOf } from "./grids";

/** Tokens of a region at most. */
export const MOST_TOKENS = 64;

/** What is looked at: a token that looks, or tokens that are looked at. */
export interface Chosen {
  by: boolean;
  /** The token that looks, or those that are looked at. */
  tokens: number[];
  /** Their patches. */
  patches: number[];
}

/** What a state chooses, given the query and the key that stand for themselves where none was chosen. */
export function chosenOf(grid: Grid, { by, span }: State, i: number, j: number): Chosen {
  if (!by) {
    const patch = grid.side === "both" ? patchOf(grid, i) : -1;
    return { by, tokens: [i], patches: patch < 0 ? [] : [patch] };
  }
  const patch = patchOf(grid, j);
  if (patch < 0) return { by, tokens: [j], patches: [] };
  const other = patchOf(grid, span);
  const patches = regionOf(grid, patch, other < 0 ? patch : other).slice(0, MOST_TOKENS);
  return { by, tokens: patches.map((p) => grid.tokens[p]).filter((token) => token >= 0), patches };
}

/** What a click on a patch chooses, or a drag to another: the token that looks, or what is looked at. */
export function pickedOn(grid: Grid, by: boolean, patch: number, other: number): Partial<State> {
  const [token, end] = [grid.tokens[patch], grid.tokens[other]];
  if (token < 0) return {};
  if (patch === other && !by && grid.side === "both") return { i: token, j: -1 };
  return { by: true, j: token, span: patch === other || end < 0 ? -1 : end };
}

/** Weights on patches by layer and head, and means over the heads of each layer where they are not to follow from these. */
export interface EveryHead {
  heads: Float32Array[][];
  means?: Float32Array[];
}

/** The weights that are shown large: of one head, or the mean over those of its layer, or over all. */
export function shownOf({ heads, means }: EveryHead, { heat, layer, head }: State): Float32Array {
  if (heat === "layer") return means?.[layer] ?? meanOf(heads[layer]);
  return heat === "head" ? heads[layer][head] : meanOf(heads.flatMap((of, l) => (means ? of.map(() => means[l]) : of)));
}

/**
 * Attention rollout (Abnar and Zuidema, 2020): a token's row of the product over layers of (I + Ā) / 2, Ā the mean of the
 * maps of a layer's heads. mean: the rows of Ā of a layer.
 */
export async function rolledOut(
  layers: number,
  n: number,
  token: number,
  mean: (layer: number, row: number) => Promise<Float32Array>,
): Promise<Float32Array> {
  let row = new Float32Array(n);
  row[token] = 1;
  for (let layer = layers - 1; layer >= 0; layer--) {
    const next = row.map((x) => x / 2);
    for (let i = 0; i < n; i++) {
      if (!row[i]) continue;
      (await mean(layer, i)).forEach((weight, j) => (next[j] += (row[i] / 2) * (weight || 0)));
    }
    row = next;
  }
  return row;
}

/** Whether rollout has a meaning: every layer goes from the same tokens to themselves. */
export const rollsOut = (layers: readonly Layer[]): boolean =>
  layers.every(({ cross, n_q, n_k }) => !cross && n_q === n_k && n_q === layers[0].n_q);
