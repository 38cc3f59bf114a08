import { describe, expect, it } from "vitest";

import type { Matrix } from "../src/data";
import { flowOf } from "../src/numbers/flow";
import { HeadMatrices, pairOf } from "../src/numbers/headmatrices";
import { originOf } from "../src/numbers/origins";
import { cellSizes } from "../src/parts/matrix";
import { axisOf } from "../src/parts/matrixlabels";
import { toldOf } from "../src/parts/matrixwords";

const matrix = (name: string, tensor: string, values: (number | null)[][], more: Partial<Matrix> = {}): Matrix => ({
  ...{ name, tensor, symbol: tensor.split("[")[0], formula: "", values },
  ...more,
});

const STEPS = [
  matrix("queries", "Q[i,a]", [
    [1, 2, 3, 4],
    [5, 6, 7, 8],
  ]),
  matrix("keys", "K[j,a]", [
    [1, 0, 0, 0],
    [0, 1, 2, 0],
    [1, 1, 1, 1],
  ]),
  matrix("values", "V[j,b]", [[10], [20], [30]]),
  matrix("raw scores", "R[i,j]", [
    [1, 8, 10],
    [5, 20, 26],
  ]),
  matrix(
    "scaled",
    "S[i,j]",
    [
      [0.5, 4, 5],
      [2.5, 10, 13],
    ],
    { formula: "S[i,j] = R[i,j] / √4" },
  ),
  matrix("masked", "S[i,j]", [
    [0.5, 4, null],
    [2.5, 10, 13],
  ]),
  matrix("lse", "lse[i]", [[4.03], [13.05]]),
  matrix("softmax", "P[i,j]", [
    [0.029, 0.971, 0],
    [0, 0.047, 0.953],
  ]),
  matrix("output", "O[i,b]", [[19.71], [29.53]]),
];

/** The same head of a model whose layer is known: head 1 of 2, its queries rotated. */
const LAYER = [
  matrix("input", "X[i,c]", [
    [1, 2],
    [3, 4],
  ]),
  matrix("query projection", "W_Q[c,a]", [
    [1, 0, 2, 0],
    [0, 1, 0, 2],
  ]),
  matrix(
    "projected queries",
    "Q′[i,a]",
    [
      [1.5, 2, 2, 4],
      [3.5, 4, 6, 8],
    ],
    { formula: "Q′[i,a] = X[i,c] W_Q[c,a] + b_Q[a]", rotary: 2 },
  ),
  ...STEPS,
  matrix("heads side by side", "C[i,e]", [
    [7, 19.71],
    [9, 29.53],
  ]),
];

const [alone, known] = [new HeadMatrices(STEPS, 1), new HeadMatrices(LAYER, 1)];

/** How a number came about, and what is marked for it: names, with a row or a column or both. */
function origin(head: HeadMatrices, name: string, row: number, col: number): [string, string[]] {
  const { how, from } = originOf(head, { at: head.indexOf(name), row, col });
  return [how, from.map((mark) => `${head.all[mark.at].name} ${mark.row ?? ""},${mark.col ?? ""}`)];
}

