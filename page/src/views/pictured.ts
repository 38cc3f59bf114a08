/** What is shown on a picture, or along a sound: what is chosen, and the weights of it. */

import type { Grid } from "../data";
import { regionName, sumOf } from "../numbers/grids";
import { chosenOf, shownOf, type Chosen, type EveryHead } from "../numbers/heats";
import type { HeatLook } from "../parts/heatpicture";
import { inside } from "../numbers/windows";
import type { State } from "../state";
import { chosen, headAt, headName, layerOf, named, sameTokens, tokensOf, type Context } from "./view";

/** Colours of heat: unless others were chosen, some that are told from a picture in grey. */
export const heatLook = ({ scale, tone }: State): HeatLook => ({ scale: scale === "auto" ? "viridis" : scale, tone });

/** The number of the picture that is shown. */
export const numberOf = ({ scene, store }: Pick<Context, "scene" | "store">): number =>
  inside(store.state.grid, scene.grids?.length ?? 1);

/**
 * The picture that is shown, none in a text without one. Queries after a cache are none of its tokens, nor are those of
 * which a file holds rows.
 */
export function gridOf(context: Context): Grid | undefined {
  const grid = context.scene.grids?.[numberOf(context)];
  return grid && { ...grid, side: sameTokens(layerOf(context)) && !context.scene.held ? grid.side : "keys" };
}

/** What is chosen on a picture. */
export function chosenOn(context: Context, grid: Grid): Chosen {
  const { i, j } = chosen(context);
  return chosenOf(grid, context.store.state, i, j);
}

/** The weights of all heads on the patches; null where those that look have none. */
export async function heatsOf(context: Context, grid: Grid, { by, tokens }: Chosen): Promise<EveryHead | null> {
  const { data, store, scene } = context;
  const number = numberOf(context);
  if (!by) return data.heat(scene, store.state.scene, { token: tokens[0], side: "row", grid: number });
  if (grid.side === "keys") return null;
  const all = await Promise.all(
    tokens.map((token) => data.heat(scene, store.state.scene, { token, side: "column", grid: number })),
  );
  const heads = all[0].heads.map((of, l) => of.map((_, k) => sumOf(all.map((one) => one.heads[l][k]))));
  return { heads };
}

/** The weights that are shown large; null where those that look have no patches. */
export async function heatOf(context: Context, grid: Grid, at: Chosen): Promise<Float32Array | null> {
  const { data, store } = context;
  const { state } = store;
  if (state.heat === "rollout" && !at.by) return data.rollout(state.scene, at.tokens[0], numberOf(context));
  const heads = await heatsOf(context, grid, at);
  return heads && shownOf(heads, state);
}

/** The picture of a grid. */
export async function imageOf({ data, store }: Context, { picture }: Grid): Promise<ImageBitmap | null> {
  return picture === null ? null : createImageBitmap(new Blob([await data.picture(store.state.scene, picture)]));
}

/** The weights of a head on tokens that are no patches, or of them on what is chosen. */
export async function onWords({ data, store }: Context, { by, tokens }: Chosen): Promise<Float32Array | null> {
  if (store.state.heat !== "head") return null;
  const at = headAt(store.state);
  if (!by) return data.row(at, tokens[0]);
  return sumOf(await Promise.all(tokens.map((token) => data.column(at, token))));
}

/** What is chosen, in a few words. */
export async function titleOf(context: Context, grid: Grid, at: Chosen): Promise<string> {
  const [token] = at.tokens;
  const axis = at.by ? "key" : "query";
  const one = await named(context, axis, token);
  const name = regionName(grid, at.patches) || (tokensOf(context)[axis] ? one : `token ${one}`);
  return at.by ? `What looks at ${name}` : `Where ${name} looks`;
}

/** What the heat is of. */
export function heatName({ scene }: Context, { heat, layer, head }: State): string {
  const { number } = scene.layers[layer];
  if (heat === "layer") return `the mean of layer ${number}`;
  if (heat === "all") return "the mean of all heads";
  return heat === "rollout" ? "rollout over all layers" : headName(scene, layer, head);
}
