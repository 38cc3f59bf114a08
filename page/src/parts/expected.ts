/** What a model expects at a position of a text. */

import { h } from "../dom";
import { printable } from "../numbers/format";
import type { Context } from "../views/view";
import { expectsTitle } from "./findings";
import { bar, nextBars } from "./tokenrow";

/** What the model expects at query i, with a heading; empty where that is not known. */
export async function expectedAt(context: Context, i: number, name: string): Promise<HTMLElement[]> {
  const { data, scene, store } = context;
  if (!scene.editable || !scene.predicts) {
    const next = nextBars(context);
    return next ? [h("h2", {}, expectsTitle(context, i)), next] : [];
  }
  const expected = await data.expected(store.state.scene, i).catch(() => null); // a long text: only its end is known
  if (!expected) return [];
  const { likeliest, actual } = expected;
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
