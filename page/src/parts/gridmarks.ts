/** Lines in a map where the rows of a picture begin among its tokens. */

import type { Scene } from "../data";
import { rowStarts } from "../numbers/grids";

/** The tokens along both axes at which a row begins. */
export interface GridMarks {
  query: readonly number[];
  key: readonly number[];
}

/** Pixels between lines, at least: closer ones would hide the map. */
const APART = 5;

export function marksOf({ grids = [] }: Scene): GridMarks {
  const key = rowStarts(grids);
  return { key, query: grids.some(({ side }) => side === "both") ? key : [] };
}

/** Draws the lines of a map that begins at (x, y) and has so many pixels for a pair. */
export function drawMarks(
  context: CanvasRenderingContext2D,
  axes: { x: number; y: number; step: number },
  { query, key }: GridMarks,
  { n_q, n_k }: { n_q: number; n_k: number },
  colour: string,
): void {
  const close = key.some((token, k) => k > 0 && (token - key[k - 1]) * axes.step < APART);
  if (close) return;
  context.fillStyle = colour;
  context.globalAlpha = 0.5;
  for (const token of key) context.fillRect(axes.x + token * axes.step - 0.5, axes.y, 1, n_q * axes.step);
  for (const token of query) context.fillRect(axes.x, axes.y + token * axes.step - 0.5, n_k * axes.step, 1);
  context.globalAlpha = 1;
}
