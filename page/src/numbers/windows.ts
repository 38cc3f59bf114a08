/** Places in a row of n, and the part of it that is shown. */

/** The place nearest to `at`. */
export const inside = (at: number, n: number): number => Math.max(0, Math.min(n - 1, at));

/** The places [start, stop) that are shown: so many at most, with `at` among them. */
export function windowAround(at: number, n: number, most: number): { start: number; stop: number } {
  const start = Math.max(0, Math.min(n - most, at - (most >> 1)));
  return { start, stop: Math.min(n, start + most) };
}
