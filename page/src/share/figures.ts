/** Figures of views, from the data that they show. */

import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { columns, count, figure, readable, shortened } from "../numbers/format";
import { breakLines, lineOf } from "../parts/lines";
import { DifferencePicture, HeadPicture } from "../parts/pictures";
import { sinkFirst } from "../parts/thumb";
import { comparedHead } from "../views/compared";
import { chosen, headAt, layerOf, named, sameTokens, tokensOf, type Context } from "../views/view";
import { Drawing, INK, SOFT } from "./drawing";
import { ablationFigure, scaleFigure } from "./effects";
import { capital, nameOfHead, ofText, printed, printedLook, TONES, WIDE } from "./frame";
import { drawMap, drawScale, partOf, ROOM } from "./maps";
import { drawHeads, overviewFigure, tokenFigure } from "./overviews";
import { onPictureFigure } from "./pictures";
import { profilesFigure } from "./profiles";

/** Where on the scale of colours arcs begin, that none is as light as the paper. */
const FAINTEST = 0.2;

const figures: Record<string, (context: Context) => Promise<Drawing>> = {
  overview: overviewFigure,
  heads: headsFigure,
  map: mapFigure,
  text: textFigure,
  token: tokenFigure,
  compare: compareFigure,
  profiles: profilesFigure,
  scale: scaleFigure,
  steps: stepsFigure,
  ablation: ablationFigure,
  arcs: arcsFigure,
  picture: onPictureFigure,
};

/** What a view shows, as a drawing with a caption. */
export const figureOf = (context: Context): Promise<Drawing> => figures[context.store.state.view](context);

async function mapFigure(context: Context): Promise<Drawing> {
  const { state } = context.store;
  const at = headAt(state);
  const picture = await HeadPicture.of(context, at, printedLook(state));
  const part = partOf(state.zoom, picture.info);
  const drawing = new Drawing(WIDE, `Attention ${ofText(context)}: ${nameOfHead(context)}`);
  const side = WIDE - ROOM - 10;
  const level = await drawMap(drawing, picture, part, tokensOf(context), ROOM, ROOM, side);
  drawing.text(8, 18, "key →", { size: 11, fill: SOFT });
  drawing.text(8, 33, "query ↓", { size: 11, fill: SOFT });
  drawScale(drawing, picture, level, ROOM, drawing.height + 12);
  const { n_q, n_k } = picture.info;
  const all = part.r0 === 0 && part.c0 === 0 && part.r1 === n_q && part.c1 === n_k;
  const what = all
    ? ""
    : ` Queries ${count(part.r0)} to ${count(part.r1 - 1)}, keys ${count(part.c0)} to ${count(part.c1 - 1)}.`;
  const step = 2 ** (picture.info.max_level - level);
  const cell =
    step > 1 ? ` A pixel is ${step} × ${step} pairs, its ${state.kind === "max" ? "largest weight" : "mass"}.` : "";
  const sunk = picture.sinks.length ? ", before them the learned sink" : "";
  drawing.caption(
    `${capital(nameOfHead(context))} ${ofText(context)}. Each row is a token that looks (query), each column what it ` +
      `looks at (key)${sunk}; colours go ${TONES[state.tone]}.${what}${cell}${state.hide ? " The first key is left out." : ""}`,
  );
  return drawing;
}

