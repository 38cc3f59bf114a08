/** Maps as figures: what is seen of one, its tokens, the scale of its colours. */

import { css, ramp, SCALES, signedScale, weightAt } from "../numbers/colour";
import { columns, count, figure, printable, shortened } from "../numbers/format";
import { perPixel, tileBlock, type Part } from "../numbers/levels";
import type { Tokens } from "../data";
import type { Picture, Pixels } from "../parts/pictures";
import { letterSize, markEvery } from "../parts/rulers";
import { LINE, SOFT, type Drawing } from "./drawing";

/** Pixels of a map on a side, at most. */
const MOST = 1600;

/** What a map shows, as `DeepMap.part` writes it, in whole queries and keys; all where nothing is written. */
export function partOf(zoom: string, { n_q, n_k }: { n_q: number; n_k: number }): Part {
  const [r0, r1, c0, c1] = zoom.split(",").map(Number);
  const whole = { r0: 0, r1: n_q, c0: 0, c1: n_k };
  if (![r0, r1, c0, c1].every(Number.isFinite) || zoom === "") return whole;
  const part = {
    r0: Math.max(0, Math.floor(r0)),
    r1: Math.min(n_q, Math.ceil(r1)),
    c0: Math.max(0, Math.floor(c0)),
    c1: Math.min(n_k, Math.ceil(c1)),
  };
  return part.r1 > part.r0 && part.c1 > part.c0 ? part : whole;
}

/** A part of a picture at the finest level that is not too large, and what it covers in whole pixels of that. */
export async function pixelsOf(picture: Picture, part: Part): Promise<{ pixels: Pixels; part: Part; level: number }> {
  const { info } = picture;
  let level = info.max_level;
  while (level > 0 && Math.max(part.r1 - part.r0, part.c1 - part.c0) / perPixel(info, level) > MOST) level--;
  const step = perPixel(info, level);
  const cell = {
    r0: Math.floor(part.r0 / step),
    r1: Math.ceil(part.r1 / step),
    c0: Math.floor(part.c0 / step),
    c1: Math.ceil(part.c1 / step),
  };
  const [rows, cols] = [cell.r1 - cell.r0, cell.c1 - cell.c0];
  const data = new Uint32Array(rows * cols);
  let whole = true;
  const jobs: Promise<void>[] = [];
  for (let y = Math.floor(cell.r0 / info.tile); y * info.tile < cell.r1; y++) {
    for (let x = Math.floor(cell.c0 / info.tile); x * info.tile < cell.c1; x++) {
      jobs.push(
        picture.pixels(level, x, y).then((tile) => {
          whole &&= tile.whole;
          const { r0, c0 } = tileBlock(info, level, x, y);
          const [top, left] = [r0 / step, c0 / step];
          for (let r = Math.max(cell.r0, top); r < Math.min(cell.r1, top + tile.rows); r++) {
            const [from, to] = [Math.max(cell.c0, left), Math.min(cell.c1, left + tile.cols)];
            const start = (r - top) * tile.cols - left;
            data.set(tile.data.subarray(start + from, start + to), (r - cell.r0) * cols + from - cell.c0);
          }
        }),
      );
    }
  }
  await Promise.all(jobs);
  const covered = {
    r0: cell.r0 * step,
    r1: Math.min(info.n_q, cell.r1 * step),
    c0: cell.c0 * step,
    c1: Math.min(info.n_k, cell.c1 * step),
  };
  return { pixels: { rows, cols, whole, data }, part: covered, level };
}

export interface Sides {
  query: Tokens | null;
  key: Tokens | null;
}

/** Room for labels beside a map and above it. */
export const ROOM = 74;

/** Pixels of the sink's column, and with the gap after it. */
const SINK = { wide: 12, all: 17 };

