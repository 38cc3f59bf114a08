/** The pyramid of a map: level 0 is the coarsest, the whole map in one tile; the last is exact, one pixel a pair. */

export interface Pyramid {
  n_q: number;
  n_k: number;
  tile: number;
  max_level: number;
}

export function maxLevel(n_q: number, n_k: number, tile: number): number {
  return Math.max(0, Math.ceil(Math.log2(Math.max(n_q, n_k) / tile)));
}

/** Queries and keys that a pixel of a level covers. */
export function perPixel(pyramid: Pyramid, level: number): number {
  return 2 ** (pyramid.max_level - level);
}

/** Queries [r0, r1) and keys [c0, c1). */
export interface Part {
  r0: number;
  r1: number;
  c0: number;
  c1: number;
}

export interface Block extends Part {
  /** Pixels. */
  rows: number;
  cols: number;
}

/** What a tile covers; x counts keys, y queries. */
export function tileBlock(pyramid: Pyramid, level: number, x: number, y: number): Block {
  const step = perPixel(pyramid, level);
  const span = pyramid.tile * step;
  const [r0, c0] = [y * span, x * span];
  const r1 = Math.min(pyramid.n_q, r0 + span);
  const c1 = Math.min(pyramid.n_k, c0 + span);
  return { r0, r1, c0, c1, rows: Math.ceil((r1 - r0) / step), cols: Math.ceil((c1 - c0) / step) };
}
