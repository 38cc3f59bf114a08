/** Heads as small pictures, weights from 0 to 1, a learned sink's before those of keys. */

import type { Scene } from "../data";
import { h } from "../dom";
import { pixelTable, SCALES, type ScaleName, type Tone } from "../numbers/colour";
import { toHalf } from "../numbers/half";
import { columnOf } from "../numbers/sinks";
import { sinksOf, type Context } from "../views/view";
import type { Pixels } from "./pictures";

/** Pixels of a picture on a side, without a sink. */
const SIZE = 64;
/** Pixels of the sink's column, and of the gap after it. */
const [COLUMN, GAP] = [5, 2];
/** Pairs of a head up to which its sink is drawn here: of more it takes a pass of its own. */
const LONG = 2 ** 29;

/** The picture of a head in the colours of a table of half floats; sinks: the weights on its learned sink, if it has one. */
export function thumbPixels(map: Uint16Array, sinks: Float32Array, table: Uint32Array): Pixels {
  const left = sinks.length ? COLUMN + GAP : 0;
  const cols = left + SIZE;
  const column = columnOf(sinks, left && SIZE);
  const data = Uint32Array.from({ length: SIZE * cols }, (_, p) => {
    const [r, c] = [Math.floor(p / cols), p % cols];
    if (c >= left) return table[map[r * SIZE + c - left]];
    return c < COLUMN ? table[toHalf(column[r])] : 0;
  });
  return { rows: SIZE, cols, whole: true, data };
}

/** The picture of a head, and whether it is exact. */
export async function headPixels(
  context: Context,
  layer: number,
  head: number,
  scale: ScaleName,
): Promise<Pixels & { exact: boolean }> {
  const { data, store, scene } = context;
  const { scene: id, tone } = store.state;
  const { n_q, n_k } = scene.layers[layer];
  const [{ bits, exact }, sinks] = await Promise.all([
    data.thumbs(id, layer, SIZE, "max"),
    n_q * n_k <= LONG ? sinksOf(context, { scene: id, layer, head }) : new Float32Array(0),
  ]);
  const map = bits.subarray(head * SIZE * SIZE, (head + 1) * SIZE * SIZE);
  return { ...thumbPixels(map, sinks, tableOf(scale, tone)), exact };
}

/** A picture as an element. */
export function thumb({ rows, cols, data }: Pixels): HTMLCanvasElement {
  const canvas = h("canvas", { width: cols, height: rows, "aria-hidden": "true" });
  const image = new ImageData(new Uint8ClampedArray(data.buffer as ArrayBuffer), cols, rows);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** What is said of pictures that begin with a learned sink. */
export const sinkFirst = ({ layers }: Scene): string =>
  layers.some(({ sink }) => sink) ? ", first the learned sink" : "";

const tables = new Map<string, Uint32Array>();

function tableOf(scale: ScaleName, tone: Tone): Uint32Array {
  const name = `${scale} ${tone}`;
  const table = tables.get(name) ?? pixelTable(SCALES[scale], 1, tone);
  tables.set(name, table);
  return table;
}