/** Draws the weights on the learned sink, in queries [r0, r1). */
function drawSinks(
  drawing: Drawing,
  picture: Picture,
  { r0, r1 }: Part,
  level: number,
  [x, y]: readonly [number, number],
  high: number,
): void {
  const size = perPixel(picture.info, level);
  const data = picture.sinkPixels(level, Math.floor(r0 / size), Math.ceil(r1 / size));
  drawing.picture(x, y, SINK.wide, high, { rows: data.length, cols: 1, data });
  drawing.box(x, y, SINK.wide, high, "none", LINE);
  drawing.text(x + SINK.wide / 2 + 4, y - 5, "sink", { size: 10.5, fill: SOFT, upward: true });
}

/** Draws a part of a map with its labels, the map's corner at (x, y), `side` pixels wide or high; returns its level. */
export async function drawMap(
  drawing: Drawing,
  picture: Picture,
  wanted: Part,
  tokens: Sides,
  left: number,
  y: number,
  side: number,
): Promise<number> {
  const { pixels, part, level } = await pixelsOf(picture, wanted);
  const [rows, cols] = [part.r1 - part.r0, part.c1 - part.c0];
  const sunk = picture.sinks.length ? SINK.all : 0;
  const step = Math.min(side / rows, (side - sunk) / cols);
  const x = left + sunk;
  const [width, height] = [cols * step, rows * step];
  drawing.picture(x, y, width, height, pixels);
  drawing.box(x, y, width, height, "none", LINE);
  if (sunk) drawSinks(drawing, picture, part, level, [left, y], height);
  await Promise.all([tokens.query?.load(part.r0, part.r1), tokens.key?.load(part.c0, part.c1)]);
  for (const [mine, from, to, down] of [
    [tokens.query, part.r0, part.r1, true],
    [tokens.key, part.c0, part.c1, false],
  ] as const) {
    const words = mine !== null && letterSize(step) > 0;
    const every = words ? 1 : markEvery(step, down ? 24 : 44);
    const size = words ? Math.min(11, letterSize(step)) : 10.5;
    const labels: [number, string][] = [];
    for (let at = Math.ceil(from / every) * every; at < to; at += every)
      labels.push([at, words ? shortened(printable(mine.at(at) ?? ""), 9) : count(at)]);
    const upward = !down && words && labels.some(([, label]) => columns(label) * 0.62 * size > step);
    for (const [at, label] of labels) {
      const place = (at - from + 0.5) * step;
      const how = { size, fill: SOFT, mono: words };
      if (down) drawing.text(left - 5, y + place + 0.35 * size, label, { ...how, anchor: "end" });
      else if (upward) drawing.text(x + place + 0.35 * size, y - 5, label, { ...how, upward });
      else drawing.text(x + place, y - 6, label, { ...how, anchor: "middle" });
    }
  }
  return level;
}

/** The scale of a picture's colours, with numbers. */
export function drawScale(drawing: Drawing, picture: Picture, level: number, x: number, y: number): void {
  const { look } = picture;
  const top = picture.top(level);
  const scale = picture.signed ? signedScale(look.scale) : SCALES[look.scale];
  const words = [0, 0.5, 1].map((place) => {
    const at = picture.signed
      ? Math.sign(place - 0.5) * weightAt(Math.abs(2 * place - 1), top, look.tone)
      : weightAt(place, top, look.tone);
    const least = look.tone === "log" && place === 0 && !picture.signed ? "≤ " : "";
    return least + figure(at || 0, 2);
  });
  drawRamp(drawing, scale, words, x, y);
}

/** A bar of colours, and what stands below its beginning, its middle and its end. */
export function drawRamp(
  drawing: Drawing,
  scale: Parameters<typeof ramp>[0],
  words: readonly string[],
  x: number,
  y: number,
): void {
  const [width, steps] = [180, 60];
  for (let k = 0; k < steps; k++)
    drawing.box(x + (k * width) / steps, y, width / steps + 0.2, 10, css(ramp(scale, (k + 0.5) / steps)));
  words.forEach((text, k) => {
    const anchor = (["start", "middle", "end"] as const)[k];
    drawing.text(x + (k * width) / 2, y + 23, text, { size: 10, fill: SOFT, anchor });
  });
}
