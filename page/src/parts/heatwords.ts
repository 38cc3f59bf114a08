/** The tokens beside a picture: a class token, or the words of a text. A click chooses one. */

import { h } from "../dom";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, figure, readable } from "../numbers/format";
import { windowAround } from "../numbers/windows";
import { tokensOf, type Context } from "../views/view";
import type { HeatLook } from "./heatpicture";

/** Words of a long text that are shown: those around the chosen one. */
const SHOWN = 400;

export interface Words {
  axis: "query" | "key";
  /** The tokens that are no patches. */
  places: readonly number[];
  chosen: number;
  /** The weight of each token, where a head is shown; `top` the largest that colours tell. */
  weights: Float32Array | null;
  top: number;
  look: HeatLook;
  pick(token: number): void;
}

/** The words as they are read, shaded by their weights. */
export async function heatWords(context: Context, words: Words): Promise<HTMLElement> {
  const { places, chosen, weights, top, look } = words;
  const tokens = tokensOf(context)[words.axis];
  const near = places.findIndex((token) => token >= chosen);
  const { start, stop } = windowAround(near < 0 ? places.length - 1 : near, places.length, SHOWN);
  const shown = places.slice(start, stop);
  if (shown.length) await tokens?.load(shown[0], (shown.at(-1) as number) + 1);
  const text = h("p", { class: "shaded sheet words" }, start > 0 && "… ");
  for (const token of shown) {
    const word = tokens ? readable(tokens.at(token) ?? "").replaceAll("\n", "↵") || "∅" : `token ${token} `;
    const span = h("span", { class: "token", "data-token": token }, word);
    const weight = weights?.[token] ?? 0;
    const place = weight > 0 ? toned(weight, top || 1, look.tone) : 0;
    if (place > 0.03) {
      const colour = ramp(SCALES[look.scale], place);
      span.style.background = css(colour);
      span.style.color = readableOn(colour);
    }
    if (token === chosen) span.classList.add("query");
    span.title = `${count(token)}${weights ? `: ${figure(weight)}` : ""}`;
    text.append(span);
  }
  if (stop < places.length) text.append(" …");
  text.addEventListener("click", ({ target }) => {
    const { token } = (target as HTMLElement).dataset;
    if (token !== undefined) words.pick(Number(token));
  });
  return text;
}