describe("numbers of a head", () => {
  it.each([
    ["queries", 1, 2, "feature 2 of what token 1 looks for", ["queries 1,"]],
    ["raw scores", 0, 1, "Q[0] · K[1] = 3·2 + 2·1 + 1·0 + …", ["queries 0,", "keys 1,"]],
    ["scaled", 0, 1, "from 8 by R[i,j] / √4", ["raw scores 0,1"]],
    ["masked", 0, 2, "query 0 does not see key 2", ["scaled 0,2"]],
    ["masked", 1, 2, "query 1 sees key 2: as before", ["scaled 1,2"]],
    ["lse", 1, 0, "log of the sum of exp over row 1 of the scores", ["masked 1,"]],
    ["softmax", 0, 2, "exp(−∞ − 4.03)", ["masked 0,", "masked 0,2", "lse 0,0"]],
    ["output", 1, 0, "Σ_j P[1,j] V[j,0] = 0.953·30 + 0.047·20 + 0·10", ["softmax 1,", "values ,0"]],
  ])("%s [%i, %i]", (name, row, col, how, from) => expect(origin(alone, name, row, col)).toEqual([how, from]));

  it.each([
    ["input", 1, 0, "feature 0 of token 1, as it enters the layer", ["input 1,0"]],
    ["projected queries", 0, 0, "X[0] · W_Q[:,0] = 1·1 + 2·0 + bias 0.5", ["input 0,", "query projection ,0"]],
    [
      "queries",
      1,
      1,
      "(3.5, 4) rotated by an angle that grows with place 1",
      ["projected queries 1,1", "projected queries 1,0"],
    ],
    ["queries", 1, 3, "8: this feature is not rotated", ["projected queries 1,3"]],
    ["heads side by side", 0, 1, "O[0,0] of this head", ["output 0,0"]],
    ["heads side by side", 0, 0, "O[0,0] of head 0: choose that head to see what made it", ["heads side by side 0,0"]],
  ])("%s [%i, %i] of a known layer", (name, row, col, how, from) =>
    expect(origin(known, name, row, col)).toEqual([how, from]),
  );
});

describe("a number that is chosen", () => {
  const spot = { at: 0, row: 1, col: 2 };
  it.each([
    ["queries", { i: 1 }],
    ["keys", { j: 1 }],
    ["softmax", { i: 1, j: 2 }],
    ["query projection", {}],
  ])("of %s chooses a query, a key, both or none", (name, pair) => {
    expect(pairOf(known.all[known.indexOf(name)], spot)).toEqual(pair);
  });

  it("is told with its tokens", () => {
    const told = toldOf(alone, { at: alone.indexOf("raw scores"), row: 0, col: 1 }, (axis) => `${axis} `);
    expect(told.number).toBe("R[0,1] = 8");
    expect(told.about).toMatch(/\(raw scores; query 0 “query·”, key 1 “key·”\)$/);
  });
});

describe("the matrices of a head", () => {
  const written = (head: HeadMatrices): string[] =>
    flowOf(head).map(({ parts }) =>
      parts
        .map((part) => ("sign" in part ? part.sign : "at" in part ? head.all[part.at].name : `[${part.symbol}]`))
        .join(" "),
    );

  it("are one flow of equations, each matrix shown once", () => {
    const scores = ["raw scores → scaled → masked", "exp ( [S] − lse ) = softmax", "[P] · values = output"];
    expect(written(alone)).toEqual([`queries · keys = ${scores[0]}`, ...scores.slice(1)]);
    expect(written(known)).toEqual([
      "input · query projection = projected queries → queries",
      `[Q] · keys = ${scores[0]}`,
      ...scores.slice(1),
    ]);
    const parts = [alone, known].map((head) => flowOf(head).flatMap((one) => one.parts.filter((x) => "at" in x)));
    expect(parts.map((shown) => shown.length)).toEqual([9, 12]);
  });

  it("go straight to queries that are not rotated", () => {
    const plain = LAYER.filter(({ name }) => name !== "projected queries");
    expect(written(new HeadMatrices(plain, 1))[0]).toBe("input · query projection = queries");
  });

  it("have labels of the tokens that rows and columns are of", () => {
    const axes = (name: string) => {
      const matrix = known.all[known.indexOf(name)];
      return [axisOf(matrix, "row"), axisOf(matrix, "column")];
    };
    expect(["input", "query projection", "keys", "softmax", "lse"].map(axes)).toEqual([
      ["query", null],
      [null, null],
      ["key", null],
      ["query", "key"],
      ["query", null],
    ]);
  });

  it("have cells that numbers fit in, or cells of one size", () => {
    expect(new Set(cellSizes(alone).map(String))).toEqual(new Set(["46,22"]));
    const rows = (n: number, m: number): number[][] => Array.from({ length: n }, () => new Array<number>(m).fill(0));
    const large = [matrix("queries", "Q[i,a]", rows(54, 8)), matrix("lse", "lse[i]", rows(54, 1))];
    expect(cellSizes(new HeadMatrices(large, 0))).toEqual([
      [4, 4],
      [8, 4],
    ]);
  });
});
