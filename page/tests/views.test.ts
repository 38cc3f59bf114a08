import { describe, expect, it } from "vitest";

import type { Layer } from "../src/data";
import { arcsIn, leastOf, shownFrom, SINK, USUAL, windowOf } from "../src/numbers/arcs";
import { inColumns, type TokenRow } from "../src/parts/arcdrawing";
import { asideSaid, leavesAside, placeOf, split } from "../src/parts/aside";
import { largestHere } from "../src/parts/legend";
import { stepOf } from "../src/parts/shadedlines";
import { pickedBy } from "../src/parts/tokenrow";
import { arcPath } from "../src/parts/wordline";
import { partOfScale } from "../src/share/effects";
import { keyOf, sameTokens } from "../src/views/view";

const layer = (n_q: number, n_k: number, cross = false): Layer => ({ n_q, n_k, cross }) as Layer;
const none = new Float32Array(0);

describe("a line between words", () => {
  it("is an arc above both", () => {
    expect(arcPath({ x: 90, y: 60 }, { x: 10, y: 30 }, 24)).toBe("M90 60C90 6 10 6 10 30");
  });
});

describe("a word that is clicked", () => {
  it("is the query of its own text, and the key of another", () => {
    expect(pickedBy(3, layer(5, 5))).toEqual({ i: 3, j: -1 });
    expect(pickedBy(3, layer(5, 5, true))).toEqual({ j: 3 });
  });
});

describe("arcs", () => {
  // Three queries, five keys: the first rows and columns of a square would lose keys 3 and 4.
  const weights = Float32Array.from([0.1, 0, 0, 0, 0.9, 0, 0.3, 0, 0.7, 0, NaN, 0.2, 0.8, 0, 0]);
  const block = { weights, rows: 3, cols: 5, r0: 10, c0: 20, sinks: none };

  it("go from each query to its own keys where these are another text", () => {
    expect(arcsIn(block, false, false).map(({ i, j }) => [i, j])).toEqual([
      [10, 24],
      [12, 22],
      [11, 23],
      [11, 21],
      [12, 21],
      [10, 20],
    ]);
  });

  it("leave out a token on itself in one text alone", () => {
    const square = { weights: Float32Array.from([0.6, 0.4, 0.5, 0.5]), rows: 2, cols: 2, r0: 0, c0: 0, sinks: none };
    expect(arcsIn(square, true, false).map(({ i, j }) => [i, j])).toEqual([
      [1, 0],
      [0, 1],
    ]);
    expect(arcsIn(square, false, false)).toHaveLength(4);
    expect(arcsIn(square, false, true).every(({ j }) => j !== 0)).toBe(true);
  });

  it("show the learned sink", () => {
    const sinks = new Float32Array(13).fill(0.5);
    const found = arcsIn({ ...block, sinks }, false, false).filter(({ j }) => j === SINK);
    expect(found.map(({ i, weight }) => [i, weight])).toEqual([10, 11, 12].map((i) => [i, 0.5]));
    expect(arcsIn({ ...block, sinks }, false, true).some(({ j }) => j === SINK)).toBe(false);
  });

  it("lead from column to column where tokens of two texts are few", () => {
    const row = (n: number): TokenRow => ({ words: Array<string>(n) }) as unknown as TokenRow;
    expect(inColumns({ rows: [row(4), row(24)], sink: false })).toBe(true);
    expect(inColumns({ rows: [row(4), row(24)], sink: true })).toBe(false);
    expect(inColumns({ rows: [row(4)], sink: false })).toBe(false);
  });

  it("are of a window around the chosen token, and from a weight on", () => {
    expect(windowOf(40, 39)).toEqual({ start: 0, stop: 40 });
    expect(windowOf(500, 499)).toEqual({ start: 436, stop: 500 });
    expect(windowOf(500, 100)).toEqual({ start: 68, stop: 132 });
    const arcs = Array.from({ length: 500 }, (_, k) => ({ i: k, j: 0, weight: 0.01 / (k + 1) }));
    expect(leastOf(arcs)).toBe(0.0001);
    expect(leastOf(arcs.slice(0, 3))).toBe(USUAL);
    expect(shownFrom(arcs, 0.001)).toHaveLength(10);
    expect(shownFrom(arcs, 0)).toHaveLength(400);
  });
});

