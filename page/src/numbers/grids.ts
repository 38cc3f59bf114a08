/** Grids: the patches of a picture, or the frames of a sound, among the tokens of a scene. */

import type { Grid } from "../data";
import { ramp, SCALES, toned, type ScaleName, type Tone } from "./colour";
import { count, figure } from "./format";

/** How much a colour hides of a picture: where nothing is, and where most is. */
const [LEAST_ALPHA, MOST_ALPHA] = [0.2, 0.6];

/** The patch of a token; −1 of a word, and of a token of another picture. */
export const patchOf = ({ tokens }: Grid, token: number): number => (token < 0 ? -1 : tokens.indexOf(token));

/** The patches in the rectangle that has two of them for corners. */
export function regionOf({ columns }: Grid, one: number, other: number): number[] {
  const [r0, r1] = [one, other].map((patch) => Math.floor(patch / columns)).sort((a, b) => a - b);
  const [c0, c1] = [one, other].map((patch) => patch % columns).sort((a, b) => a - b);
  const wide = c1 - c0 + 1;
  return Array.from(
    { length: (r1 - r0 + 1) * wide },
    (_, k) => (r0 + Math.floor(k / wide)) * columns + c0 + (k % wide),
  );
}

/** The patch at a place of the picture, in shares of its width and height; −1 outside of it. */
export function patchAt({ rows, columns }: Grid, x: number, y: number): number {
  if (!(x >= 0 && x < 1 && y >= 0 && y < 1)) return -1;
  return Math.floor(y * rows) * columns + Math.floor(x * columns);
}

/** The patch so many rows below and columns to the right, within the picture. */
export function stepped({ rows, columns }: Grid, patch: number, down: number, right: number): number {
  const inside = (at: number, n: number): number => Math.max(0, Math.min(n - 1, at));
  return inside(Math.floor(patch / columns) + down, rows) * columns + inside((patch % columns) + right, columns);
}

/** Weights of tokens laid on the patches: NaN where a patch has no token. */
export const laid = ({ tokens }: Grid, row: ArrayLike<number>): Float32Array =>
  Float32Array.from(tokens, (token) => (token < 0 ? NaN : row[token]));

/** Where a patch is, in words. */
export function placeName({ kind, rows, columns, seconds }: Grid, patch: number): string {
  const [row, column] = [Math.floor(patch / columns), patch % columns];
  if (kind === "picture") return `row ${count(row + 1)}, column ${count(column + 1)}`;
  const band = rows > 1 ? `, band ${count(row + 1)}` : "";
  if (seconds === null) return `frame ${count(column)}${band}`;
  return `${secondsText((column * seconds) / columns)} to ${secondsText(((column + 1) * seconds) / columns)} s${band}`;
}

/** What patches are called together. */
export function regionName(grid: Grid, patches: readonly number[]): string {
  if (patches.length < 2) return patches.length ? placeName(grid, patches[0]) : "";
  const { kind, rows, columns, seconds } = grid;
  if (kind === "picture" || rows > 1 || seconds === null) return `${count(patches.length)} patches`;
  const at = (column: number): string => secondsText((column * seconds) / columns);
  return `${at(Math.min(...patches))} to ${at(Math.max(...patches) + 1)} s`;
}

export const secondsText = (at: number): string => at.toFixed(2);

/** Moments of a sound to mark on an axis that has room for so many. */
export function moments(seconds: number, room: number): number[] {
  const least = seconds / Math.max(1, room);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= least * (1 - 1e-9)) as number;
  return Array.from({ length: Math.floor(seconds / step + 1e-9) + 1 }, (_, k) => k * step);
}

/** The tokens that are in no grid: class tokens, and words. */
export function wordsOf(grids: readonly Grid[], n: number): number[] {
  const taken = new Set(grids.flatMap(({ tokens }) => tokens));
  return Array.from({ length: n }, (_, t) => t).filter((t) => !taken.has(t));
}

/** The mean of weights; NaN where one is. */
export function meanOf(all: readonly Float32Array[]): Float32Array {
  const mean = new Float32Array(all[0].length);
  for (const one of all) one.forEach((weight, p) => (mean[p] += weight / all.length));
  return mean;
}

/** The sum of weights, of each patch over the tokens of a region. */
export function sumOf(all: readonly Float32Array[]): Float32Array {
  return meanOf(all).map((weight) => weight * all.length);
}

/** The largest weight on a patch; 0 where there is none. */
export const largestOf = (heat: Float32Array): number => heat.reduce((most, x) => (x > most ? x : most), 0);

/** Weights on so many rows and columns at most, each the largest of its patches: none is lost in a small picture. */
export function pooled(grid: Grid, heat: Float32Array, most: number): { grid: Grid; heat: Float32Array } {
  const by = Math.ceil(Math.max(grid.rows, grid.columns) / most);
  if (by < 2) return { grid, heat };
  const [rows, columns] = [Math.ceil(grid.rows / by), Math.ceil(grid.columns / by)];
  const made = new Float32Array(rows * columns).fill(NaN);
  heat.forEach((weight, p) => {
    const [row, column] = [Math.floor(p / grid.columns), p % grid.columns];
    const at = Math.floor(row / by) * columns + Math.floor(column / by);
    if (!(made[at] >= weight)) made[at] = Number.isNaN(weight) ? made[at] : weight;
  });
  return { grid: { ...grid, rows, columns }, heat: made };
}

/** The heaviest patches, in falling order. */
export const heaviest = (heat: Float32Array, most: number): number[] =>
  Array.from(heat.keys())
    .filter((patch) => heat[patch] > 0)
    .sort((a, b) => heat[b] - heat[a])
    .slice(0, most);

/** The pixels (RGBA, little endian) of weights, one a patch. Over a picture they let it through. */
export function heatPixels(
  heat: Float32Array,
  top: number,
  { tone, scale, over }: { tone: Tone; scale: ScaleName; over: boolean },
): Uint32Array {
  return Uint32Array.from(heat, (weight) => {
    if (Number.isNaN(weight)) return 0;
    const place = toned(weight, top || 1, tone);
    const [r, g, b] = ramp(SCALES[scale], place);
    const alpha = over ? Math.round(255 * (LEAST_ALPHA + (MOST_ALPHA - LEAST_ALPHA) * place)) : 255;
    return ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
  });
}

/** The heaviest patches in a sentence, for those who do not see the picture. */
export function heatSaid(grid: Grid, heat: Float32Array): string {
  const told = heaviest(heat, 3).map((patch) => `${placeName(grid, patch)} (${figure(heat[patch], 2)})`);
  return told.length ? `Most on ${told.join(", ")}.` : "Nothing on it.";
}

/** The tokens at which rows of pictures begin, and those after which they end. */
export function rowStarts(grids: readonly Grid[]): number[] {
  const starts = grids.flatMap(({ rows, columns, tokens }) => {
    if (rows < 2) return [];
    const firsts = Array.from({ length: rows }, (_, r) => tokens[r * columns]).filter((token) => token >= 0);
    return [...firsts, Math.max(...tokens) + 1];
  });
  return [...new Set(starts)].sort((a, b) => a - b);
}