async function compareFigure(context: Context): Promise<Drawing> {
  const { state } = context.store;
  const ends = [headAt(state), comparedHead(context)];
  const look = printedLook(state);
  const heads = await Promise.all(ends.map((at) => HeadPicture.of(context, at, look)));
  const alike = heads[0].info.n_q === heads[1].info.n_q && heads[0].info.n_k === heads[1].info.n_k;
  const pictures = [
    ...heads,
    ...(alike ? [new DifferencePicture(context.data, ends[0], ends[1], [heads[0], heads[1]], look)] : []),
  ];
  const drawing = new Drawing(
    WIDE,
    `Two heads compared: ${nameOfHead(context, ends[0])} and ${nameOfHead(context, ends[1])}`,
  );
  const names = [...ends.map((at) => capital(nameOfHead(context, at))), "Difference"];
  const side = (WIDE - 3 * 44) / 3;
  let level = 0;
  for (const [k, picture] of pictures.entries()) {
    const x = 36 + k * (side + 44);
    drawing.text(x, 16, names[k], { size: 12, bold: true });
    level = await drawMap(drawing, picture, partOf("", picture.info), { query: null, key: null }, x, 44, side);
  }
  const below = drawing.height + 12;
  drawScale(drawing, pictures[0], level, 36, below);
  if (alike) drawScale(drawing, pictures[2], level, 36 + 2 * (side + 44), below);
  drawing.caption(
    `${names[0]} and ${names[1]} ${ofText(context)}${alike ? ", and the first less the second" : ""}. Rows are queries, ` +
      `columns keys; colours go ${TONES[state.tone]}.`,
  );
  return drawing;
}

async function headsFigure(context: Context): Promise<Drawing> {
  const { state } = context.store;
  const drawing = new Drawing(WIDE, `The heads ${ofText(context)}`);
  const [, exact] = await drawHeads(drawing, context, 24);
  drawing.caption(
    `The heads ${ofText(context)}, a row for each layer. In each picture rows are queries and columns keys, a pixel the ` +
      `largest weight of its pairs${sinkFirst(context.scene)}; colours go ${TONES[state.tone]}, from 0 to 1.${exact ? "" : " Pictures are estimates from some of the queries."}`,
  );
  return drawing;
}

async function textFigure(context: Context): Promise<Drawing> {
  const { state } = context.store;
  const { i, j } = chosen(context);
  const token = state.by ? j : i;
  const weights = await (state.by ? context.data.column(headAt(state), token) : context.data.row(headAt(state), token));
  const axis = state.by ? "query" : "key";
  const list = tokensOf(context)[axis];
  await list?.load(0, weights.length);
  const tokens = Array.from(weights, (_, t) => (list ? (list.at(t) ?? "") : `${t} `));
  const [across, lines] = [76, 40];
  const broken = breakLines(tokens, across);
  const own = sameTokens(layerOf(context)) ? token : weights.indexOf(Math.max(...weights.map((w) => w || 0)));
  const first = Math.max(0, Math.min(lineOf(broken, own) - lines + 6, broken.length - lines));
  const top = weights.reduce((most, w, t) => (w > most && !(state.hide && !state.by && t === 0) ? w : most), 0) || 1;
  const scale = SCALES[printed(state)];
  const name = await named(context, state.by ? "key" : "query", token);
  const title = state.by ? `What looks at ${name}` : `What ${name} looks at`;
  const drawing = new Drawing(WIDE, `${title} ${ofText(context)}`);
  const [letter, high] = [(WIDE - 24) / across, 22];
  drawing.text(12, 20, `${title}: ${nameOfHead(context)}`, { size: 13, bold: true });
  broken.slice(first, first + lines).forEach(({ start, stop }, line) => {
    let column = 0;
    for (let t = start; t < stop; t++) {
      const text = shortened(readable(tokens[t]).replaceAll("\n", "↵"), across);
      const [x, y, width] = [12 + column * letter, 32 + line * high, columns(text) * letter];
      const place = weights[t] > 0 ? toned(weights[t], top, state.tone) : 0;
      const ground = ramp(scale, place);
      if (place > 0.03) drawing.box(x, y, width, high - 3, css(ground));
      if (t === own && sameTokens(layerOf(context))) drawing.box(x, y, width, high - 3, "none", "#c2410c", 1.5);
      if (text.trim())
        drawing.text(x, y + 14, text, {
          size: 13,
          mono: true,
          fill: place > 0.03 ? readableOn(ground) : INK,
          length: width,
        });
      column += columns(text);
    }
  });
  const cut =
    broken.length > lines
      ? ` Lines ${count(first + 1)} to ${count(Math.min(first + lines, broken.length))} of ${count(broken.length)}.`
      : "";
  drawing.caption(
    `${title} in ${nameOfHead(context)} ${ofText(context)}: the darker, the more weight, up to ${figure(top)}; colours go ${TONES[state.tone]}.${cut}`,
  );
  return drawing;
}

