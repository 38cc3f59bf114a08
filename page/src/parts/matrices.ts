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

/** What stands above the matrices, by the name of the first. */
const HEADINGS: Record<string, string> = {
  input: "From tokens to queries, keys and values",
  queries: "The head",
  "heads side by side": "All heads of the layer together",
};

const QUESTIONS: Record<string, string> = {
  input: "What is known of each token?",
  source: "What is known of each token looked at?",
  "query projection": "Which of it says what a token looks for?",
  "projected queries": "Before the rotary embedding",
  "key projection": "Which of it says what a token contains?",
  "projected keys": "Before the rotary embedding",
  "value projection": "What does a token pass on?",
  "heads side by side": "The outputs of all heads, concatenated",
  "output projection": "What becomes of it?",
  written: "What does the layer add to each token?",
  queries: "What do I look for?",
  keys: "What do I contain?",
  values: "What do I provide?",
  "raw scores": "How well do they fit?",
  scaled: "The same on a moderate scale",
  masked: "Whom may I see?",
  lse: "The logarithm of the softmax's denominator",
  softmax: "How much do I look at each?",
  output: "The weighted sum of the values",
};

/** The question that a quantity of the head answers, in a token's words. */
export const questionOf = (name: string): string => QUESTIONS[name] ?? "";

/** Matrices whose rows are keys. */
const KEYED: ReadonlySet<string> = new Set(["source", "projected keys", "keys", "values"]);

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

/** How a number came about, in words, and what it was made of. */
interface Origin {
  how: string;
  from: Mark[];
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
  const place = h("div", {});
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
  const column = (k: number, c: number): Value[] => all[k].values.map((values) => values[c]);
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

  /** A number of a product of two matrices. */
  function product({ at, row, col }: Spot, left: number, right: number): Origin {
    const [a, b] = [all[left].values[row], column(right, col)];
    const total = a.reduce<number>((up, x, k) => up + (x ?? 0) * (b[k] ?? 0), 0);
    const bias = all[at].formula.includes("b_") ? ` + bias ${said((all[at].values[row][col] ?? 0) - total)}` : "";
    return {
      how: `${all[left].symbol}[${row}] · ${all[right].symbol}[:,${col}] = ${sum(a, b)}${bias}`,
      from: [
        { at: left, row },
        { at: right, col },
      ],
    };
  }

  /** Queries or keys of a model that rotates its places in: a feature and its partner were rotated. */
  function rotated({ row, col }: Spot, bare: number): Origin {
    const half = (all[bare].rotary ?? 0) / 2;
    const cell = { at: bare, row, col };
    if (col >= 2 * half) return { how: `${said(valueAt(cell))}: this feature is not rotated`, from: [cell] };
    const partner = { ...cell, col: col < half ? col + half : col - half };
    const pair = [cell, partner].sort((x, y) => x.col - y.col);
    return {
      how: `(${pair.map((one) => said(valueAt(one))).join(", ")}) rotated by an angle that grows with place ${row}`,
      from: [cell, partner],
    };
  }

