/** What a model expects at a position of a text. */

import { h } from "../dom";
import { printable } from "../numbers/format";
import { orRefused, Refused } from "../source/source";
import type { Context } from "../views/view";
import { expectsTitle } from "./findings";
import { bar, nextBars } from "./tokenrow";

/** What the model expects at query i of a scene, with a heading; empty where that is not known. */
export async function expectedAt(context: Context, id: string, i: number, name: string): Promise<HTMLElement[]> {
  const { data, scene } = context;
  const told = scene.predicts ? await orRefused(data.expected(id, i)) : null;
  if (told === null || told instanceof Refused) {
    const next = nextBars(context);
    return next ? [h("h2", {}, expectsTitle(context, i)), next] : [];
  }
  const { likeliest, actual } = told;
  if (!likeliest.length) return []; // of a long text only the end is known
  const stands = actual && !likeliest.some(({ token }) => token === actual.token) ? [...likeliest, actual] : likeliest;
  const lines = stands.map(({ token, probability }) => {
    const line = bar(
      h("span", { class: "word" }, printable(token)),
      probability,
      `${(100 * probability).toFixed(1)} %`,
    );
    if (token === actual?.token) line.classList.add("actual");
    return line;
  });
  const heading =
    scene.predicts === "masked" ? `In place of ${name} the model expects` : `After ${name} the model expects`;
  return [h("h2", {}, heading), h("ol", { class: "shares next" }, ...lines)];
}
