/** The overview, and one token in every head, as figures. */

import type { TokenRow } from "../data";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, printable, shortened, weightText } from "../numbers/format";
import { expectsTitle, sayings } from "../parts/findings";
import { HeadPicture } from "../parts/pictures";
import { nameOf } from "../parts/sentences";
import { headPixels } from "../parts/thumb";
import { largest, rowTokens } from "../parts/tokenrow";
import { chosen, chosenQuery, headAt, layerOf, named, tokensOf, type Context } from "../views/view";
import { drawBars, ORANGE } from "./bars";
import { Drawing, LINE, SOFT } from "./drawing";
import { capital, nameOfHead, ofText, printed, printedLook, TONES, WIDE } from "./frame";
import { drawMap, drawScale, partOf, ROOM } from "./maps";

/** Pixels of an overview's map. */
const SIDE = 300;

/** Draws every head, a line for each layer, within so many pixels; returns where they end, and whether all are exact. */
export async function drawHeads(
  drawing: Drawing,
  context: Context,
  top: number,
  most = 120,
): Promise<[number, boolean]> {
  const { state } = context.store;
  const { layers } = context.scene;
  const side = Math.min(most, (WIDE - 50) / Math.max(...layers.map((layer) => layer.heads)) - 6);
  let exact = true;
  for (const [l, layer] of layers.entries()) {
    const y = top + l * (side + 8);
    drawing.text(38, y + side / 2 + 4, `L${layer.number}`, { size: 11, fill: SOFT, anchor: "end" });
    for (let head = 0; head < layer.heads; head++) {
      const x = 44 + head * (side + 6);
      const pixels = await headPixels(context, l, head, printed(state));
      exact &&= pixels.exact;
      drawing.picture(x, y, side, side, pixels);
      const current = l === state.layer && head === state.head && state.view === "overview";
      drawing.box(x, y, side, side, "none", current ? ORANGE : LINE, current ? 2 : 1);
      if (l === 0 || layers[l - 1].numbers[head] !== layer.numbers[head]) {
        const how = { size: Math.min(11, side / 2), fill: SOFT, anchor: "middle" } as const;
        drawing.text(x + side / 2, y - 4, `H${layer.numbers[head]}`, how);
      }
    }
  }
  return [top + layers.length * (side + 8), exact];
}

export async function overviewFigure(context: Context): Promise<Drawing> {
  const { data, store, scene } = context;
  const at = headAt(store.state);
  const { i, j } = chosen(context);
  const weights = await data.row(at, i);
  const tokens = await rowTokens(context, weights, i, j);
  const drawing = new Drawing(WIDE, `Overview ${ofText(context)}: ${nameOfHead(context)}`);
  drawing.text(ROOM, 16, capital(nameOfHead(context)), { size: 13, bold: true });
  const picture = await HeadPicture.of(context, at, printedLook(store.state));
  const level = await drawMap(drawing, picture, partOf("", picture.info), tokensOf(context), ROOM, ROOM, SIDE);
  drawScale(drawing, picture, level, ROOM, drawing.height + 12);
  const [x, width] = [ROOM + SIDE + 24, WIDE - ROOM - SIDE - 32];
  const listed = (list: typeof weights, words: readonly string[] | null): Parameters<typeof drawBars>[1] =>
    largest(list).map((t) => ({
      name: words ? printable(words[t] ?? "") : "",
      about: count(t),
      share: list[t],
      said: weightText(list[t]),
    }));
  drawing.text(x, 16, shortened(`Where ${nameOf(tokens.query, i)} looks`, 36), { size: 13, bold: true });
  let y = drawBars(drawing, listed(weights, tokens.key), { x, y: 26, width, names: 96, mono: true });
  const following = scene.following ?? [];
  if (following.length) {
    drawing.text(x, (y += 22), expectsTitle(context, i), { size: 13, bold: true });
    const next = following.map(({ token, probability }) => ({
      name: printable(token),
      share: probability,
      said: `${(100 * probability).toFixed(1)} %`,
      fill: ORANGE,
    }));
    y = drawBars(drawing, next, { x, y: y + 10, width, names: 96, mono: true });
  }
  const [end, exact] = await drawHeads(drawing, context, Math.max(drawing.height, y) + 28, 84);
  drawing.height = Math.max(drawing.height, end);
  const estimates = exact ? "" : " Small pictures are estimates from some of the queries.";
  drawing.caption(
    `${(await sayings(context, at, weights, i, tokens, printed(store.state))).join(" ")} Above ${nameOfHead(context)} ${ofText(context)}, below ` +
      `every head: rows are queries, columns keys; colours go ${TONES[store.state.tone]}.${estimates}`,
  );
  return drawing;
}

/** Draws where a token looks in one head: the key that it looks at most. */
function drawCell(
  drawing: Drawing,
  context: Context,
  row: TokenRow,
  word: string,
  x: number,
  y: number,
  w: number,
): void {
  const { state } = context.store;
  const weight = row.weights[0] ?? 0;
  const ground = ramp(SCALES[printed(state)], toned(weight, 1, state.tone));
  const current = row.layer === state.layer && row.head === state.head;
  drawing.box(x, y, w, CELL - 4, css(ground), current ? ORANGE : LINE, current ? 2 : 1);
  const fill = readableOn(ground);
  const letters = Math.max(1, Math.floor((w - 6) / 7));
  drawing.text(x + w / 2, y + 14, shortened(word, letters), { size: 11, mono: true, fill, anchor: "middle" });
  const about = row.keys.length ? `${count(row.keys[0])} · ${weightText(weight)}` : "";
  drawing.text(x + w / 2, y + 26, w > 58 ? about : about && weightText(weight), { size: 9, fill, anchor: "middle" });
}

/** Pixels from one layer of a token's figure to the next. */
const CELL = 36;

export async function tokenFigure(context: Context): Promise<Drawing> {
  const { data, store, scene } = context;
  const i = chosenQuery(store.state, layerOf(context));
  const rows = await data.token(store.state.scene, i);
  const { key } = tokensOf(context);
  await Promise.all(rows.map(({ keys: [j] }) => j !== undefined && key?.load(j, j + 1)));
  const name = await named(context, "query", i);
  const drawing = new Drawing(WIDE, `Where ${name} looks in every head ${ofText(context)}`);
  drawing.text(12, 20, `Where ${name} looks in every head`, { size: 13, bold: true });
  const most = Math.max(...scene.layers.map(({ heads }) => heads));
  const wide = (WIDE - 52) / most;
  const top = 52;
  for (let head = 0; head < most; head++) {
    const how = { size: 11, fill: SOFT, anchor: "middle" } as const;
    drawing.text(44 + (head + 0.5) * wide, top - 6, `H${scene.layers[0].numbers[head] ?? head}`, how);
  }
  scene.layers.forEach(({ number }, l) =>
    drawing.text(38, top + l * CELL + 20, `L${number}`, { size: 11, fill: SOFT, anchor: "end" }),
  );
  for (const row of rows) {
    const [j] = row.keys;
    const word = j === undefined ? "–" : key ? printable(key.at(j) ?? "") : count(j);
    drawCell(drawing, context, row, word, 44 + row.head * wide, top + row.layer * CELL, wide - 4);
  }
  drawing.caption(
    `Where query ${name} looks ${ofText(context)}, in every head: the key with the largest weight, its number and its weight; ` +
      `colours go ${TONES[store.state.tone]}, from 0 to 1. Marked: ${nameOfHead(context)}.`,
  );
  return drawing;
}