describe("two texts", () => {
  it("are known by their kind and their lengths", () => {
    expect([layer(4, 4), layer(4, 4, true), layer(4, 9)].map(sameTokens)).toEqual([true, false, false]);
  });
});

describe("queries after a cache", () => {
  const later = { ...layer(4, 900), offset: 896 };
  it("stand at the last keys", () => {
    expect([0, 3].map((i) => keyOf(later, i))).toEqual([896, 899]);
    expect([keyOf(layer(4, 900), 3), keyOf(layer(4, 900, true), 3), keyOf({ ...later, offset: -2 }, 1)]).toEqual([
      3,
      null,
      0,
    ]);
  });
  it("are drawn in Scale with the keys before them", () => {
    expect(partOfScale(later, 1)).toEqual({ r0: 0, r1: 2, c0: 642, c1: 898 });
    expect(partOfScale({ ...layer(900, 900) }, 899)).toEqual({ r0: 644, r1: 900, c0: 644, c1: 900 });
    expect(partOfScale(layer(4, 900, true), 1)).toEqual({ r0: 0, r1: 2, c0: 0, c1: 256 });
    expect(partOfScale(layer(4, 9, true), 1)).toEqual({ r0: 0, r1: 4, c0: 0, c1: 9 });
  });
});

describe("lists", () => {
  const kept = (of: Layer, at: [number, number], by: boolean): number[] =>
    [0, 1, 2, 3, 4, 5, 6].filter((t) => !leavesAside(of, ...at, by)(t));

  it("leave the first token, the token itself and its neighbours aside", () => {
    expect(kept(layer(7, 7), [4, 5], false)).toEqual([1, 2, 6]);
    expect(kept(layer(7, 7), [3, 5], false)).toEqual([1, 6]);
    expect(kept(layer(7, 7), [4, 5], true)).toEqual([0, 1, 2, 6]); // a query that attends to token 4
    expect(kept(layer(3, 7), [2, 3], false)).toEqual([0, 1, 2, 3, 4, 5, 6]);
    expect(kept(layer(7, 7, true), [4, 5], false)).toEqual([0, 1, 2, 3, 4, 5, 6]);
  });

  it("say what they leave aside, and are never empty", () => {
    expect(split([0, 5, 3, 4], (t) => t === 0 || t === 5)).toEqual([
      [3, 4],
      [0, 5],
    ]);
    expect(split([0, 5], () => true)).toEqual([[0, 5], []]);
    const weights = Float32Array.from([0.75, 0, 0, 0.125, 0.0625, 0.0625]);
    expect(asideSaid([0, 3, 4, 5], weights, 4, 5)).toBe("the first token 0.750, itself 0.063, its neighbours 0.188");
  });

  it("say of a row's shades what the darkest is, and what is on no token", () => {
    expect(largestHere(null)).toBe(", the largest here");
    expect(largestHere(0.8214)).toBe(", the largest here; the learned sink has 0.82");
  });

  it("have the learned sink where its weight belongs", () => {
    const weights = Float32Array.from([0.1, 0.5, 0.3]);
    expect([0.9, 0.4, 0.05].map((sink) => placeOf(sink, [1, 2, 0], weights))).toEqual([0, 1, 3]);
  });
});

it("goes on by lines and to the ends", () => {
  expect(["ArrowLeft", "ArrowDown", "Home", "End", "x"].map((key) => stepOf(key, 7))).toEqual([
    -1,
    7,
    -Infinity,
    Infinity,
    undefined,
  ]);
});
