/** Weights on a picture, large and in every head, as a figure. */

import type { Grid } from "../data";
import { SCALES, weightAt } from "../numbers/colour";
import { figure } from "../numbers/format";
import { heatPixels, largestOf } from "../numbers/grids";
import { aspectOf, paintPicture, type Heat } from "../parts/heatpicture";
import { chosenOn, gridOf, heatLook, heatName, heatOf, heatsOf, imageOf, titleOf } from "../views/pictured";
import type { Context } from "../views/view";
import { ORANGE } from "./bars";
import { Drawing, LINE, SOFT } from "./drawing";
import { ofText, TONES, WIDE } from "./frame";
import { drawRamp } from "./maps";

/** The height of the large picture, and the width of a head's, at most. */
const [HIGH, SMALL] = [320, 104];
/** Pixels of the large picture for each of the figure's, at most. */
const SHARP = 2;

/** Draws a picture, with no more pixels than it has, and its heat, with a pixel for each patch. */
function drawHeat(drawing: Drawing, heat: Heat, box: readonly [number, number, number, number], sharp = 1): void {
  const { grid, image, weights, top, look } = heat;
  const [, , width, height] = box;
  if (image) {
    const [cols, rows] = [
      Math.min(image.width, Math.round(width * sharp)),
      Math.min(image.height, Math.round(height * sharp)),
    ];
    const context = new OffscreenCanvas(cols, rows).getContext("2d") as OffscreenCanvasRenderingContext2D;
    paintPicture(context, heat, cols, rows);
    const { buffer } = context.getImageData(0, 0, cols, rows).data;
    drawing.picture(...box, { rows, cols, data: new Uint32Array(buffer) }, 0); // a photograph may be blurred
  }
  if (!weights) return;
  const data = heatPixels(weights, top, { ...look, over: image !== null });
  drawing.picture(...box, { rows: grid.rows, cols: grid.columns, data }, 3 * width);
}

/** Draws every head, a line for each layer; returns the largest weight of them, which their colours go up to. */
function drawEvery(
  drawing: Drawing,
  context: Context,
  heads: readonly Float32Array[][],
  one: Omit<Heat, "weights" | "top">,
  y: number,
): number {
  const { layers } = context.scene;
  const { layer, head, heat } = context.store.state;
  const top = heads.flat().reduce((most, weights) => Math.max(most, largestOf(weights)), 0);
  const width = Math.min(SMALL, (WIDE - 50) / Math.max(...layers.map(({ heads: n }) => n)) - 6);
  const height = width / aspectOf(one.grid);
  heads.forEach((row, l) => {
    const line = y + l * (height + 8);
    drawing.text(38, line + height / 2 + 4, `L${layers[l].number}`, { size: 11, fill: SOFT, anchor: "end" });
    row.forEach((weights, k) => {
      const x = 44 + k * (width + 6);
      drawHeat(drawing, { ...one, weights, top }, [x, line, width, height]);
      const current = heat === "head" && l === layer && k === head;
      drawing.box(x, line, width, height, "none", current ? ORANGE : LINE, current ? 2 : 1);
      const how = { size: Math.min(11, width / 2), fill: SOFT, anchor: "middle" } as const;
      if (l === 0) drawing.text(x + width / 2, y - 4, `H${layers[l].numbers[k]}`, how);
    });
  });
  return top;
}

/** A box around the patches that are chosen. */
function mark(drawing: Drawing, { rows, columns }: Grid, patches: readonly number[], box: readonly number[]): void {
  if (!patches.length) return;
  const [x, y, width, height] = box;
  const [first, last] = [Math.min(...patches), Math.max(...patches)];
  const [wide, high] = [width / columns, height / rows];
  const [left, above] = [(first % columns) * wide, Math.floor(first / columns) * high];
  const across = ((last % columns) + 1) * wide - left;
  drawing.box(x + left, y + above, across, (Math.floor(last / columns) + 1) * high - above, "none", ORANGE, 2);
}

export async function onPictureFigure(context: Context): Promise<Drawing> {
  const { state } = context.store;
  const grid = gridOf(context);
  if (!grid) throw new Error("There is no picture to save.");
  const at = chosenOn(context, grid);
  const [image, heads, weights, title] = await Promise.all([
    imageOf(context, grid),
    heatsOf(context, grid, at),
    heatOf(context, grid, at),
    titleOf(context, grid, at),
  ]);
  const look = heatLook(state);
  const name = heatName(context, state);
  const drawing = new Drawing(WIDE, `${title} ${ofText(context)}: ${name}`);
  drawing.text(12, 20, `${title}: ${name}`, { size: 13, bold: true });
  const width = Math.min(WIDE - 24, HIGH * aspectOf(grid));
  const height = width / aspectOf(grid);
  const top = weights ? largestOf(weights) : 1;
  drawHeat(drawing, { grid, image, weights, top, look }, [12, 32, width, height], SHARP);
  mark(drawing, grid, at.patches, [12, 32, width, height]);
  const words = [0, 0.5, 1].map((place) => figure(weightAt(place, top, look.tone), 2));
  if (weights) drawRamp(drawing, SCALES[look.scale], words, 12, drawing.height + 10);
  const most = heads && drawEvery(drawing, context, heads.heads, { grid, image, look }, drawing.height + 30);
  const every = most === null ? "" : ` Below it every head, a row for each layer, up to ${figure(most, 2)}.`;
  drawing.caption(`${title} ${ofText(context)}, ${name}; colours go ${TONES[look.tone]}, over the picture.${every}`);
  return drawing;
}
