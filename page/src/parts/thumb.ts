import { h } from "../dom";
import { pixelTable, SCALES, type ScaleName, type Tone } from "../numbers/colour";

/** A head as a small picture, weights from 0 to 1. */
export function thumb(
  halves: Uint16Array,
  head: number,
  size: number,
  scale: ScaleName,
  tone: Tone,
): HTMLCanvasElement {
  const table = tableOf(scale, tone);
  const pixels = Uint32Array.from(halves.subarray(head * size * size, (head + 1) * size * size), (bits) => table[bits]);
  const canvas = h("canvas", { width: size, height: size, "aria-hidden": "true" });
  const image = new ImageData(new Uint8ClampedArray(pixels.buffer as ArrayBuffer), size, size);
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

const tables = new Map<string, Uint32Array>();

function tableOf(scale: ScaleName, tone: Tone): Uint32Array {
  const name = `${scale} ${tone}`;
  const table = tables.get(name) ?? pixelTable(SCALES[scale], 1, tone);
  tables.set(name, table);
  return table;
}
