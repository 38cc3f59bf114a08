import { h } from "../dom";
import { expectedAt } from "../parts/expected";
import { areMeasured, sayings } from "../parts/findings";
import { headGrid } from "../parts/headgrid";
import { nameOf } from "../parts/sentences";
import { withTerms } from "../parts/terms";
import { rowBars, rowTokens, shadedText } from "../parts/tokenrow";
import { withLine } from "../parts/wordline";
import type { State } from "../state";
import { mapPane } from "./map";
import { chosen, headAt, latest, scaleName, touches, type Context, type MakeView } from "./view";

/** So long the row waits for what is said of all heads, to come with it. */
const SOON_MS = 500;

/** Resolves once something is there or failed, or takes too long to wait for. */
const soon = (asked: Promise<unknown>): Promise<unknown> =>
  Promise.race([asked.catch(() => {}), new Promise((done) => setTimeout(done, SOON_MS))]);

/** Ways to what one asks next of a head. */
function onward({ store, scene }: Context): HTMLElement {
  const way = (text: string, view: State["view"]): HTMLElement =>
    h("button", { type: "button", class: "link", click: () => store.set({ view }) }, text);
  const earlier = store.state.layer > 0 && !scene.layers[store.state.layer].cross;
  return h(
    "p",
    { class: "help onward" },
    way("Does this head matter?", "ablation"),
    earlier && " · ",
    earlier && way("Which earlier heads feed it?", "token"),
  );
}

/** A finding to begin with: heads, one head's map, and where one token looks. */
export const overviewView: MakeView = (context) => {
  const { data, store, scene, words } = context;
  const grid = headGrid(context);
  const map = mapPane(context, null);
  const said = h("p", { class: "finding" });
  const row = h("aside", { class: "token-row", "aria-label": "Where the chosen token looks", tabindex: 0 });
  const left = { class: "left", tabindex: 0, role: "region", "aria-label": "Heads" };
  const element = h(
    "section",
    { class: "view overview", "aria-label": "Overview" },
    said,
    h(
      "div",
      { class: "three" },
      h("div", left, h("h2", {}, "Every head"), grid.element),
      h("div", { class: "middle" }, map.element),
      row,
    ),
  );
  const write = latest(context.fail);
  const describe = (): void =>
    write(async (current) => {
      const at = headAt(store.state);
      const { i, j } = chosen(context);
      const [weights, norms] = await Promise.all([data.row(at, i), data.norms(at)]);
      const tokens = await rowTokens(context, weights, i, j);
      const telling = sayings(context, at, weights, i, tokens, scaleName(store.state));
      const next = await expectedAt(context, at.scene, i, nameOf(tokens.query, i));
      await soon(telling);
      if (!current()) return;
      const own = scene.layers[at.layer].cross ? null : i;
      const shaded = shadedText(context, weights, tokens.key, own, j);
      if (scene.kind === "words") withLine(shaded.firstElementChild as HTMLElement);
      row.replaceChildren(
        h("h2", {}, `Where ${nameOf(tokens.query, i)} looks`),
        shaded,
        rowBars(context, weights, tokens.key, norms),
        onward(context),
        ...next,
        h("p", { class: "help" }, scene.note, tokens.key?.[0] === "⊢" ? `. ${words.beginning}` : ""),
      );
      const text = await telling;
      if (current()) said.replaceChildren(...text.flatMap((one) => [...withTerms(one, words), " "]));
    });

  const load = latest(context.fail);
  const measure = (): void => {
    if (!areMeasured(context)) return;
    load(async (current) => {
      const { rows } = await data.heads(store.state.scene);
      if (!current()) return;
      grid.tell(rows);
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
