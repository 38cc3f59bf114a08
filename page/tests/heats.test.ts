import { describe, expect, it } from "vitest";

import type { Grid, Layer } from "../src/data";
import { chosenOf, MOST_TOKENS, pickedOn, rolledOut, shownOf } from "../src/numbers/heats";
import { heatOf, rolloutOf } from "../src/source/heats";
import type { Weights } from "../src/source/weights";
import { START, type State } from "../src/state";

const state: State = { ...START, layer: 0, head: 0, dark: false };
const grid: Grid = {
  ...{ kind: "picture", side: "both", rows: 2, columns: 2, tokens: [1, 2, 3, -1] },
  ...{ picture: null, width: 4, height: 4, seconds: null },
};
const layers = [1, 2].map((heads) => ({ heads, n_q: 4, n_k: 4, cross: false }) as Layer);

/** Row i of a head looks at key (i + layer + head) % 4 with 0.75, and at itself with 0.25. */
const weightOf = (layer: number, head: number, i: number, j: number): number =>
  (j === (i + layer + head + 1) % 4 ? 0.75 : 0) + (i === j ? 0.25 : 0);

const of = (layer: number, head: number): Weights =>
  ({
    block: async (r0: number, r1: number, c0: number, c1: number) =>
      Float32Array.from({ length: (r1 - r0) * (c1 - c0) }, (_, p) =>
        weightOf(layer, head, r0 + Math.floor(p / (c1 - c0)), c0 + (p % (c1 - c0))),
      ),
  }) as unknown as Weights;

describe("what is chosen on a picture", () => {
  it("is the token that looks, with its patch if it has one", () => {
    expect(chosenOf(grid, state, 2, 0)).toEqual({ by: false, tokens: [2], patches: [1] });
    expect(chosenOf(grid, state, 0, 0)).toEqual({ by: false, tokens: [0], patches: [] });
    expect(chosenOf({ ...grid, side: "keys" }, state, 2, 0).patches).toEqual([]);
  });
  it("is a region that is looked at, without patches that have no token", () => {
    const by = { ...state, by: true };
    expect(chosenOf(grid, by, 0, 2)).toEqual({ by: true, tokens: [2], patches: [1] });
    expect(chosenOf(grid, { ...by, span: 3 }, 0, 2)).toEqual({ by: true, tokens: [1, 2, 3], patches: [0, 1, 2, 3] });
    const many = { ...grid, rows: 20, columns: 20, tokens: Array.from({ length: 400 }, (_, k) => k) };
    expect(chosenOf(many, { ...by, span: 399 }, 0, 0).tokens).toHaveLength(MOST_TOKENS);
  });
  it("follows a click and a drag", () => {
    expect(pickedOn(grid, false, 1, 1)).toEqual({ i: 2, j: -1 });
    expect(pickedOn(grid, true, 1, 1)).toEqual({ by: true, j: 2, span: -1 });
    expect(pickedOn(grid, false, 0, 2)).toEqual({ by: true, j: 1, span: 3 });
    expect(pickedOn({ ...grid, side: "keys" }, false, 1, 1)).toEqual({ by: true, j: 2, span: -1 });
    expect(pickedOn(grid, false, 3, 3)).toEqual({});
  });
});

describe("heat in a saved file", () => {
  it("is the row or the column of a token in every head, laid on patches", async () => {
    const rows = await heatOf(layers, of, grid, 0, "row");
    expect(rows.layers.map((heads) => heads.length)).toEqual([1, 2]);
    expect(rows.layers[0][0]).toEqual([0.75, 0, 0, null]);
    expect(rows.layers[1]).toEqual([
      [0, 0.75, 0, null],
      [0, 0, 0.75, null],
    ]);
    expect((await heatOf(layers, of, grid, 3, "column")).layers[0][0]).toEqual([0, 0.75, 0.25, null]);
  });
  it("is shown of a head, or as a mean", () => {
    const heads = [[Float32Array.of(1, 0)], [Float32Array.of(0, 1), Float32Array.of(0, 0)]];
    expect([...shownOf({ heads }, { ...state, layer: 1, head: 0 })]).toEqual([0, 1]);
    expect([...shownOf({ heads }, { ...state, layer: 1, heat: "layer" })]).toEqual([0, 0.5]);
    expect(shownOf({ heads }, { ...state, heat: "all" })[0]).toBeCloseTo(1 / 3);
    const means = [Float32Array.of(1, 0), Float32Array.of(0, 1)]; // a layer of two heads counts twice
    expect([...shownOf({ heads, means }, { ...state, layer: 1, heat: "layer" })]).toEqual([0, 1]);
    expect(shownOf({ heads, means }, { ...state, heat: "all" })[1]).toBeCloseTo(2 / 3);
  });
  it("rolls out as the product of mean maps, each halfway to the identity", async () => {
    const n = 4;
    const mean = (layer: number, i: number, j: number): number =>
      layers[layer].heads === 1 ? weightOf(0, 0, i, j) : (weightOf(1, 0, i, j) + weightOf(1, 1, i, j)) / 2;
    const half = (layer: number): number[][] =>
      Array.from({ length: n }, (_, i) =>
        Array.from({ length: n }, (__, j) => (mean(layer, i, j) + (i === j ? 1 : 0)) / 2),
      );
    const [first, second] = [half(0), half(1)];
    const expected = Array.from({ length: n }, (_, j) => second[0].reduce((sum, x, k) => sum + x * first[k][j], 0));
    const rolled = await rolledOut(2, n, 0, async (layer, i) =>
      Float32Array.from({ length: n }, (_, j) => mean(layer, i, j)),
    );
    rolled.forEach((x, j) => expect(x).toBeCloseTo(expected[j], 6));
    const { weights } = await rolloutOf(layers, of, grid, 0);
    expect(weights[3]).toBeNull();
    [1, 2, 3].forEach((token, patch) => expect(weights[patch]).toBeCloseTo(expected[token], 6));
  });
});
