/** The strongest heads of each kind, and what the kind is. */

import type { Heads } from "../data";
import { h } from "../dom";
import { scoreText } from "../numbers/format";
import { headName, type Context } from "../views/view";

/** Heads of each kind that are listed. */
const STRONGEST = 3;

function strongest({ scene, store }: Context, kind: string, { rows }: Heads): HTMLElement[] {
  return rows
    .filter((row) => typeof row.scores[kind] === "number")
    .sort((a, b) => (b.scores[kind] ?? 0) - (a.scores[kind] ?? 0))
    .slice(0, STRONGEST)
    .map(({ layer, head, scores }) => {
      const score = scores[kind] ?? 0;
      const bar = h("span", { class: "share" });
      bar.style.setProperty("--share", String(score));
      return h(
        "li",
        {},
        h(
          "button",
          { type: "button", click: () => store.set({ view: "overview", layer, head }) },
          h("span", {}, headName(scene, layer, head)),
          bar,
          h("b", {}, scoreText(score)),
        ),
      );
    });
}

export function kindList(context: Context, heads: Heads): HTMLElement[] {
  const missing = context.scene.layers[0].cross
    ? "Queries and keys are two texts."
    : "Nothing repeats here, or there are no tokens.";
  return context.words.kinds.map(({ name, definition }) => {
    const list = strongest(context, name, heads);
    return h(
      "div",
      { class: "one-kind" },
      h("h2", {}, name),
      h("p", {}, list.length ? definition : missing),
      h("ol", { class: "shares" }, ...list),
    );
  });
}
