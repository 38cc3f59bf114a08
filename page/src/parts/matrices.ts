/** Every matrix of one small head, linked: touch a number, and what made it is marked. */

import type { Matrix } from "../data";
import { h, s } from "../dom";
import { css, ramp, readableOn, SCALES, SIGNED, toned } from "../numbers/colour";
import { figure, printable, short } from "../numbers/format";
import { scaleName, tokensOf, type Context } from "../views/view";

/** Queries, and keys, of a head whose matrices are shown. */
export const MOST = 128;

/** A matrix of at most so many rows and columns is printed as numbers. */
const IN_NUMBERS = [12, 12] as const;

const NUMBER = [46, 22] as const;
const WIDEST = 216;

/** Terms of a sum that are written out. */
const TERMS = 3;

const QUESTIONS: Record<string, string> = {
  queries: "What do I look for?",
  keys: "What do I contain?",
  values: "What do I provide?",
  "raw scores": "How well do they fit?",
  scaled: "The same on a moderate scale",
  masked: "Whom may I see?",
  lse: "All in all",
  softmax: "How much do I look at each?",
  output: "What do I take along?",
};

/** The question that a quantity of the head answers, in a token's words. */
export const questionOf = (name: string): string => QUESTIONS[name] ?? "";

/** A place in one of the matrices. */
interface Spot {
  at: number;
  row: number;
  col: number;
}

/** Cells that are marked in a matrix: a row, a column, or one cell. */
interface Mark {
  at: number;
  row?: number;
  col?: number;
}

export interface MatricesPanel {
  readonly element: HTMLElement;
  /** Shows the matrices of a head, query i and key j marked. */
  show(matrices: readonly Matrix[], i: number, j: number): void;
  mark(i: number, j: number): void;
}

type Value = number | null;

