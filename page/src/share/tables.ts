/** Weights as tables: CSV for people and spreadsheets, .npz for NumPy. */

import type { Part } from "../numbers/levels";
import { npz, type NpyArray } from "../numbers/npz";
import { chosenQuery, headAt, layerOf, sinksOf, tokensOf, type Context } from "../views/view";
import { partOf } from "./maps";

/** Pairs that one table holds, at most. */
export const MOST_PAIRS = 2 ** 20;

/** The learned sink where other lines or columns have the number of a key. */
const SINK = "sink";

/** Pairs that are asked for at once. */
const AT_ONCE = 2 ** 18;

export interface Table {
  part: Part;
  /** Row-major; NaN where a pair is hidden by the mask. */
  weights: Float32Array;
  /** The weight of each query on the learned sink; none without one. */
  sinks: Float32Array;
  query: string[] | null;
  key: string[] | null;
}

/** A field of CSV (RFC 4180): quoted where it has to be. */
export const field = (text: string): string => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** What a table is of: the chosen query's row of weights, or the part of the map that is seen. */
export function partOfTable(context: Context, what: "row" | "part"): Part {
  const layer = layerOf(context);
  if (what === "part") return partOf(context.store.state.zoom, layer);
  const i = chosenQuery(context.store.state, layer);
  return { r0: i, r1: i + 1, c0: 0, c1: layer.n_k };
}

export async function tableOf(context: Context, part: Part): Promise<Table> {
  const [rows, cols] = [part.r1 - part.r0, part.c1 - part.c0];
  if (rows * cols > MOST_PAIRS)
    throw new Error(
      `A table holds ${MOST_PAIRS.toLocaleString("en")} weights at most, and here are ` +
        `${(rows * cols).toLocaleString("en")}: zoom in, or save the row.`,
    );
  const at = headAt(context.store.state);
  const weights = new Float32Array(rows * cols);
  const band = Math.max(1, Math.floor(AT_ONCE / cols));
  for (let r = 0; r < rows; r += band) {
    const end = Math.min(rows, r + band);
    weights.set(await context.data.values(at, part.r0 + r, part.r0 + end, part.c0, part.c1), r * cols);
  }
  const { query, key } = tokensOf(context);
  await Promise.all([query?.load(part.r0, part.r1), key?.load(part.c0, part.c1)]);
  const names = (tokens: typeof query, from: number, to: number): string[] | null =>
    tokens && Array.from({ length: to - from }, (_, k) => tokens.at(from + k) ?? "");
  const sinks = (await sinksOf(context, at)).slice(part.r0, part.r1);
  return { part, weights, sinks, query: names(query, part.r0, part.r1), key: names(key, part.c0, part.c1) };
}

/** A line for each pair of a query and a key that is not hidden, and after the keys of a query one for the learned sink. */
export function csvOf({ part, weights, sinks, query, key }: Table): string {
  const cols = part.c1 - part.c0;
  const lines = [
    ["query", ...(query ? ["query token"] : []), "key", ...(key ? ["key token"] : []), "weight"].join(","),
  ];
  const line = (r: number, of: number | string, token: string, weight: number): void => {
    const fields = [part.r0 + r, ...(query ? [field(query[r])] : []), of, ...(key ? [field(token)] : [])];
    lines.push([...fields, weight].join(","));
  };
  weights.forEach((weight, p) => {
    const [r, c] = [Math.floor(p / cols), p % cols];
    if (!Number.isNaN(weight)) line(r, part.c0 + c, key?.[c] ?? "", weight);
    if (c === cols - 1 && sinks.length) line(r, SINK, "", sinks[r]);
  });
  return `${lines.join("\r\n")}\r\n`;
}

/** Weights (queries, keys + 1), the learned sink after the keys, and what each column is. */
function withSinks({ part, weights, sinks }: Table): Record<string, NpyArray> {
  const [rows, cols] = [part.r1 - part.r0, part.c1 - part.c0];
  const data = new Float32Array(rows * (cols + 1));
  for (let r = 0; r < rows; r++) {
    data.set(weights.subarray(r * cols, (r + 1) * cols), r * (cols + 1));
    data[r * (cols + 1) + cols] = sinks[r];
  }
  const columns = [...Array.from({ length: cols }, (_, c) => String(part.c0 + c)), SINK];
  return { weights: { data, shape: [rows, cols + 1] }, columns: { data: columns } };
}

/**
 * weights (queries, keys), NaN where hidden, and the numbers and tokens of both. With a learned sink weights are
 * (queries, keys + 1), and `columns` says what each column is: the number of a key, or "sink".
 */
export function npzOf(table: Table): Uint8Array<ArrayBuffer> {
  const { part, weights, sinks, query, key } = table;
  const [rows, cols] = [part.r1 - part.r0, part.c1 - part.c0];
  const numbers = (from: number, n: number): NpyArray => ({
    data: Int32Array.from({ length: n }, (_, k) => from + k),
    shape: [n],
  });
  return npz({
    ...(sinks.length ? withSinks(table) : { weights: { data: weights, shape: [rows, cols] } }),
    queries: numbers(part.r0, rows),
    keys: numbers(part.c0, cols),
    ...(query ? { query_tokens: { data: query } } : {}),
    ...(key ? { key_tokens: { data: key } } : {}),
  });
}
