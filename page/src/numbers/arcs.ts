/** Which weights have an arc. */

import { windowAround } from "./windows";

/** The place of the learned sink among keys. */
export const SINK = -1;

/** The weight of query i on key j, both counted from the first token; j = SINK is the learned sink. */
export interface Arc {
  i: number;
  j: number;
  weight: number;
}

/** Weights (rows, cols) of queries from r0 and keys from c0. */
export interface Block {
  weights: Float32Array;
  rows: number;
  cols: number;
  r0: number;
  c0: number;
  /** The weight of each query on the learned sink; empty without one. */
  sinks: Float32Array;
}

const MOST = 64;
const STRONGEST = 400;
/** The weight from which there are arcs, unless fewer than FEW reach it: then about ENOUGH arcs are shown. */
export const USUAL = 0.05;
const FEW = 10;
const ENOUGH = 100;

/** The tokens [start, stop) of n that are shown: 64 at most, with token `at` among them. */
export const windowOf = (n: number, at: number): { start: number; stop: number } => windowAround(at, n, MOST);

/** The weights above 0, the heaviest first. With `same`, queries and keys are the same tokens: none has an arc to itself. */
export function arcsIn({ weights, rows, cols, r0, c0, sinks }: Block, same: boolean, hide: boolean): Arc[] {
  const arcs: Arc[] = [];
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < cols; c++) {
      const [i, j, weight] = [r0 + r, c0 + c, weights[r * cols + c]];
      if (weight > 0 && !(same && i === j) && !(hide && j === 0)) arcs.push({ i, j, weight });
    }
    if (sinks.length && !hide && sinks[r0 + r] > 0) arcs.push({ i: r0 + r, j: SINK, weight: sinks[r0 + r] });
  }
  return arcs.sort((a, b) => b.weight - a.weight);
}

/** The weight from which arcs are shown, unless the reader chose one. */
export function leastOf(arcs: readonly Arc[]): number {
  if (arcs.length < FEW || arcs[FEW - 1].weight >= USUAL) return USUAL;
  return Math.max(1e-5, Number((arcs[ENOUGH] ?? arcs[arcs.length - 1]).weight.toPrecision(1)));
}

/** The arcs from a weight on, 400 at most. */
export const shownFrom = (arcs: readonly Arc[], least: number): Arc[] =>
  arcs.filter(({ weight }) => weight >= least).slice(0, STRONGEST);
