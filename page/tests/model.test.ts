import { expect, it } from "vitest";

import { dots } from "../src/model/blocks";
import { looped, productBy } from "../src/model/product";

const numbers = (count: number, seed: number): Float32Array =>
  Float32Array.from({ length: count }, (_, p) => Math.sin(seed + 1.3 * p * p));

it.each([1, 2, 7])("multiplies %i rows by a matrix", (n) => {
  const [c, m] = [12, 16];
  const [x, w] = [numbers(n * c, 1), numbers(c * m, 2)];
  const made = looped(x, c, w, m);
  expect(made.length).toBe(n * m);
  for (let i = 0; i < n; i++) {
    for (let j = 0; j < m; j++) {
      let sum = 0;
      for (let a = 0; a < c; a++) sum += x[i * c + a] * w[a * m + j];
      expect(made[i * m + j]).toBeCloseTo(sum, 4);
    }
  }
});

it("multiplies by a loop where there is no module, or no browser that takes it", () => {
  expect(productBy(undefined)).toBe(looped);
  expect(productBy(new ArrayBuffer(3))).toBe(looped);
});

it("gives rows of dot products a width of whole vectors", () => {
  const [n, d] = [5, 4];
  const [q, k] = [numbers(n * d, 3), numbers(n * d, 4)];
  const { rows, width } = dots(looped, q, k, d);
  expect([width, rows.length]).toEqual([8, n * 8]);
  const dot = (i: number, j: number): number => [0, 1, 2, 3].reduce((sum, a) => sum + q[i * d + a] * k[j * d + a], 0);
  for (let i = 0; i < n; i++) for (let j = 0; j < 8; j++) expect(rows[i * 8 + j]).toBeCloseTo(j < n ? dot(i, j) : 0, 4);
});