export function matricesPanel(context: Context): MatricesPanel {
  const readout = h("p", { class: "readout made", role: "status" });
  const place = h("div", { class: "matrices" });
  const element = h(
    "section",
    { class: "all-matrices", "aria-label": "Matrices" },
    h("h2", {}, "The whole head as matrices: touch a number to see what made it"),
    readout,
    place,
  );
  let all: readonly Matrix[] = [];
  let overlays: SVGSVGElement[] = [];
  let cells: (readonly [number, number])[] = [];
  let pinned: Spot = { at: 0, row: 0, col: 0 };

  const indexOf = (name: string): number => all.findIndex((one) => one.name === name);
  const valueAt = ({ at, row, col }: Spot): Value => all[at].values[row][col];
  const said = (value: Value): string => (value === null ? "−∞" : figure(Number(value.toPrecision(4))));

  /** The matrix of scores from which a later one is made. */
  const scoresBefore = (at: number): number => {
    for (let k = at - 1; k >= 0; k--) if (all[k].symbol === "S" || all[k].name === "raw scores") return k;
    return -1;
  };

  /** A sum of products, its largest terms first. */
  function sum(a: Value[], b: Value[]): string {
    const products = a.map((x, k) => [(x ?? 0) * (b[k] ?? 0), k] as const);
    const order = [...products].sort((x, y) => Math.abs(y[0]) - Math.abs(x[0])).slice(0, TERMS);
    const terms = order.map(([, k]) => `${said(a[k])}·${said(b[k])}`).join(" + ");
    return a.length > TERMS ? `${terms} + …` : terms;
  }

  /** How a number came about, and what it was made of. */
  function origin(spot: Spot): { how: string; from: Mark[] } {
    const { at, row, col } = spot;
    const { name } = all[at];
    const column = (k: number, c: number): Value[] => all[k].values.map((values) => values[c]);
    const [q, k, v] = [indexOf("queries"), indexOf("keys"), indexOf("values")];
    const before = scoresBefore(at);
    if (name === "queries") return { how: `feature ${col} of what token ${row} looks for`, from: [{ at, row }] };
    if (name === "keys") return { how: `feature ${col} of what token ${row} contains`, from: [{ at, row }] };
    if (name === "values") return { how: `feature ${col} of what token ${row} provides`, from: [{ at, row }] };
    if (before < 0)
      return {
        how: `Q[${row}] · K[${col}] = ${sum(all[q].values[row], all[k].values[col])}`,
        from: [
          { at: q, row },
          { at: k, row: col },
        ],
      };
    const cell = { at: before, row, col };
    if (name === "softmax") {
      const lse = indexOf("lse");
      return {
        how: `exp(${said(valueAt(cell))} − ${said(all[lse].values[row][0])})`,
        from: [{ at: before, row }, cell, { at: lse, row, col: 0 }],
      };
    }
    if (name === "lse") return { how: `log of the sum of exp over row ${row} of the scores`, from: [{ at: before, row }] };
    if (name === "output") {
      const p = indexOf("softmax");
      return {
        how: `Σ_j P[${row},j] V[j,${col}] = ${sum(all[p].values[row], column(v, col))}`,
        from: [
          { at: p, row },
          { at: v, col },
        ],
      };
    }
    if (name === "masked")
      return {
        how: valueAt(spot) === null ? `query ${row} does not see key ${col}` : `query ${row} sees key ${col}: as before`,
        from: [cell],
      };
    return { how: `from ${said(valueAt(cell))} by ${all[at].formula.split(/=|←/)[1].trim()}`, from: [cell] };
  }

  function outline(svg: SVGSVGElement, at: number, { row, col }: Mark, kind: string): void {
    const { values } = all[at];
    const [width, height] = cells[at];
    const [x, y] = [(col ?? 0) * width, (row ?? 0) * height];
    const size = {
      width: col === undefined ? values[0].length * width : width,
      height: row === undefined ? values.length * height : height,
    };
    svg.append(s("rect", { class: kind, x, y, ...size }));
  }

  function touch(spot: Spot, aloud = false): void {
    for (const overlay of overlays) overlay.replaceChildren();
    if (!all[spot.at]?.values[spot.row]) return;
    const { how, from } = origin(spot);
    for (const mark of from) outline(overlays[mark.at], mark.at, mark, "from");
    outline(overlays[spot.at], spot.at, spot, "spot");
    const { symbol, name, tensor } = all[spot.at];
    const indices = tensor.includes(",") ? `${spot.row},${spot.col}` : String(spot.row);
    const value = valueAt(spot);
    readout.dataset.value = String(value);
    readout.dataset.matrix = name;
    const tokens = tokensOf(context);
    const word = (axis: "query" | "key", n: number): string => {
      const token = tokens[axis]?.at(n);
      return token === undefined ? "" : ` “${printable(token)}”`;
    };
    const keyed = ["keys", "values"].includes(name);
    const pair = !keyed && tensor.includes("j]");
    const row = keyed ? `key ${spot.row}${word("key", spot.row)}` : `query ${spot.row}${word("query", spot.row)}`;
    const about = pair ? `${row}, key ${spot.col}${word("key", spot.col)}` : row;
    readout.replaceChildren(h("b", {}, `${symbol}[${indices}] = ${said(value)}`), `  ${how}  (${name}; ${about})`);
    if (aloud) context.say(readout.textContent ?? "");
  }

  /** A number that was chosen chooses its query and key too. */
  function pin(spot: Spot): void {
    pinned = spot;
    touch(spot, true);
    const { name, values } = all[spot.at];
    const { store } = context;
    if (name === "keys" || name === "values") store.set({ j: spot.row });
    else if (name === "queries" || name === "output" || values[0].length === 1) store.set({ i: spot.row });
    else store.set({ i: spot.row, j: spot.col });
  }

  function paint(canvas: HTMLCanvasElement, at: number): void {
    const { values, name } = all[at];
    const [width, height] = cells[at];
    const ratio = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [values[0].length * width * ratio, values.length * height * ratio];
    const brush = canvas.getContext("2d") as CanvasRenderingContext2D;
    brush.scale(ratio, ratio);
    const most = values.flat().reduce<number>((top, x) => Math.max(top, Math.abs(x ?? 0)), 0) || 1;
    const hidden = name === "softmax" ? all[scoresBefore(at)].values : values;
    const weights = SCALES[scaleName(context.store.state)];
    brush.font = `11px ${getComputedStyle(canvas).fontFamily}`;
    brush.textAlign = "center";
    brush.textBaseline = "middle";
    values.forEach((line, r) =>
      line.forEach((value, c) => {
        if (value === null || hidden[r][c] === null) return; // stripes show through
        const colour =
          name === "softmax" ? ramp(weights, toned(value, 1, "root")) : ramp(SIGNED, 0.5 + (0.5 * value) / most);
        brush.fillStyle = css(colour);
        brush.fillRect(c * width, r * height, width, height);
        if (width < NUMBER[0]) return;
        brush.fillStyle = readableOn(colour);
        brush.fillText(short(value), (c + 0.5) * width, (r + 0.5) * height);
      }),
    );
  }

  function figureOf(at: number): HTMLElement {
    const { name, tensor, values } = all[at];
    const [rows, cols] = [values.length, values[0].length];
    const [width, height] = cells[at];
    const canvas = h("canvas", { "aria-hidden": "true" });
    const overlay = s("svg", { viewBox: `0 0 ${cols * width} ${rows * height}`, "aria-hidden": "true" });
    overlays[at] = overlay;
    const stage = h(
      "div",
      {
        class: "matrix-stage",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "matrix",
        "aria-label": `${name} ${tensor}, ${rows} by ${cols}. Arrow keys choose a number.`,
        "data-matrix": name,
      },
      canvas,
      overlay,
    );
    stage.style.width = `${cols * width}px`;
    stage.style.height = `${rows * height}px`;
    const under = (event: PointerEvent | MouseEvent): Spot => {
      const box = stage.getBoundingClientRect();
      const along = (from: number, size: number, n: number): number =>
        Math.max(0, Math.min(n - 1, Math.floor((from / size) * n)));
      return {
        at,
        row: along(event.clientY - box.top, box.height, rows),
        col: along(event.clientX - box.left, box.width, cols),
      };
    };
    stage.addEventListener("pointermove", (event) => touch(under(event)));
    stage.addEventListener("pointerleave", () => touch(pinned));
    stage.addEventListener("click", (event) => pin(under(event)));
    stage.addEventListener("focus", () => pinned.at !== at && touch((pinned = { ...within(pinned, at), at }), true));
    stage.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const { row, col } = within(pinned, at);
      pin(within({ at, row: row + step[0], col: col + step[1] }, at));
    });
    paint(canvas, at);
    return h(
      "figure",
      { class: "matrix" },
      h("figcaption", {}, h("b", {}, name), ` ${tensor}`, h("em", {}, questionOf(name))),
      stage,
    );
  }

  function within({ row, col }: Spot, at: number): Spot {
    const { values } = all[at];
    const inside = (x: number, n: number): number => Math.max(0, Math.min(n - 1, x));
    return { at, row: inside(row, values.length), col: inside(col, values[0].length) };
  }

  const chooseWeight = (i: number, j: number): void => {
    pinned = { at: indexOf("softmax"), row: i, col: j };
    touch(pinned);
  };

  return {
    element,
    show(matrices, i, j) {
      all = matrices;
      overlays = [];
      const most = Math.max(...all.map(({ values }) => Math.max(values.length, values[0].length)));
      const inNumbers = all.every(({ values }) => values.length <= IN_NUMBERS[0] && values[0].length <= IN_NUMBERS[1]);
      const size = Math.max(2, Math.min(16, Math.floor(WIDEST / most)));
      cells = all.map(({ values }) =>
        inNumbers ? NUMBER : values[0].length === 1 ? ([Math.max(8, size), size] as const) : ([size, size] as const),
      );
      place.replaceChildren(...all.map((_, at) => figureOf(at)));
      chooseWeight(i, j);
    },
    mark(i, j) {
      const { name, values } = all[pinned.at] ?? { name: "", values: [] };
      if (name === "softmax" || !values.length) chooseWeight(i, j);
      else touch(pinned);
    },
  };
}
