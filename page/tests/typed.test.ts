import { expect, test } from "vitest";

import { meanVariances } from "../src/source/typed";

/** All orders of 0, …, d − 1. */
const orders = (d: number): number[][] =>
  d === 0 ? [[]] : orders(d - 1).flatMap((x) => Array.from({ length: d }, (_, at) => x.toSpliced(at, 0, d - 1)));

test("the mean variance of m features is that over every order in which they can be added", () => {
  const products = Array.from({ length: 7 }, (_, p) => [0, 1, 2, 3].map((a) => Math.sin(3 * p + 5 * a * a + p * a)));
  const expected = [0, 1, 2, 3].map((m) => {
    const all = orders(4).map((order) => {
      const sums = products.map((x) => order.slice(0, m + 1).reduce((sum, a) => sum + x[a], 0));
      const mean = sums.reduce((sum, y) => sum + y, 0) / sums.length;
      return sums.reduce((sum, y) => sum + (y - mean) ** 2, 0) / sums.length;
    });
    return all.reduce((sum, y) => sum + y, 0) / all.length;
  });
  meanVariances(products).forEach((found, m) => expect(found).toBeCloseTo(expected[m], 12));
});

test("one feature has its own variance", () => {
  expect(meanVariances([[1], [3]])).toEqual([1]);
});
