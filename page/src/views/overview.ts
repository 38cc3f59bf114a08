import type { HeadRow } from "../data";
import { h } from "../dom";
import { headGrid, kindsOf } from "../parts/headgrid";
import { expects, looks, nameOf } from "../parts/sentences";
import { definitionOf, withTerms } from "../parts/terms";
import { nextBars, rowBars, rowTokens, shadedText } from "../parts/tokenrow";
import { mapPane } from "./map";
import { chosen, headAt, headName, latest, touches, type MakeView } from "./view";

/** Pairs in all heads up to which kinds are measured without being asked for. */
const LONG = 2 ** 33;

/** A finding to begin with: heads, one head's map, and where one token looks. */
export const overviewView: MakeView = (context) => {
  const { data, store, scene, words } = context;
  const grid = headGrid(context);
  const map = mapPane(context, null);
  const said = h("p", { class: "finding" });
  const row = h("aside", { class: "token-row", "aria-label": "Where the chosen token looks", tabindex: 0 });
  const element = h(
    "section",
    { class: "view overview", "aria-label": "Overview" },
    said,
    h(
      "div",
      { class: "three" },
      h(
        "div",
        { class: "left", tabindex: 0, role: "region", "aria-label": "Heads" },
        h("h2", {}, "Every head"),
        grid.element,
      ),
      h("div", { class: "middle" }, map.element),
      row,
    ),
  );
  let kinds: HeadRow[] = [];

  const write = latest(context.fail);
  const describe = (): void =>
    write(async (current) => {
      const at = headAt(store.state);
      const { i, j } = chosen(context);
      const [weights, norms, finding] = await Promise.all([
        data.row(at, i),
        data.norms(at),
        data.finding(store.state.scene),
      ]);
      const { query: queries, key: keys } = await rowTokens(context, weights, i, j);
      if (!current()) return;
      const tokens = queries && keys ? { query: queries, key: keys } : null;
      const name = headName(scene, at.layer, at.head);
      const found = finding.layer === at.layer && finding.head === at.head;
      const mine = kinds.find(({ layer, head }) => layer === at.layer && head === at.head);
      const kind = mine?.kinds[0];
      const first = found
        ? `${finding.why}${finding.how ? ` ${finding.how}` : ""}`
        : `${name}: ${mine && kind ? `${kindsOf(mine)}. ${definitionOf(kind.kind, words)}` : "no notable kind."}`;
      const text = [first, looks(words, scene, weights, i, tokens), expects(words, scene)].filter(Boolean);
      said.replaceChildren(...text.flatMap((one) => [...withTerms(one, words), document.createTextNode(" ")]));
      const own = scene.layers[at.layer].cross ? null : i;
      const next = nextBars(context);
      row.replaceChildren(
        h("h2", {}, `Where ${nameOf(queries, i)} looks`),
        shadedText(context, weights, keys, own, j),
        rowBars(context, weights, keys, norms),
        ...(next ? [h("h2", {}, "The model expects next"), next] : []),
        h("p", { class: "help" }, scene.note, keys?.[0] === "⊢" ? `. ${words.beginning}` : ""),
      );
    });

  const load = latest(context.fail);
  const measure = (): void => {
    const pairs = scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);
    if (data.source.kind !== "file" && pairs > LONG && !data.measured.has(store.state.scene)) return;
    load(async (current) => {
      const { rows } = await data.heads(store.state.scene);
      if (!current()) return;
      kinds = rows;
      grid.tell(rows);
      describe();
    });
  };

  return {
    element,
    line: () => [],
    update(state, changed) {
      map.update(state, changed);
      grid.update(changed.has("scale") || changed.has("tone"));
      if (changed.has("scene")) measure();
      if (touches(changed, "scene", "layer", "head", "i", "j", "scale", "tone", "near")) describe();
    },
    destroy() {
      grid.destroy();
      map.destroy?.();
    },
  };
};
