/** Arcs from queries to keys: above one row of tokens, or between a row of queries and a row of keys. */

import { s } from "../dom";
import { SINK, type Arc } from "../numbers/arcs";
import { figure, shortened } from "../numbers/format";

/** A row of tokens. */
export interface TokenRow {
  axis: "query" | "key";
  /** The number of its first token. */
  start: number;
  words: readonly string[];
  /** The number of the chosen token. */
  chosen: number;
  pick(token: number): void;
}

export interface ArcDrawing {
  arcs: readonly Arc[];
  /** One row, where queries and keys are the same tokens, or queries and keys. */
  rows: readonly [TokenRow] | readonly [TokenRow, TokenRow];
  /** Whether keys have a learned sink beside them. */
  sink: boolean;
  /** Whether arcs of the chosen token stand out; the row that it is in. */
  picking: TokenRow["axis"] | null;
  colour(weight: number): string;
  /** Pixels that there are. */
  width: number;
  height: number;
}

/** How much room a token has, in pixels. */
const SLOTS = { least: 18, most: 40 };
/** Letters of a token, at most, and pixels that they take. */
const LETTERS = 14;
const LABELS = 130;
/** Pixels between two rows. */
const BETWEEN = { least: 150, most: 340 };
const LEAST_RISE = 250;

/** Where tokens stand: x by token, and the lines on which arcs begin and end. */
interface Places {
  slot: number;
  width: number;
  height: number;
  x(row: TokenRow, token: number): number;
  from: number;
  to: number;
  /** Pixels of height for each token between the ends of an arc; 0 between two rows. */
  steep: number;
}

function placesOf({ arcs, rows, sink, width, height }: ArcDrawing): Places {
  const keys = rows[rows.length - 1];
  const most = Math.max(rows[0].words.length, keys.words.length + Number(sink));
  const slot = Math.max(SLOTS.least, Math.min(SLOTS.most, (width - 60) / most));
  // The sink stands before the keys, and before all tokens of a single row.
  const ahead = (row: TokenRow): number => (sink && row === keys ? 1 : 0);
  const free = (row: TokenRow): number => ((most - row.words.length - ahead(row)) * slot) / 2;
  const x = (row: TokenRow, token: number): number => {
    const place = token === SINK ? 0 : token - row.start + ahead(row);
    return 20 + free(row) + (place + 0.5) * slot;
  };
  const across = { slot, width: most * slot + 40, x };
  if (rows.length === 2) {
    const between = Math.max(BETWEEN.least, Math.min(BETWEEN.most, height - 2 * LABELS - 20));
    return { ...across, height: between + 2 * LABELS, from: LABELS, to: LABELS + between, steep: 0 };
  }
  const reach = Math.max(1, ...arcs.map(({ i, j }) => Math.abs(x(keys, i) - x(keys, j)) / slot));
  const rise = Math.min(Math.max(LEAST_RISE, height - LABELS - 20), (reach * slot) / 2);
  const base = rise + 14;
  return { ...across, height: base + LABELS, from: base, to: base, steep: rise / (reach * slot) };
}

/** The course of an arc from its query to its key. */
function course({ from, to, steep }: Places, x0: number, x1: number): string {
  const tall = Math.abs(x0 - x1) * steep * 1.33;
  const [y0, y1] = steep ? [from - tall, to - tall] : [(from + to) / 2, (from + to) / 2];
  return `M${x0} ${from} C${x0} ${y0} ${x1} ${y1} ${x1} ${to}`;
}

const nameIn = (row: TokenRow, token: number): string =>
  token === SINK ? "the learned sink" : shortened(row.words[token - row.start]);

function arcElement(drawing: ArcDrawing, places: Places, { i, j, weight }: Arc): SVGElement {
  const [queries, keys] = [drawing.rows[0], drawing.rows[drawing.rows.length - 1]];
  const chosen = drawing.picking === "key" ? j === keys.chosen : i === queries.chosen;
  const path = s("path", {
    d: course(places, places.x(queries, i), places.x(keys, j)),
    stroke: drawing.colour(weight),
    "stroke-width": 0.8 + 3.2 * Math.sqrt(weight),
    class: chosen ? "arc chosen" : "arc",
    "data-i": i,
    "data-j": j,
    "data-weight": weight,
  });
  const said = `${nameIn(queries, i)} → ${nameIn(keys, j)}: ${figure(weight)}`;
  path.append(s("title", {}, document.createTextNode(said)));
  return path;
}

/** A token's letters, turned, and the box behind them: below their row, or above it. */
function label(places: Places, x: number, word: string, above: boolean): SVGElement[] {
  const tall = Math.min(LABELS - 6, 18 + 8 * Math.min(LETTERS, Array.from(word).length));
  const [y, turn] = above ? [places.from - 10, -90] : [places.to + 10, 90];
  const box = { x: x - places.slot / 2, y: above ? places.from - 2 - tall : places.to + 2, width: places.slot };
  return [
    s("rect", { ...box, height: tall, rx: 4 }),
    s(
      "text",
      // Turned, letters stand beside their baseline: centred, they are in line with the end of the arc.
      { transform: `translate(${x} ${y}) rotate(${turn})`, "dominant-baseline": "central" },
      document.createTextNode(shortened(word, LETTERS)),
    ),
  ];
}

function tokenElement(row: TokenRow, token: number, places: Places, above: boolean, light: Light): SVGElement {
  const word = row.words[token - row.start];
  const chosen = token === row.chosen;
  return s(
    "g",
    {
      class: `word ${row.axis}${chosen ? " chosen" : ""}`,
      tabindex: 0,
      role: "button",
      "data-token": token,
      "aria-label": `${row.axis} ${token} ${shortened(word)}`,
      "aria-pressed": String(chosen),
      click: () => row.pick(token),
      keydown: (event: KeyboardEvent) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        row.pick(token);
      },
      mouseenter: () => light(row.axis, token),
      mouseleave: () => light(row.axis, null),
    },
    ...label(places, places.x(row, token), word, above),
  );
}

type Light = (axis: TokenRow["axis"], token: number | null) => void;

/** The arcs, light ones below heavy ones, and the tokens, each of which can be chosen. */
export function drawArcs(drawing: ArcDrawing): SVGElement {
  const { arcs, rows, sink, picking } = drawing;
  const places = placesOf(drawing);
  const svg = s("svg", {
    width: places.width,
    height: places.height,
    viewBox: `0 0 ${places.width} ${places.height}`,
    role: "group",
    "aria-label":
      rows.length === 2
        ? "Queries above, keys below, arcs from each query to the keys that it attends to"
        : "Tokens in a row, arcs from each to those it attends to",
  });
  const light: Light = (axis, token) => {
    svg.classList.toggle("lit", token !== null);
    const of = axis === "query" ? "data-i" : "data-j";
    for (const arc of svg.querySelectorAll(".arc")) arc.classList.toggle("on", arc.getAttribute(of) === String(token));
  };
  svg.append(...[...arcs].reverse().map((arc) => arcElement(drawing, places, arc)));
  for (const [k, row] of rows.entries()) {
    const above = rows.length === 2 && k === 0;
    svg.append(...row.words.map((_, n) => tokenElement(row, row.start + n, places, above, light)));
  }
  if (sink) {
    const x = places.x(rows[rows.length - 1], SINK);
    svg.append(s("g", { class: "word sink" }, ...label(places, x, "sink", false)));
  }
  svg.classList.toggle("picking", picking !== null);
  return svg;
}
