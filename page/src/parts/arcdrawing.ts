/** Arcs from queries to keys: above one row of tokens, or between two rows of them, or two columns where they are few. */

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
/** Tokens of two texts up to which they stand in columns, where words are read as they are written. */
const IN_COLUMNS = 24;
const COLUMN = { slot: 28, between: { least: 110, most: 420 } };

/** Where tokens stand: along their row or column, and the lines on which arcs begin and end. */
interface Places {
  slot: number;
  width: number;
  height: number;
  /** Whether tokens stand in two columns. */
  columns: boolean;
  along(row: TokenRow, token: number): number;
  from: number;
  to: number;
  /** Pixels of height for each token between the ends of an arc; 0 between two rows. */
  steep: number;
}

/** Whether the tokens of two texts are few enough for columns. */
export const inColumns = ({ rows, sink }: Pick<ArcDrawing, "rows" | "sink">): boolean =>
  rows.length === 2 && Math.max(rows[0].words.length, rows[1].words.length + Number(sink)) <= IN_COLUMNS;

const within = ({ least, most }: { least: number; most: number }, x: number): number =>
  Math.max(least, Math.min(most, x));

/** The places of tokens along their rows or columns, the shorter of two in the middle. */
function alongOf({ rows, sink }: ArcDrawing, slot: number, most: number): Places["along"] {
  const keys = rows[rows.length - 1];
  // The sink stands before the keys, and before all tokens of a single row.
  const ahead = (row: TokenRow): number => (sink && row === keys ? 1 : 0);
  return (row, token) => {
    const free = ((most - row.words.length - ahead(row)) * slot) / 2;
    const place = token === SINK ? 0 : token - row.start + ahead(row);
    return 20 + free + (place + 0.5) * slot;
  };
}

function placesOf(drawing: ArcDrawing): Places {
  const { arcs, rows, sink, width, height } = drawing;
  const keys = rows[rows.length - 1];
  const most = Math.max(rows[0].words.length, keys.words.length + Number(sink));
  if (inColumns(drawing)) {
    const between = within(COLUMN.between, width - 2 * LABELS - 20);
    const along = alongOf(drawing, COLUMN.slot, most);
    const size = { slot: COLUMN.slot, width: between + 2 * LABELS, height: most * COLUMN.slot + 40 };
    return { ...size, columns: true, along, from: LABELS, to: LABELS + between, steep: 0 };
  }
  const slot = within(SLOTS, (width - 60) / most);
  const across = { slot, width: most * slot + 40, columns: false, along: alongOf(drawing, slot, most) };
  if (rows.length === 2) {
    const between = within(BETWEEN, height - 2 * LABELS - 20);
    return { ...across, height: between + 2 * LABELS, from: LABELS, to: LABELS + between, steep: 0 };
  }
  const reach = Math.max(1, ...arcs.map(({ i, j }) => Math.abs(across.along(keys, i) - across.along(keys, j)) / slot));
  const rise = Math.min(Math.max(LEAST_RISE, height - LABELS - 20), (reach * slot) / 2);
  const base = rise + 14;
  return { ...across, height: base + LABELS, from: base, to: base, steep: rise / (reach * slot) };
}

/** The course of an arc from its query to its key. */
function course({ from, to, steep, columns }: Places, a0: number, a1: number): string {
  const tall = Math.abs(a0 - a1) * steep * 1.33;
  const [l0, l1] = steep ? [from - tall, to - tall] : [(from + to) / 2, (from + to) / 2];
  const at = (along: number, line: number): string => (columns ? `${line} ${along}` : `${along} ${line}`);
  return `M${at(a0, from)} C${at(a0, l0)} ${at(a1, l1)} ${at(a1, to)}`;
}

const nameIn = (row: TokenRow, token: number): string =>
  token === SINK ? "the learned sink" : shortened(row.words[token - row.start]);

function arcElement(drawing: ArcDrawing, places: Places, { i, j, weight }: Arc): SVGElement {
  const [queries, keys] = [drawing.rows[0], drawing.rows[drawing.rows.length - 1]];
  const chosen = drawing.picking === "key" ? j === keys.chosen : i === queries.chosen;
  const path = s("path", {
    d: course(places, places.along(queries, i), places.along(keys, j)),
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

/** A token's letters and the box behind them: before their line, or after it; in rows they are turned. */
function label(places: Places, along: number, word: string, before: boolean): SVGElement[] {
  const { slot, columns } = places;
  const long = Math.min(LABELS - 6, 18 + 8 * Math.min(LETTERS, Array.from(word).length));
  const [line, edge] = before ? [places.from - 10, places.from - 2 - long] : [places.to + 10, places.to + 2];
  const [x, y] = columns ? [line, along] : [along, line];
  const box = columns
    ? { x: edge, y: along - slot / 2 + 1, width: long, height: slot - 2 }
    : { x: along - slot / 2, y: edge, width: slot, height: long };
  const turn = columns ? 0 : before ? -90 : 90;
  return [
    s("rect", { ...box, rx: 4 }),
    s(
      "text",
      // Turned, letters stand beside their baseline: centred, they are in line with the end of the arc.
      {
        transform: `translate(${x} ${y}) rotate(${turn})`,
        "dominant-baseline": "central",
        "text-anchor": columns && before ? "end" : "start",
      },
      document.createTextNode(shortened(word, LETTERS)),
    ),
  ];
}

function tokenElement(row: TokenRow, token: number, places: Places, first: boolean, light: Light): SVGElement {
  const word = row.words[token - row.start];
  const chosen = token === row.chosen;
  return s(
    "g",
    {
      class: `word ${row.axis}${chosen ? " chosen" : ""}`,
      tabindex: 0,
      role: "button",
      "data-token": token,
      "data-axis": row.axis,
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
    ...label(places, places.along(row, token), word, first),
  );
}

type Light = (axis: TokenRow["axis"], token: number | null) => void;

/** The arcs, light ones below heavy ones, and the tokens, each of which can be chosen. */
export function drawArcs(drawing: ArcDrawing): SVGElement {
  const { arcs, rows, sink, picking } = drawing;
  const places = placesOf(drawing);
  const svg = s("svg", {
    class: places.columns ? "in-columns" : undefined,
    width: places.width,
    height: places.height,
    viewBox: `0 0 ${places.width} ${places.height}`,
    role: "group",
    "aria-label":
      rows.length === 2
        ? "Queries, keys, and lines from each query to the keys that it attends to"
        : "Tokens in a row, arcs from each to those it attends to",
  });
  const light: Light = (axis, token) => {
    svg.classList.toggle("lit", token !== null);
    const of = axis === "query" ? "data-i" : "data-j";
    for (const arc of svg.querySelectorAll(".arc")) arc.classList.toggle("on", arc.getAttribute(of) === String(token));
  };
  svg.append(...[...arcs].reverse().map((arc) => arcElement(drawing, places, arc)));
  for (const [k, row] of rows.entries()) {
    const first = rows.length === 2 && k === 0;
    svg.append(...row.words.map((_, n) => tokenElement(row, row.start + n, places, first, light)));
  }
  if (sink) {
    const along = places.along(rows[rows.length - 1], SINK);
    svg.append(s("g", { class: "word sink" }, ...label(places, along, "sink", false)));
  }
  svg.classList.toggle("picking", picking !== null);
  return svg;
}
