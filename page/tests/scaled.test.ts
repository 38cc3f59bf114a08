import { describe, expect, it } from "vitest";

import { curvesOf, pooled, rowOf, rowsWith, weightsOf } from "../src/numbers/scaled";

/** Rows 3 and 4 of a causal head with five keys and four features. */
const block = {
  dots: Float32Array.from([1, 2, 3, 4, NaN, 5, 1, 0, 2, 8]),
  r0: 3,
  r1: 5,
  n_k: 5,
  d: 4,
  sink: -Infinity,
};

describe("attention with and without 1/√d", () => {
  it("shows a whole head, or rows up to the chosen query", () => {
    expect(rowsWith(7, 256, 256)).toEqual([0, 256]);
    expect(rowsWith(700, 1000, 1000)).toEqual([637, 701]);
    expect(rowsWith(5, 1000, 1000)).toEqual([0, 6]);
    expect(rowsWith(9, 10, 2 ** 21)).toEqual([9, 10]);
  });

  it("divides dot products by √d and the temperature", () => {
    const ratio = (side: 0 | 1, temperature: number): number => {
      const [row] = weightsOf(block, side, temperature);
      expect(row[4]).toBeNaN();
      return Math.log(row[1] / row[0]);
    };
    expect([ratio(0, 1), ratio(0, 2), ratio(1, 1), ratio(1, 2)].map((x) => Number(x.toFixed(6)))).toEqual([
      0.5, 0.25, 1, 0.5,
    ]);
    expect([...rowOf(block, 4)]).toEqual([5, 1, 0, 2, 8]);
  });

  it("measures a row at each temperature, and random rows at each d", () => {
    const hot = curvesOf(block, 4, "temperature", 1).sides.map((side) => side[side.length - 1].entropy);
    expect(hot[0]).toBeGreaterThan(hot[1]);
    const { x, sides } = curvesOf(block, 4, "d", 1);
    expect([x[0], x[x.length - 1]]).toEqual([1, 1024]);
    expect(sides[0][50].largest).toBeCloseTo(sides[0][0].largest, 6);
    expect(sides[1][50].largest).toBeGreaterThan(0.99);
  });

  it("counts a learned sink", () => {
    const sunk = { ...block, sink: 5 };
    const [without, with_] = [block, sunk].map((one) => curvesOf(one, 4, "temperature", 1).sides[1]);
    expect(with_[30].largest).toBeLessThan(without[30].largest);
    expect(weightsOf(sunk, 1, 1)[1].reduce((sum, x) => sum + x)).toBeCloseTo(1 - weightsOf(sunk, 1, 1)[1][0], 6);
  });

  it("keeps the largest weight of each part, and parts that hold nothing", () => {
    expect([...pooled(Float64Array.from([0.1, 0.4, NaN, 0.2, NaN, NaN]), 3)]).toEqual([0.4, 0.2, NaN]);
  });
});