/** The colour of an arc on white paper, where its weight is told. */
function strokeOf(path: Element, context: Context): string {
  const { state } = context.store;
  const weight = path.getAttribute("data-weight");
  if (weight === null) return path.getAttribute("stroke") ?? INK;
  return css(ramp(SCALES[printed(state)], Math.max(FAINTEST, toned(Number(weight), 1, state.tone))));
}

async function arcsFigure(context: Context): Promise<Drawing> {
  const shown = document.querySelector(".regard .arcs svg");
  const drawing = new Drawing(WIDE, `Arcs ${ofText(context)}`);
  const wide = Number(shown?.getAttribute("width") ?? WIDE);
  const by = Math.min(1, WIDE / wide); // few tokens stay as large as they are
  for (const path of shown?.querySelectorAll("path.arc") ?? []) {
    const d = (path.getAttribute("d") ?? "").replace(/-?\d+(\.\d+)?/g, (x) =>
      String(Number((Number(x) * by).toFixed(2))),
    );
    drawing.path(d, strokeOf(path, context), Number(path.getAttribute("stroke-width")) * by);
  }
  for (const word of shown?.querySelectorAll("g.word text") ?? []) {
    const [x, y] = (/translate\(([\d.]+) ([\d.]+)\)/.exec(word.getAttribute("transform") ?? "") ?? [])
      .slice(1)
      .map(Number);
    const size = Math.min(11, 12.5 * by + 2);
    // Letters go upward: those below a row end at it, those of a row of queries above the keys begin there.
    const above = word.getAttribute("transform")?.includes("rotate(-90)");
    const text = shortened(word.textContent ?? "", above ? 11 : undefined);
    const foot = y * by + (above ? 0 : columns(text) * 0.62 * size);
    drawing.text(x * by + 0.35 * size, foot, text, { size, mono: true, upward: true });
  }
  drawing.caption(
    `Arcs of ${nameOfHead(context)} ${ofText(context)}: from each ${sameTokens(layerOf(context)) ? "token to those" : "query, above, to the keys"} that it looks at; the darker and thicker, the more weight.`,
  );
  return drawing;
}

async function stepsFigure(context: Context): Promise<Drawing> {
  const { i, j } = chosen(context);
  const stages = await context.data.stages(headAt(context.store.state), i, j);
  const drawing = new Drawing(WIDE, `One weight step by step: ${nameOfHead(context)}`);
  let y = 12;
  for (const [k, stage] of stages.entries()) {
    drawing.text(12, (y += 20), `${k + 1}  ${stage.name}`, { size: 12, bold: true });
    drawing.text(170, y, shortened(stage.text, 66), { size: 11, fill: SOFT });
    if (stage.value !== undefined)
      drawing.text(WIDE - 12, y, figure(stage.value), { size: 12, bold: true, anchor: "end" });
    if (!stage.values) continue;
    const most = Math.max(...stage.values.map((v) => Math.abs(v ?? 0))) || 1;
    const wide = (WIDE - 182) / stage.values.length;
    y += 40;
    stage.values.forEach((v, n) => {
      const high = (Math.abs(v ?? 0) / most) * 16;
      drawing.box(
        170 + n * wide,
        (v ?? 0) < 0 ? y - 16 : y - 16 - high,
        Math.max(0.5, wide - 0.6),
        high,
        (v ?? 0) < 0 ? "#c2410c" : "#1f5c9e",
      );
    });
  }
  const [query, key] = await Promise.all([named(context, "query", i), named(context, "key", j)]);
  drawing.caption(
    `The weight of query ${query} on key ${key} in ${nameOfHead(context)} ${ofText(context)}, step by step.`,
  );
  return drawing;
}
