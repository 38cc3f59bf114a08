/** The matrices of one head, by name, and places in them. */

import type { Matrix } from "../data";
import { inside } from "./windows";

/** null: −∞. */
export type Value = number | null;

/** One cell of the matrix number `at`. */
export interface Spot {
  at: number;
  row: number;
  col: number;
}

/** Cells of the matrix number `at`: a row, a column, or one cell. */
export interface Mark {
  at: number;
  row?: number;
  col?: number;
}

/** Matrices whose rows are keys. */
const KEYED: ReadonlySet<string> = new Set(["source", "projected keys", "keys", "values"]);

/** The query and the key that a cell belongs to, as far as it does: weights of a projection belong to none. */
export function pairOf({ name, symbol, tensor }: Matrix, { row, col }: Spot): { i?: number; j?: number } {
  if (symbol.startsWith("W_")) return {};
  if (KEYED.has(name)) return { j: row };
  return tensor.includes("j]") ? { i: row, j: col } : { i: row };
}

export class HeadMatrices {
  constructor(
    readonly all: readonly Matrix[],
    /** The number of the head in its layer. */
    readonly number: number,
  ) {}

  /** The number of a matrix; −1 if the head has none of that name. */
  indexOf(name: string): number {
    return this.all.findIndex((one) => one.name === name);
  }

  valueAt({ at, row, col }: Spot): Value {
    return this.all[at].values[row][col];
  }

  row(at: number, row: number): Value[] {
    return this.all[at].values[row];
  }

  column(at: number, col: number): Value[] {
    return this.all[at].values.map((values) => values[col]);
  }

  /** The matrix of scores from which a later one is made; −1 if it is made of none. */
  scoresBefore(at: number): number {
    return this.all.findLastIndex(({ name, symbol }, k) => k < at && (symbol === "S" || name === "raw scores"));
  }

  has({ at, row }: Spot): boolean {
    return Boolean(this.all[at]?.values[row]);
  }

  /** The cell nearest to a place in matrix `at`. */
  within({ row, col }: Omit<Spot, "at">, at: number): Spot {
    const { values } = this.all[at];
    return { at, row: inside(row, values.length), col: inside(col, values[0].length) };
  }
}
