/** Where one token looks: its row of weights as text and as bars, and what the model expects next. */

import type { Layer } from "../data";
import { h } from "../dom";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, figure, printable, readable, weightText } from "../numbers/format";
import { sinkShare } from "../numbers/sinks";
import { windowAround } from "../numbers/windows";
import type { State } from "../state";
import { chosen, layerOf, sameTokens, scaleName, tokensOf, type Context } from "../views/view";
import { asideLine, asideSaid, leavesAside, placeOf, split } from "./aside";
import { largestHere, shadeKey } from "./legend";
import { TAKEN, takenOf } from "./moved";

const LISTED = 8;
/** Keys at most that lists leave aside. */
const ASIDE = 4;

/** Tokens of a long text that are shown: those around what is looked at. */
const SHOWN = 600;

const LESS = 0.0005;

/** A line of a list: a name, a bar as long as its share, and a number. */
export function bar(
  name: HTMLElement,
  share: number,
  said: string,
  act?: () => void,
  taken?: HTMLElement,
): HTMLElement {
  const line = h("span", { class: "share" });
  line.style.setProperty("--share", String(Math.min(1, share)));
  const parts = [name, line, h("b", {}, said), ...(taken ? [taken] : [])];
  return h(
    "li",
    {},
    act ? h("button", { type: "button", click: act }, ...parts) : h("span", { class: "row" }, ...parts),
  );
}

/** Tokens around one that are shown with it. */
const NEAR = 300;

/** The tokens of both axes as far as a row of weights shows them: those around query i, key j and the largest weights. */
export async function rowTokens(
  context: Context,
  row: Float32Array,
  i: number,
  j: number,
): Promise<{ query: readonly string[] | null; key: readonly string[] | null }> {
  const both = tokensOf(context);
  await Promise.all([
    both.query?.load(Math.max(0, i - NEAR), i + 1),
    ...[j, ...largest(row)].map((t) => both.key?.load(Math.max(0, t - NEAR), Math.min(row.length, t + NEAR))),
  ]);
  const list = (axis: "query" | "key", n: number): readonly string[] | null => {
    const tokens = both[axis];
    return tokens && Array.from({ length: n }, (_, t) => tokens.at(t) ?? "");
  };
  return { query: list("query", layerOf(context).n_q), key: list("key", row.length) };
}

/** In the text of the queries a click chooses one, and the key it looks at most; in another text it chooses a key. */
export const pickedBy = (token: number, layer: Layer): Partial<State> =>
  sameTokens(layer) ? { i: token, j: -1 } : { j: token };

/** The text around the chosen tokens, shaded by the weights of a row; said: what the largest of them is. */
export function shadedText(
  context: Context,
  row: Float32Array,
  tokens: readonly string[] | null,
  i: number | null,
  j: number,
  said = largestHere(sinkShare(layerOf(context), row)),
): HTMLElement {
  const { store } = context;
  const own = sameTokens(layerOf(context)) ? i : null; // a query of another text is no token of this one
  const top = row.reduce((most, weight) => (weight > most ? weight : most), 0) || 1;
  const scale = SCALES[scaleName(store.state)];
  const { start, stop } = windowAround(j, row.length, SHOWN);
  const text = h("p", { class: "shaded sheet" });
  if (start > 0) text.append("… ");
  for (let t = start; t < stop; t++) {
    const weight = row[t];
    const token = tokens ? readable(tokens[t] ?? "").replaceAll("\n", "↵") || "∅" : `${t} `;
    const span = h("span", { class: "token", "data-token": t }, token);
    const place = weight > 0 ? toned(weight, top, store.state.tone) : 0;
    if (place > 0.03) {
      const colour = ramp(scale, place);
      span.style.background = css(colour);
      span.style.color = readableOn(colour);
    }
    if (t === own) span.classList.add("query");
    if (t === j && j !== own) span.classList.add("key");
    const value = Number.isNaN(weight) ? "hidden by the mask" : figure(weight);
    span.title = `${count(t)} ${tokens ? `“${printable(tokens[t] ?? "")}”` : ""}: ${value}`;
    text.append(span);
  }
  if (stop < row.length) text.append(" …");
  text.addEventListener("click", ({ target }) => {
    const { token } = (target as HTMLElement).dataset;
    if (token !== undefined) store.set(pickedBy(Number(token), layerOf(context)));
  });
  return h("div", { class: "shading" }, text, shadeKey(store.state, top, said));
}

/** The keys with the largest weights, in falling order. */
export const largest = (row: Float32Array): number[] => weighty(row).slice(0, LISTED + ASIDE);

const weighty = (row: Float32Array): number[] =>
  Array.from(row.keys())
    .filter((t) => row[t] >= LESS)
    .sort((a, b) => row[b] - row[a]);

/** The heads of the columns of a list with what is taken along. */
const columnHeads = (): HTMLElement =>
  h(
    "li",
    {},
    h("span", { class: "row" }, h("i", {}), h("i", {}), h("b", {}, "weight"), h("b", { title: TAKEN }, "× ‖value‖")),
  );

/** The largest weights of a row, or of a column where a bar chooses a query, as bars; beside each, where lengths of values are known, how much it takes along. */
export function rowBars(
  context: Context,
  row: Float32Array,
  tokens: readonly string[] | null,
  norms: Float32Array,
  axis: "i" | "j" = "j",
): HTMLElement {
  const layer = layerOf(context);
  const taken = takenOf(row, norms);
  const { near } = context.store.state;
  const of = axis === "j" ? chosen(context).i : chosen(context).j;
  const [listed, aside] = split(weighty(row), near ? () => false : leavesAside(layer, of, of + 1, axis === "i"));
  const moves = (t: number): HTMLElement | undefined =>
    taken.length ? h("b", { title: TAKEN, "data-taken": taken[t] }, figure(taken[t])) : undefined;
  const bars = listed
    .slice(0, LISTED)
    .map((t) =>
      bar(
        h(
          "span",
          { class: "word", "data-token": t },
          tokens ? printable(tokens[t] ?? "") : "",
          h("small", {}, count(t)),
        ),
        row[t],
        weightText(row[t]),
        () => context.store.set({ [axis]: t }),
        moves(t),
      ),
    );
  const sink = axis === "j" ? sinkShare(layer, row) : null;
  if (sink !== null) {
    const line = bar(h("span", { class: "word" }, "sink"), sink, weightText(sink));
    bars.splice(placeOf(sink, listed.slice(0, LISTED), row), 0, line);
  }
  const named = { class: taken.length ? "shares taken" : "shares", "data-axis": axis === "i" ? "query" : "key" };
  const list = h("ol", named, taken.length > 0 && columnHeads(), ...bars);
  const switched = aside.length > 0 || (near && sameTokens(layer));
  return switched ? h("div", {}, list, asideLine(context, asideSaid(aside, row, of, of + 1))) : list;
}

/** What the model expects next. */
export function nextBars(context: Context): HTMLElement | null {
  const following = context.scene.following ?? [];
  if (!following.length) return null;
  return h(
    "ol",
    { class: "shares next" },
    ...following.map(({ token, probability }) =>
      bar(h("span", { class: "word" }, printable(token)), probability, `${(100 * probability).toFixed(1)} %`),
    ),
  );
}
