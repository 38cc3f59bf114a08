/** How each number of a head came about: in words, and the cells that it was made of. */

import { figure } from "./format";
import type { HeadMatrices, Mark, Spot, Value } from "./headmatrices";

export interface Origin {
  how: string;
  from: Mark[];
}

type Explain = (head: HeadMatrices, spot: Spot) => Origin;

/** Terms of a sum that are written out. */
const TERMS = 3;

/** A number with four digits. */
export const said = (value: Value): string => (value === null ? "−∞" : figure(value, 4));

/** A sum of products, its largest terms first. */
function sum(a: Value[], b: Value[]): string {
  const products = a.map((x, k) => [(x ?? 0) * (b[k] ?? 0), k] as const);
  const order = [...products].sort((x, y) => Math.abs(y[0]) - Math.abs(x[0])).slice(0, TERMS);
  const terms = order.map(([, k]) => `${said(a[k])}·${said(b[k])}`).join(" + ");
  return a.length > TERMS ? `${terms} + …` : terms;
}

/** A number of a product of two matrices, plus a bias if its formula has one. */
function product(head: HeadMatrices, spot: Spot, left: number, right: number): Origin {
  const { at, row, col } = spot;
  const [a, b] = [head.row(left, row), head.column(right, col)];
  const total = a.reduce<number>((up, x, k) => up + (x ?? 0) * (b[k] ?? 0), 0);
  const biased = head.all[at].formula.includes("b_");
  const bias = biased ? ` + bias ${said((head.valueAt(spot) ?? 0) - total)}` : "";
  const [x, w] = [head.all[left].symbol, head.all[right].symbol];
  return {
    how: `${x}[${row}] · ${w}[:,${col}] = ${sum(a, b)}${bias}`,
    from: [
      { at: left, row },
      { at: right, col },
    ],
  };
}

/** A rotary embedding: a feature and its partner were rotated. */
function rotated(head: HeadMatrices, { row, col }: Spot, bare: number): Origin {
  const half = (head.all[bare].rotary ?? 0) / 2;
  const cell = { at: bare, row, col };
  if (col >= 2 * half) return { how: `${said(head.valueAt(cell))}: this feature is not rotated`, from: [cell] };
  const partner = { ...cell, col: col < half ? col + half : col - half };
  const pair = [cell, partner].sort((x, y) => x.col - y.col);
  return {
    how: `(${pair.map((one) => said(head.valueAt(one))).join(", ")}) rotated by an angle that grows with place ${row}`,
    from: [cell, partner],
  };
}

/** What a layer reads of each query, and of each key: two texts in cross-attention. */
const inputOf = (head: HeadMatrices): number => head.indexOf("input");
const sourceOf = (head: HeadMatrices): number => (head.indexOf("source") < 0 ? inputOf(head) : head.indexOf("source"));

const entering: Explain = (_, { at, row, col }) => ({
  how: `feature ${col} of token ${row}, as it enters the layer`,
  from: [{ at, row, col }],
});

/** A weight of a projection, which is made of nothing here. */
const counting =
  (of: string, into: string): Explain =>
  (_, { at, row, col }) => ({
    how: `how much feature ${row} of ${of} counts for feature ${col} of ${into}`,
    from: [{ at, row, col }],
  });

/** Queries, keys or values: from the input if the model is known, from nothing if it is not. */
function projected(what: string, does: string, inputs: (head: HeadMatrices) => number): Explain {
  return (head, spot) => {
    const projection = head.indexOf(`${what} projection`);
    const bare = head.indexOf(`projected ${head.all[spot.at].name}`);
    if (projection < 0)
      return { how: `feature ${spot.col} of what token ${spot.row} ${does}`, from: [{ at: spot.at, row: spot.row }] };
    return bare < 0 ? product(head, spot, inputs(head), projection) : rotated(head, spot, bare);
  };
}

const besides: Explain = (head, { at, row, col }) => {
  const out = head.indexOf("output");
  const width = head.row(out, 0).length;
  const [number, feature] = [Math.floor(col / width), col % width];
  if (number === head.number)
    return { how: `O[${row},${feature}] of this head`, from: [{ at: out, row, col: feature }] };
  return {
    how: `O[${row},${feature}] of head ${number}: choose that head to see what made it`,
    from: [{ at, row, col }],
  };
};

const logSumExp: Explain = (head, { at, row }) => ({
  how: `log of the sum of exp over row ${row} of the scores`,
  from: [{ at: head.scoresBefore(at), row }],
});

const weight: Explain = (head, { at, row, col }) => {
  const cell = { at: head.scoresBefore(at), row, col };
  const denominator = { at: head.indexOf("lse"), row, col: 0 };
  return {
    how: `exp(${said(head.valueAt(cell))} − ${said(head.valueAt(denominator))})`,
    from: [{ at: cell.at, row }, cell, denominator],
  };
};

const weightedSum: Explain = (head, { row, col }) => {
  const [p, v] = [head.indexOf("softmax"), head.indexOf("values")];
  return {
    how: `Σ_j P[${row},j] V[j,${col}] = ${sum(head.row(p, row), head.column(v, col))}`,
    from: [
      { at: p, row },
      { at: v, col },
    ],
  };
};

const masked: Explain = (head, { at, row, col }) => ({
  how:
    head.valueAt({ at, row, col }) === null
      ? `query ${row} does not see key ${col}`
      : `query ${row} sees key ${col}: as before`,
  from: [{ at: head.scoresBefore(at), row, col }],
});

/** Scores: of q and k, or of the scores before by their rule. */
const score: Explain = (head, { at, row, col }) => {
  const cell = { at: head.scoresBefore(at), row, col };
  if (cell.at >= 0)
    return { how: `from ${said(head.valueAt(cell))} by ${head.all[at].formula.split(/=|←/)[1].trim()}`, from: [cell] };
  const [q, k] = [head.indexOf("queries"), head.indexOf("keys")];
  return {
    how: `Q[${row}] · K[${col}] = ${sum(head.row(q, row), head.row(k, col))}`,
    from: [
      { at: q, row },
      { at: k, row: col },
    ],
  };
};

const EXPLAINED: Record<string, Explain> = {
  input: entering,
  source: entering,
  "query projection": counting("a token", "its query"),
  "key projection": counting("a token", "its key"),
  "value projection": counting("a token", "its value"),
  "output projection": counting("the heads", "what is written"),
  "projected queries": (head, spot) => product(head, spot, inputOf(head), head.indexOf("query projection")),
  "projected keys": (head, spot) => product(head, spot, sourceOf(head), head.indexOf("key projection")),
  queries: projected("query", "looks for", inputOf),
  keys: projected("key", "contains", sourceOf),
  values: projected("value", "provides", sourceOf),
  masked,
  lse: logSumExp,
  softmax: weight,
  output: weightedSum,
  "heads side by side": besides,
  written: (head, spot) => product(head, spot, head.indexOf("heads side by side"), head.indexOf("output projection")),
};

/** The origin of a number; every name without a line above is one of scores. */
export const originOf = (head: HeadMatrices, spot: Spot): Origin =>
  (EXPLAINED[head.all[spot.at].name] ?? score)(head, spot);