  /** How a number of the projections came about; null for one of the head itself. */
  function aroundHead(spot: Spot): Origin | null {
    const { row, col } = spot;
    const { name } = all[spot.at];
    const input = indexOf("input");
    const source = indexOf("source") < 0 ? input : indexOf("source");
    const mine: Mark[] = [{ at: spot.at, row, col }];
    switch (name) {
      case "input":
      case "source":
        return { how: `feature ${col} of token ${row}, as it enters the layer`, from: mine };
      case "query projection":
      case "key projection":
      case "value projection":
        return {
          how: `how much feature ${row} of a token counts for feature ${col} of its ${name.split(" ")[0]}`,
          from: mine,
        };
      case "output projection":
        return { how: `how much feature ${row} of the heads counts for feature ${col} of what is written`, from: mine };
      case "projected queries":
        return product(spot, input, indexOf("query projection"));
      case "projected keys":
        return product(spot, source, indexOf("key projection"));
      case "written":
        return product(spot, indexOf("heads side by side"), indexOf("output projection"));
      case "heads side by side": {
        const out = indexOf("output");
        const width = all[out].values[0].length;
        const [head, feature] = [Math.floor(col / width), col % width];
        if (head === context.store.state.head)
          return { how: `O[${row},${feature}] of this head`, from: [{ at: out, row, col: feature }] };
        return { how: `O[${row},${feature}] of head ${head}: choose that head to see what made it`, from: mine };
      }
      case "queries":
      case "keys": {
        const projection = indexOf(name === "keys" ? "key projection" : "query projection");
        const bare = indexOf(`projected ${name}`);
        if (projection < 0) return null;
        return bare < 0 ? product(spot, name === "keys" ? source : input, projection) : rotated(spot, bare);
      }
      case "values":
        return input < 0 ? null : product(spot, source, indexOf("value projection"));
      default:
        return null;
    }
  }

  /** How a number came about, and what it was made of. */
  function origin(spot: Spot): Origin {
    const around = aroundHead(spot);
    if (around) return around;
    const { at, row, col } = spot;
    const { name } = all[at];
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
    if (name === "lse")
      return { how: `log of the sum of exp over row ${row} of the scores`, from: [{ at: before, row }] };
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
        how:
          valueAt(spot) === null ? `query ${row} does not see key ${col}` : `query ${row} sees key ${col}: as before`,
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
    const keyed = KEYED.has(name);
    const pair = !keyed && tensor.includes("j]");
    const row = keyed ? `key ${spot.row}${word("key", spot.row)}` : `query ${spot.row}${word("query", spot.row)}`;
    const about = symbol.startsWith("W_")
      ? "the same for every token"
      : pair
        ? `${row}, key ${spot.col}${word("key", spot.col)}`
        : row;
    readout.replaceChildren(h("b", {}, `${symbol}[${indices}] = ${said(value)}`), `  ${how}  (${name}; ${about})`);
    if (aloud) context.say(readout.textContent ?? "");
  }

  /** A number that was chosen chooses its query and key too. */
  function pin(spot: Spot): void {
    pinned = spot;
    touch(spot, true);
    const { name, symbol, tensor } = all[spot.at];
    const { store } = context;
    if (symbol.startsWith("W_")) return;
    if (KEYED.has(name)) store.set({ j: spot.row });
    else if (tensor.includes("j]")) store.set({ i: spot.row, j: spot.col });
    else store.set({ i: spot.row });
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
      const inNumbers = all.every(({ values }) => values.length <= IN_NUMBERS[0] && values[0].length <= IN_NUMBERS[1]);
      const longest = ({ values }: Matrix): number => Math.max(values.length, values[0].length);
      const sizeFor = (n: number): number => Math.max(2, Math.min(16, Math.floor(WIDEST / n)));
      // Matrices of the head have cells of one size, that their rows compare.
      const size = sizeFor(Math.max(...all.slice(indexOf("queries"), indexOf("output") + 1 || undefined).map(longest)));
      cells = all.map((one) => {
        if (inNumbers) return NUMBER;
        const own = Math.min(size, sizeFor(longest(one)));
        return one.values[0].length === 1 ? ([Math.max(8, own), own] as const) : ([own, own] as const);
      });
      const groups: HTMLElement[] = [];
      all.forEach((one, at) => {
        const heading = all[0].name === "input" ? HEADINGS[one.name] : "";
        if (heading) groups.push(h("h3", {}, heading));
        if (heading || !groups.length) groups.push(h("div", { class: "matrices" }));
        groups[groups.length - 1].append(figureOf(at));
      });
      place.replaceChildren(...groups);
      chooseWeight(i, j);
    },
    mark(i, j) {
      const { name, values } = all[pinned.at] ?? { name: "", values: [] };
      if (name === "softmax" || !values.length) chooseWeight(i, j);
      else touch(pinned);
    },
  };
}
