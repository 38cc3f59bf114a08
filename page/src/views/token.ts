import type { HeadRow, TokenRow } from "../data";
import { h, reveal, tick } from "../dom";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, printable, weightText } from "../numbers/format";
import { leavesAside, split } from "../parts/aside";
import { tokenChooser } from "../parts/chooser";
import { earlierHeads, readAt } from "../parts/earlier";
import { kindsOf } from "../parts/headgrid";
import { shadeKey } from "../parts/legend";
import { rowBars, shadedText } from "../parts/tokenrow";
import type { State } from "../state";
import {
  chosenQuery,
  headAt,
  headName,
  latest,
  layerOf,
  sameTokens,
  scaleName,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

const NEAR = 300;

/** So many layers, and heads of each, leave room in a cell, and so many keys fit then. */
const ROOMY = 6;
const IN_CELL = 3;

/** Pairs in all heads up to which kinds are measured without being asked for. */
const LONG = 2 ** 33;

export const tokenView: MakeView = (context) => new TokenView(context);

/** Where one token looks, in every head at once. */
class TokenView implements View {
  private readonly controls = h("div", { class: "controls" });
  private readonly matrix = h("div", { class: "by-head", role: "group", "aria-label": "Layers and heads" });
  private readonly heading = h("h2", {});
  private readonly below = h("h2", {});
  private readonly bars = h("div", {});
  private readonly earlier = h("section", { class: "earlier", "aria-label": "Earlier heads" });
  private readonly text = h("div", { class: "overlay-text", tabindex: 0, role: "region", "aria-label": "The text" });
  readonly element = h(
    "section",
    { class: "view one-token", "aria-label": "One token" },
    this.controls,
    h(
      "div",
      { class: "token-main" },
      this.matrix,
      h("aside", {}, this.heading, this.text, this.below, this.bars, this.earlier),
    ),
  );
  /** Heads of the layer with the most. */
  private readonly most: number;
  private alone = false;
  /** The head whose cell was brought into sight. */
  private inSight = "";
  private rows: TokenRow[] = [];
  private kinds: HeadRow[] = [];
  private keys: string[] | null = null;
  private readonly write;
  private readonly load;
  private readonly measure;
  private readonly lookBack;

  constructor(private readonly context: Context) {
    this.write = latest(context.fail);
    this.load = latest(context.fail);
    this.measure = latest(context.fail);
    this.lookBack = latest(context.fail);
    this.most = Math.max(...context.scene.layers.map(({ heads }) => heads));
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    if (changed.has("scene")) this.tell();
    if (touches(changed, "scene", "layer", "head", "i", "j")) this.showEarlier();
    if (touches(changed, "scene", "i")) this.show();
    else if (touches(changed, "layer", "head", "scale", "tone", "near")) {
      this.drawControls();
      this.draw();
      this.showText();
    }
  }

  private word(j: number): string {
    return this.keys ? printable(this.keys[j] ?? "") : count(j);
  }

  /** The keys that a cell names, of those that lists do not leave aside, with their weights. */
  private shown({ layer, keys, weights }: TokenRow): { key: number; weight: number }[] {
    const { state } = this.context.store;
    const of = this.context.scene.layers[layer];
    const i = chosenQuery(state, of);
    const leaves = state.near ? () => false : leavesAside(of, i, i + 1, false);
    const [listed] = split(keys, leaves);
    return listed.slice(0, IN_CELL).map((key) => ({ key, weight: weights[keys.indexOf(key)] }));
  }

  private cell(row: TokenRow): HTMLElement {
    const { store, scene } = this.context;
    const name = headName(scene, row.layer, row.head);
    const mine = this.kinds.find(({ layer, head }) => layer === row.layer && head === row.head);
    const all = row.keys.map((j, k) => `${count(j)} ${this.word(j)} ${weightText(row.weights[k])}`).join(", ");
    const sink = row.sink === undefined ? "" : `, the learned sink ${weightText(row.sink)}`;
    const [first, ...more] = this.shown(row);
    const colour = ramp(SCALES[scaleName(store.state)], toned(first?.weight ?? 0, 1, store.state.tone));
    const current = store.state.layer === row.layer && store.state.head === row.head;
    const roomy = scene.layers.length <= ROOMY && this.most <= ROOMY;
    const button = h(
      "button",
      {
        type: "button",
        class: current ? "cell current" : "cell",
        "aria-pressed": String(current),
        title: `${name}: ${all || "sees no key"}${sink}${mine?.kinds.length ? `\n${kindsOf(mine)}` : ""}`,
        click: () => store.set({ layer: row.layer, head: row.head }),
      },
      h("span", { class: "word", "data-token": first?.key }, first ? this.word(first.key) : "–"),
      h("small", {}, first ? `${count(first.key)} · ${weightText(first.weight)}` : ""),
      ...(roomy ? more : []).map(({ key, weight }) =>
        h("span", { class: "more", "data-token": key }, `${this.word(key)} ${weightText(weight)}`),
      ),
      row.sink !== undefined && h("span", { class: "more" }, `sink ${weightText(row.sink)}`),
    );
    button.style.background = css(colour);
    button.style.color = readableOn(colour) === "#101010" ? "#000" : "#fff"; // small text asks for the most contrast
    return button;
  }

  private draw(): void {
    const { matrix, most } = this;
    const { layers } = this.context.scene;
    matrix.style.setProperty("--heads", String(most));
    const active = matrix.contains(document.activeElement)
      ? [...matrix.querySelectorAll("button")].indexOf(document.activeElement as HTMLButtonElement)
      : -1;
    matrix.replaceChildren(
      h("span", { class: "which above" }),
      ...Array.from({ length: most }, (_, k) => h("span", { class: "which above" }, `H${layers[0].numbers[k] ?? k}`)),
      ...layers.flatMap(({ number, heads }, l) => [
        h("span", { class: "which" }, `L${number}`),
        ...this.rows.filter(({ layer }) => layer === l).map((row) => this.cell(row)),
        ...Array.from({ length: most - heads }, () => h("span", {})),
      ]),
    );
    this.showCurrent();
    if (active >= 0) matrix.querySelectorAll<HTMLElement>("button")[active]?.focus();
  }

  /** Brings the cell of another head into sight; one that is there already may be scrolled away from. */
  private showCurrent(): void {
    const { layer, head } = this.context.store.state;
    const current = this.matrix.querySelector(".cell.current");
    if (!current || this.inSight === `${layer}/${head}`) return;
    this.inSight = `${layer}/${head}`;
    reveal(this.matrix, current);
  }

  /** The largest weight that any head has on each key, of those that are told. */
  private together(n: number): Float32Array {
    const out = new Float32Array(n);
    for (const { keys, weights } of this.rows) keys.forEach((j, k) => (out[j] = Math.max(out[j], weights[k])));
    return out;
  }

  private showText(): void {
    this.write(async (current) => {
      const { data, store, scene } = this.context;
      const layer = layerOf(this.context);
      const i = chosenQuery(store.state, layer);
      const at = headAt(store.state);
      const [own, norms] = await Promise.all([data.row(at, i), data.norms(at)]);
      if (!current()) return;
      const row = this.alone ? own : this.together(layer.n_k);
      const name = headName(scene, at.layer, at.head);
      this.below.textContent = `${name} looks most at`;
      this.bars.replaceChildren(rowBars(this.context, own, this.keys, norms));
      const most = row.reduce((best, w, j) => (w > row[best] ? j : best), 0);
      this.heading.textContent = this.alone ? `Where ${name} looks` : "Where any head looks";
      const said = this.alone ? undefined : ", the largest of any head";
      const shown = shadedText(this.context, row, this.keys, i, most, said);
      this.nameLookers(shown);
      this.text.replaceChildren(shown);
    });
  }

  /** Which earlier heads wrote what the chosen head reads most, or at the chosen key. */
  private showEarlier(): void {
    this.lookBack(async (current) => {
      const { data, store } = this.context;
      const layer = layerOf(this.context);
      const i = chosenQuery(store.state, layer);
      const row = await data.row(headAt(store.state), i);
      const j = store.state.j < 0 ? readAt(row, sameTokens(layer)) : Math.min(store.state.j, layer.n_k - 1);
      const shown = await earlierHeads(this.context, i, j);
      if (current()) this.earlier.replaceChildren(...shown);
    });
  }

  /** Says at each token which heads look at it. */
  private nameLookers(shown: HTMLElement): void {
    for (const span of shown.querySelectorAll<HTMLElement>("[data-token]")) {
      const j = Number(span.dataset.token);
      const by = this.rows.filter(({ keys }) => keys.includes(j));
      const said = by.map(({ layer, head, keys, weights }) => {
        return `${headName(this.context.scene, layer, head)} ${weightText(weights[keys.indexOf(j)])}`;
      });
      if (said.length) span.title += `\n${said.join(", ")}`;
    }
  }

  private drawControls(): void {
    const { controls, context } = this;
    const layer = layerOf(context);
    const active = controls.contains(document.activeElement) ? document.activeElement?.getAttribute("title") : null;
    const set = (i: number): void => context.store.set({ i });
    controls.replaceChildren(
      tokenChooser(context, "Token", "query", chosenQuery(context.store.state, layer), layer.n_q, set),
      tick("Only the chosen head in the text", this.alone, (on) => {
        this.alone = on;
        this.showText();
      }),
      shadeKey(context.store.state, 1, " in every cell"),
    );
    if (active) controls.querySelector<HTMLElement>(`[title="${active}"]`)?.focus();
  }

  private show(): void {
    this.drawControls();
    this.load(async (current) => {
      const { data, store } = this.context;
      const layer = layerOf(this.context);
      const rows = await data.token(store.state.scene, chosenQuery(store.state, layer));
      const tokens = tokensOf(this.context).key;
      const looked = new Set(rows.flatMap((row) => row.keys));
      await Promise.all([...looked].map((j) => tokens?.load(Math.max(0, j - NEAR), Math.min(layer.n_k, j + NEAR))));
      if (!current()) return;
      this.rows = rows;
      this.keys = tokens && Array.from({ length: layer.n_k }, (_, t) => tokens.at(t) ?? "");
      this.draw();
      this.showText();
    });
  }

  private tell(): void {
    const { data, store, scene } = this.context;
    const pairs = scene.layers.reduce((sum, layer) => sum + layer.heads * layer.n_q * layer.n_k, 0);
    if (data.source.kind !== "file" && pairs > LONG && !data.measured.has(store.state.scene)) return;
    this.measure(async (current) => {
      const answer = await data.heads(store.state.scene);
      if (!current()) return;
      this.kinds = answer.rows;
      if (this.rows.length) this.draw();
    });
  }
}
