import type { HeadRow, TokenRow } from "../data";
import { h, tick } from "../dom";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, printable } from "../numbers/format";
import { tokenChooser } from "../parts/chooser";
import { kindsOf } from "../parts/headgrid";
import { rowBars, shadedText } from "../parts/tokenrow";
import { chosenQuery, headAt, headName, latest, layerOf, scaleName, tokensOf, touches, type MakeView } from "./view";

const NEAR = 300;

/** So many layers, and heads of each, leave room in a cell. */
const ROOMY = 6;

/** Pairs in all heads up to which kinds are measured without being asked for. */
const LONG = 2 ** 33;

/** Where one token looks, in every head at once. */
export const tokenView: MakeView = (context) => {
  const { data, store, scene } = context;
  const controls = h("div", { class: "controls" });
  const matrix = h("div", { class: "by-head", role: "group", "aria-label": "Layers and heads" });
  const heading = h("h2", {});
  const [below, bars] = [h("h2", {}), h("div", {})];
  const text = h("div", { class: "overlay-text", tabindex: 0, role: "region", "aria-label": "The text" });
  const element = h(
    "section",
    { class: "view one-token", "aria-label": "One token" },
    controls,
    h("div", { class: "token-main" }, matrix, h("aside", {}, heading, text, below, bars)),
  );
  /** Whether cells have room for more than the key that is looked at most. */
  const roomy = scene.layers.length <= ROOMY && Math.max(...scene.layers.map(({ heads }) => heads)) <= ROOMY;
  let alone = false;
  let rows: TokenRow[] = [];
  let kinds: HeadRow[] = [];
  let word: (j: number) => string = count;
  let keys: string[] | null = null;

  function cell(row: TokenRow): HTMLElement {
    const name = headName(scene, row.layer, row.head);
    const scale = SCALES[scaleName(store.state)];
    const mine = kinds.find(({ layer, head }) => layer === row.layer && head === row.head);
    const all = row.keys.map((j, k) => `${count(j)} ${word(j)} ${row.weights[k].toFixed(2)}`).join(", ");
    const colour = ramp(scale, toned(row.weights[0] ?? 0, 1, store.state.tone));
    const current = store.state.layer === row.layer && store.state.head === row.head;
    const button = h(
      "button",
      {
        type: "button",
        class: current ? "cell current" : "cell",
        "aria-pressed": String(current),
        title: `${name}: ${all || "sees no key"}${mine?.kinds.length ? `\n${kindsOf(mine)}` : ""}`,
        click: () => store.set({ layer: row.layer, head: row.head }),
      },
      h("span", { class: "word" }, row.keys.length ? word(row.keys[0]) : "–"),
      h("small", {}, row.keys.length ? `${count(row.keys[0])} · ${row.weights[0].toFixed(2)}` : ""),
      ...(roomy
        ? row.keys.slice(1).map((j, k) => h("span", { class: "more" }, `${word(j)} ${row.weights[k + 1].toFixed(2)}`))
        : []),
    );
    button.style.background = css(colour);
    button.style.color = readableOn(colour) === "#101010" ? "#000" : "#fff"; // small text asks for the most contrast
    return button;
  }

  function draw(): void {
    const most = Math.max(...scene.layers.map(({ heads }) => heads));
    matrix.style.setProperty("--heads", String(most));
    const active = matrix.contains(document.activeElement)
      ? [...matrix.querySelectorAll("button")].indexOf(document.activeElement as HTMLButtonElement)
      : -1;
    matrix.replaceChildren(
      h("span", { class: "which" }),
      ...Array.from({ length: most }, (_, k) => h("span", { class: "which" }, `H${scene.layers[0].numbers[k] ?? k}`)),
      ...scene.layers.flatMap(({ number, heads }, l) => [
        h("span", { class: "which" }, `L${number}`),
        ...rows.filter(({ layer }) => layer === l).map(cell),
        ...Array.from({ length: most - heads }, () => h("span", {})),
      ]),
    );
    if (active >= 0) matrix.querySelectorAll<HTMLElement>("button")[active]?.focus();
  }

  /** The largest weight that any head has on each key, of those that are told. */
  function together(n: number): Float32Array {
    const out = new Float32Array(n);
    for (const { keys: at, weights } of rows) at.forEach((j, k) => (out[j] = Math.max(out[j], weights[k])));
    return out;
  }

  const write = latest(context.fail);
  const showText = (): void =>
    write(async (current) => {
      const layer = layerOf(context);
      const i = chosenQuery(store.state, layer);
      const at = headAt(store.state);
      const [own, norms] = await Promise.all([data.row(at, i), data.norms(at)]);
      if (!current()) return;
      const row = alone ? own : together(layer.n_k);
      below.textContent = `${headName(scene, at.layer, at.head)} looks most at`;
      bars.replaceChildren(rowBars(context, own, keys, norms));
      const most = row.reduce((best, w, j) => (w > row[best] ? j : best), 0);
      heading.textContent = alone ? `Where ${headName(scene, at.layer, at.head)} looks` : "Where any head looks";
      const shown = shadedText(context, row, keys, layer.cross ? null : i, most);
      for (const span of shown.querySelectorAll<HTMLElement>("[data-token]")) {
        const j = Number(span.dataset.token);
        const by = rows.filter(({ keys: looked }) => looked.includes(j));
        if (by.length)
          span.title += `\n${by.map((one) => `${headName(scene, one.layer, one.head)} ${one.weights[one.keys.indexOf(j)].toFixed(2)}`).join(", ")}`;
      }
      text.replaceChildren(shown);
    });

  text.addEventListener("click", (event) => {
    const token = (event.target as HTMLElement).closest("[data-token]")?.getAttribute("data-token");
    if (token && Number(token) < layerOf(context).n_q && !layerOf(context).cross) store.set({ i: Number(token) });
  });

  function drawControls(): void {
    const layer = layerOf(context);
    const active = controls.contains(document.activeElement) ? document.activeElement?.getAttribute("title") : null;
    controls.replaceChildren(
      tokenChooser(context, "Token", "query", chosenQuery(store.state, layer), layer.n_q, (to) => store.set({ i: to })),
      tick("Only the chosen head in the text", alone, (on) => {
        alone = on;
        showText();
      }),
    );
    if (active) controls.querySelector<HTMLElement>(`[title="${active}"]`)?.focus();
  }

  const load = latest(context.fail);
  const show = (): void => {
    drawControls();
    load(async (current) => {
      const layer = layerOf(context);
      const i = chosenQuery(store.state, layer);
      const found = await data.token(store.state.scene, i);
      const tokens = tokensOf(context).key;
      const looked = new Set(found.flatMap((row) => row.keys));
      await Promise.all([...looked].map((j) => tokens?.load(Math.max(0, j - NEAR), Math.min(layer.n_k, j + NEAR))));
      if (!current()) return;
      rows = found;
      word = (j) => (tokens ? printable(tokens.at(j) ?? "") : count(j));
      keys = tokens && Array.from({ length: layer.n_k }, (_, t) => tokens.at(t) ?? "");
      draw();
      showText();
    });
  };

  const measure = latest(context.fail);
  const tell = (): void => {
    const pairs = scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);
    if (data.source.kind !== "file" && pairs > LONG && !data.measured.has(store.state.scene)) return;
    measure(async (current) => {
      const answer = await data.heads(store.state.scene);
      if (!current()) return;
      kinds = answer.rows;
      if (rows.length) draw();
    });
  };

  return {
    element,
    update(_, changed) {
      if (changed.has("scene")) tell();
      if (touches(changed, "scene", "i")) show();
      else if (touches(changed, "layer", "head", "scale", "tone")) {
        draw();
        showText();
      }
    },
  };
};
