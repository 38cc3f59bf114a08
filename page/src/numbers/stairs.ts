/** Means of bins of distances, as steps of a chart. */

import type { Profile } from "../data";
import { count, figure } from "./format";

/** A mean of fewer pairs is marked: one weight decides it. */
export const FEW_PAIRS = 16;

/** A step from x[k] to x[k + 1] for each bin; the last place has no step. */
export interface Stairs {
  edges: number[];
  pairs: number[];
  values: (number | null)[];
  x: number[];
  /** The means of enough pairs, and those of few; null where the other has the mean. */
  many: (number | null)[];
  few: (number | null)[];
}

export function stairs({ values, edges, pairs }: Profile): Stairs {
  const [ends, known] = [edges ?? [], pairs ?? []];
  const few = values.map((_, k) => (known[k] ?? FEW_PAIRS) < FEW_PAIRS);
  // Where one curve ends it goes on to the end of its last step, where the other begins.
  const part = (mine: (k: number) => boolean): (number | null)[] =>
    [...values, values[values.length - 1] ?? null].map((value, k) =>
      mine(Math.min(k, values.length - 1)) ? value : k > 0 && mine(k - 1) ? (values[k - 1] ?? null) : null,
    );
  return {
    edges: ends,
    pairs: known,
    values,
    x: ends.map((edge) => edge - 0.5),
    many: part((k) => !few[k]),
    few: part((k) => few[k] ?? false),
  };
}

/** A bin by its place: its distances, its mean, and whether that is of few pairs. */
export function binAt({ edges, pairs, values }: Stairs, place: number): { name: string; text: string; few: boolean } {
  const k = Math.min(place, values.length - 1);
  const [from, to] = [edges[k] ?? 0, (edges[k + 1] ?? 1) - 1];
  const of = pairs[k] ?? 0;
  return {
    name: from === to ? count(from) : `${count(from)} to ${count(to)}`,
    text: `${figure(values[k])} (${count(of)} pair${of === 1 ? "" : "s"})`,
    few: of < FEW_PAIRS,
  };
}

/** 0, 1, 2, 5, 10, … in both directions, as far as they lie between two ends. */
export function roundMarks(low: number, high: number): number[] {
  const marks = [0];
  for (let power = 1; power <= Math.max(-low, high); power *= 10)
    for (const step of [1, 2, 5]) marks.push(step * power, -step * power);
  return marks.filter((mark) => mark >= low && mark <= high).sort((a, b) => a - b);
}
