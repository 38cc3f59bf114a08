/** What 1/√d does to scores, and what a head does for the loss, as figures. */

import type { Ablation, Ablations, Layer } from "../data";
import { pixelTable, SCALES } from "../numbers/colour";
import { effectsOf, percent } from "../numbers/effects";
import { toHalf } from "../numbers/half";
import type { Part } from "../numbers/levels";
import { changeText, count, figure, lossText, printable, scoreText, weightText } from "../numbers/format";
import { measures, restOf, softmax } from "../numbers/softmax";
import { takenOf } from "../parts/moved";
import { chosenQuery, headAt, headName, keyOf, layerOf, named, tokensOf, type Context } from "../views/view";
import { runsHere } from "../views/switching";
import { BLUE, drawBars, ORANGE, type Bar } from "./bars";
import { Drawing, LINE } from "./drawing";
import { capital, nameOfHead, ofText, printed, WIDE } from "./frame";

/** Queries and keys that are drawn, at most, those up to the chosen query. */
const MOST = 256;

/** Pixels of a learned sink's column and the gap after it. */
const SINK = 18;

/** Heads that are listed, those that change the loss most. */
const LISTED = 24;

/** Draws the weights of dot products times a factor, and the marked row as bars below; returns what that row is. */
function drawSide(
  drawing: Drawing,
  context: Context,
  dots: Float32Array,
  rows: number,
  marked: number,
  factor: number,
  left: number,
  side: number,
): string {
  const { state } = context.store;
  const cols = dots.length / rows;
  const table = pixelTable(SCALES[printed(state)], 1, "root");
  const data = new Uint32Array(dots.length);
  const sink = layerOf(context).sinks?.[state.head] ?? -Infinity;
  const sunk = sink > -Infinity ? SINK : 0;
  const rest = new Uint32Array(rows);
  let mine = new Float64Array(0);
  for (let r = 0; r < rows; r++) {
    const weights = softmax(dots.subarray(r * cols, (r + 1) * cols), factor, sink);
    rest[r] = table[toHalf(restOf(weights))];
    if (r === marked) mine = new Float64Array(weights);
    weights.forEach((weight, c) => (data[r * cols + c] = table[toHalf(weight)]));
  }
  const x = left + sunk;
  const step = Math.min(side / rows, (side - sunk) / cols);
  if (sunk) drawing.picture(left, 30, sunk - 6, rows * step, { rows, cols: 1, data: rest });
  drawing.picture(x, 30, cols * step, rows * step, { rows, cols, data });
  drawing.box(x, 30, cols * step, rows * step, "none", LINE);
  drawing.box(x, 30 + marked * step, cols * step, Math.max(2, step), "none", ORANGE, 1.5);
  const [base, high] = [30 + rows * step + 54, 44];
  mine.forEach((weight, c) => {
    if (weight > 0) drawing.box(x + c * step, base - weight * high, Math.max(0.5, step - 0.5), weight * high, BLUE);
  });
  drawing.path(`M${x} ${base}H${x + cols * step}`, LINE, 1);
  const { entropy, largest, gradient } = measures(sunk ? [...mine, restOf(mine)] : mine);
  return `largest weight ${weightText(largest)}, entropy ${scoreText(entropy)}, gradient ${scoreText(gradient)}`;
}

/** The queries and keys that are drawn, query i among them, and the key where it stands. */
export function partOfScale(layer: Layer, i: number): Part {
  const { n_q, n_k } = layer;
  if (Math.max(n_q, n_k) <= MOST) return { r0: 0, r1: n_q, c0: 0, c1: n_k };
  const end = (keyOf(layer, i) ?? MOST - 1) + 1;
  return { r0: Math.max(0, i + 1 - MOST), r1: i + 1, c0: Math.max(0, end - MOST), c1: Math.min(n_k, end) };
}

export async function scaleFigure(context: Context): Promise<Drawing> {
  const layer = layerOf(context);
  const i = chosenQuery(context.store.state, layer);
  const { r0, r1, c0, c1 } = partOfScale(layer, i);
  const whole = r1 - r0 === layer.n_q && c1 - c0 === layer.n_k;
  const dots = await context.data.dots(headAt(context.store.state), r0, r1, c0, c1);
  const drawing = new Drawing(WIDE, `Scores with and without 1/√d: ${nameOfHead(context)} ${ofText(context)}`);
  const side = (WIDE - 48) / 2;
  const sides = [
    [`with 1/√d, d = ${layer.d}`, 1 / Math.sqrt(layer.d)],
    ["without", 1],
  ] as const;
  const said = sides.map(([title, factor], k) => {
    const x = 12 + k * (side + 24);
    drawing.text(x, 18, title, { size: 13, bold: true });
    const told = drawSide(drawing, context, dots, r1 - r0, i - r0, factor, x, side);
    return [x, told] as const;
  });
  const below = drawing.height + 20;
  for (const [x, told] of said) drawing.text(x, below, told, { size: 10.5 });
  const part = whole ? "" : ` Queries ${count(r0)} to ${count(r1 - 1)}, keys ${count(c0)} to ${count(c1 - 1)}.`;
  drawing.caption(
    `${capital(nameOfHead(context))} ${ofText(context)}, its scores with and without 1/√d: rows are queries, columns keys${layer.sink ? ", before them the learned sink" : ""}; ` +
      `colours go by the square root of the weight, from 0 to 1. The marked row, as bars below, is query ` +
      `${await named(context, "query", i)}.${part}`,
  );
  return drawing;
}

