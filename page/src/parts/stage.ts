/** The size of what a map is seen on. */

/** The widest that a cell is ever drawn, in pixels. */
export const WIDEST_CELL = 96;
/** Pixels of a stage on a side at least, where there is room: a map of one row is seen too. */
const LEAST_SIDE = 240;
/** Pixels of a stage's edge, on both sides together. */
const EDGES = 2;

/** The width of a cell, with all n_q × n_k of them in so many pixels. */
export const cellWidth = (n_q: number, n_k: number, wide: number, high: number): number =>
  Math.min(wide / n_k, high / n_q, WIDEST_CELL);

/** The size of a stage for n_q × n_k cells in so much room: no paper between the map and its rulers. */
export function stageOf(n_q: number, n_k: number, wide: number, high: number): { wide: number; high: number } {
  const step = cellWidth(n_q, n_k, wide - EDGES, high - EDGES);
  const side = (n: number, room: number): number =>
    Math.max(0, Math.min(room, Math.max(LEAST_SIDE, Math.ceil(n * step) + EDGES)));
  return { wide: side(n_k, wide), high: side(n_q, high) };
}
