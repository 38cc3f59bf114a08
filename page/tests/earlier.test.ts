import { describe, expect, it } from "vitest";

import type { Layer, Words } from "../src/data";
import { readAt } from "../src/parts/earlier";
import { earlierOf, ranked } from "../src/source/earlier";

const of = (head: number, row: number[], norms: number[] = []) => ({
  ...{ layer: 0, head, row: Float32Array.from(row), norms: Float32Array.from(norms) },
});

describe("earlier heads", () => {
  it("are ranked by weight, weight and value, another token than the one that is read", () => {
    const { values, heads } = ranked(0.5, 2, [of(0, [0.25, 0, 0.75], [1, 1, 8]), of(1, [0.5, 0.5, 0], [1, 4, 1])]);
    expect(values).toBe(true);
    expect(heads.map(({ head, key, product }) => [head, key, product])).toEqual([
      [1, 1, 1],
      [0, 0, 0.125],
    ]);
  });

  it("leave out the first token and hidden keys where no values are known", () => {
    const { values, heads } = ranked(1, 2, [of(0, [0.75, 0.25, 0], [1, 1, 1]), of(1, [1, NaN, NaN])]);
    expect(values).toBe(false);
    expect(heads).toEqual([{ layer: 0, head: 0, key: 1, weight: 0.25, norm: null, product: 0.25 }]);
  });

  it("are those of the query that stands at the key", async () => {
    const asked: number[] = [];
    const heads = {
      row: (_: number, __: number, i: number) => (asked.push(i), Promise.resolve(Float32Array.from([0, 0.5, 0.5]))),
      norms: () => new Float32Array(0),
    };
    const layers = [0, 1].map(() => ({ heads: 1, n_q: 2, n_k: 3, offset: 1 }) as Layer);
    const words = { unwritten: { first: "first", cached: "cached", two_texts: "two" } } as Words;
    const told = await earlierOf(heads, layers, { layer: 1, head: 0, i: 1, j: 2 }, words);
    expect([asked, told.heads[0].key, told.heads[0].product]).toEqual([[1, 1], 1, 0.25]);
    const why = async (layer: number, j: number) =>
      (await earlierOf(heads, layers, { layer, head: 0, i: 1, j }, words)).why;
    expect([await why(0, 1), await why(1, 0), await why(1, 1)]).toEqual(["first", "cached", ""]);
  });

  it("are shown of the key that is read most, but the first token", () => {
    expect(readAt(Float32Array.from([0.9, 0.02, 0.08, NaN]), true)).toBe(2);
    expect(readAt(Float32Array.from([0.9, 0.02, 0.08]), false)).toBe(0);
    expect(readAt(Float32Array.from([1]), true)).toBe(0);
  });
});