/** Heads by how much the loss changes without each. */
export function lossBars({ scene }: Pick<Context, "scene">, ablations: Ablations): Bar[] {
  const listed = effectsOf(ablations)
    .sort((a, b) => b.share - a.share)
    .slice(0, LISTED);
  return listed
    .sort((a, b) => b.by - a.by)
    .map(({ layer, head, by, share }) => ({
      name: headName(scene, layer, head),
      share,
      said: changeText(by),
      fill: by < 0 ? BLUE : ORANGE,
    }));
}

/** What the model expects with the head and without it, a bar for each. */
export const oddsBars = ({ odds }: Ablation): Bar[] =>
  odds.flatMap(({ token, before, after }) => [
    { name: printable(token), about: "with", share: before, said: percent(before), fill: BLUE },
    { name: "", about: "without", share: after, said: percent(after), fill: ORANGE },
  ]);

/** The keys of which the chosen head takes most along, where no model runs here. */
async function takenFigure(context: Context): Promise<Drawing> {
  const at = headAt(context.store.state);
  const i = chosenQuery(context.store.state, layerOf(context));
  const [row, norms] = await Promise.all([context.data.row(at, i), context.data.norms(at)]);
  if (!norms.length) throw new Error("There is nothing to draw: no model runs here, and no values are known.");
  const taken = takenOf(row, norms).map((x) => x || 0);
  const order = [...taken.keys()].sort((a, b) => taken[b] - taken[a]).slice(0, 12);
  const { key } = tokensOf(context);
  await Promise.all(order.map((j) => key?.load(j, j + 1)));
  const name = await named(context, "query", i);
  const drawing = new Drawing(WIDE, `What ${nameOfHead(context)} takes along ${ofText(context)}`);
  drawing.text(12, 20, `What ${nameOfHead(context)} takes along: weight × ‖value‖`, { size: 13, bold: true });
  const bars = order.map((j) => ({
    name: key ? printable(key.at(j) ?? "") : "",
    about: count(j),
    share: taken[j] / (taken[order[0]] || 1),
    said: figure(taken[j]),
  }));
  drawing.height = drawBars(drawing, bars, { x: 12, y: 32, width: WIDE - 24, names: 140, mono: true });
  drawing.caption(
    `What query ${name} takes along in ${nameOfHead(context)} ${ofText(context)}: the weight of a key times the length of its value.`,
  );
  return drawing;
}

export async function ablationFigure(context: Context): Promise<Drawing> {
  const { data, store, scene } = context;
  if (!runsHere(scene, data.source.kind)) return takenFigure(context);
  const at = headAt(store.state);
  const how = store.state.without === "mean" ? "mean" : "zero";
  const i = chosenQuery(store.state, layerOf(context));
  const [all, one] = await Promise.all([data.ablations(at.scene, how), data.ablation(at, how, i)]);
  const token = await named(context, "query", i);
  const drawing = new Drawing(WIDE, `Does ${nameOfHead(context)} matter ${ofText(context)}?`);
  const [half, x] = [WIDE / 2 - 24, WIDE / 2 + 12];
  drawing.text(12, 20, "The loss without each head, nats a token", { size: 13, bold: true });
  const left = drawBars(drawing, lossBars(context, all), { x: 12, y: 32, width: half, names: 74 });
  drawing.text(x, 20, `Expected after ${token}`, { size: 13, bold: true });
  const right = drawBars(drawing, oddsBars(one), { x, y: 32, width: half, names: 110, mono: true });
  drawing.height = Math.max(left, right);
  const place = how === "mean" ? "its mean over the text" : "nothing";
  drawing.caption(
    `The model without one head, ${place} in its place, ${ofText(context)}. Left: how much the loss, ${lossText(all.loss)} nats a token ` +
      `with all heads, changes without each; orange more, blue less. Right: what is expected after ${token} with ` +
      `${nameOfHead(context)} (blue) and without it (orange).`,
  );
  return drawing;
}
