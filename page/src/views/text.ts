import type { HeadAt } from "../data";
import { choice, h, tick } from "../dom";
import { count, printable, shortened } from "../numbers/format";
import { sinkShare } from "../numbers/sinks";
import { byWords, wordOf, wordStarts } from "../numbers/words";
import { Choosing } from "../parts/choosing";
import { largestHere, shadeKey } from "../parts/legend";
import { hideTick, toneChoice } from "../parts/mapcontrols";
import { takenOf } from "../parts/moved";
import { SearchBox } from "../parts/searchbox";
import { ShadedLines } from "../parts/shadedlines";
import { fitting, headsList, LISTED, listOf } from "../parts/textlists";
import type { State } from "../state";
import { spanWeights } from "./spans";
import {
  chosen,
  headAt,
  latest,
  layerOf,
  named,
  sameTokens,
  scaleName,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

/** Lines up to which what is listed stands below the text, not beside. */
const SHORT = 8;
const NOTHING = new Float32Array(0);

export const textView: MakeView = (context) => new TextView(context);

type Axis = "query" | "key";

/** The text, shaded by what a token attends to, or by what attends to it. */
class TextView implements View {
  private readonly lines: ShadedLines;
  private readonly choosing: Choosing;
  private readonly list = h("div", {});
  // Other heads, and the other direction: shown where there is room.
  private readonly back = h("div", { class: "back" });
  private readonly aside = h("aside", {}, this.list, this.back);
  private readonly controls = h("div", { class: "controls" });
  private readonly key = h("div", {});
  private drawKey = (): void => {};
  private readonly main: HTMLElement;
  readonly element: HTMLElement;
  private readonly hiding;
  private readonly search;
  private readonly loadText;
  private readonly loadWeights;
  /** The tokens that are shaded. */
  private tokens: string[] = [];
  /** Where their words begin, and their end. */
  private starts: number[] = [];

  constructor(private readonly context: Context) {
    this.hiding = hideTick(context.store);
    this.search = new SearchBox((token) => {
      this.take(token, false);
      this.lines.show(token, "center");
    });
    this.loadText = latest(context.fail);
    this.loadWeights = latest(context.fail);
    const { store } = context;
    this.lines = new ShadedLines(
      {
        scale: () => scaleName(store.state),
        tone: () => store.state.tone,
        chosen: () => (this.same ? this.range() : [this.other(), this.other() + 1]),
        nameOf: (t) => this.nameOf(t),
        pick: (t, several) => this.take(t, several),
        end: (several) => this.end(several),
      },
      () => this.main.classList.toggle("short", this.short),
    );
    this.choosing = new Choosing(context, (t, several) => this.pick(t, several));
    this.main = h("div", { class: "text-main" }, this.lines.element, this.lines.strip, this.aside);
    const label = { class: "view text", "aria-label": "Text" };
    this.element = h("section", label, this.controls, this.choosing.element, this.main);
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    if (touches(changed, "by", "tone", "scene", "words", "layer")) this.drawControls();
    this.hiding.querySelector("input")!.checked = this.context.store.state.hide;
    const { n_q, n_k } = layerOf(this.context);
    const other = this.tokens.length !== (this.axis === "key" ? n_k : n_q);
    if (changed.has("scene") || (changed.has("by") && !this.same) || other) this.showText();
    else if (touches(changed, "layer", "head", "i", "j", "by", "hide", "words", "span")) this.showWeights(false);
    else if (changed.has("near")) this.showWeights(false);
    else this.lines.redraw();
    if (touches(changed, "scale", "tone")) this.drawKey();
  }

  destroy(): void {
    this.lines.destroy();
  }

  /** Weights fall on keys where the chosen token is a query, and on queries where it is a key. */
  private get axis(): Axis {
    return this.context.store.state.by ? "query" : "key";
  }

  /** The axis that a token is chosen on. */
  private get chosenAxis(): Axis {
    return this.context.store.state.by ? "key" : "query";
  }

  /** The index of the state on the axis that is shaded. */
  private get shaded(): "i" | "j" {
    return this.context.store.state.by ? "i" : "j";
  }

  /** Whether what is chosen and what is shaded are the same tokens. */
  private get same(): boolean {
    return sameTokens(layerOf(this.context));
  }

  private get short(): boolean {
    return this.lines.lines.length <= SHORT;
  }

  private get grouped(): boolean {
    return this.context.store.state.words && this.context.scene.has_tokens;
  }

  /** The chosen token. */
  private picked(): number {
    const { i, j } = chosen(this.context);
    return this.context.store.state.by ? j : i;
  }

  /** The token that was chosen of the shaded text, where that is another one; −1: none was. */
  private other(): number {
    return this.context.store.state[this.shaded];
  }

  /** Where arrow keys in the shaded text go on from. */
  private end(several: boolean): number {
    if (!this.same) return Math.max(0, this.other());
    const { span } = this.context.store.state;
    return several && span >= 0 ? span : this.picked();
  }

  /** A token of the shaded text is chosen. */
  private take(token: number, several: boolean): void {
    if (this.same) this.pick(token, several);
    else this.context.store.set({ [this.shaded]: token });
  }

  private pick(token: number, several: boolean): void {
    const { store } = this.context;
    if (several) store.set({ span: token });
    else store.set({ ...(store.state.by ? { j: token } : { i: token }), span: -1 });
  }

  /** The tokens that are chosen, [from, to): one, several, or the words that those are in. */
  private range(): [number, number] {
    const token = this.picked();
    const { by, span } = this.context.store.state;
    const { n_q, n_k } = layerOf(this.context);
    const end = span < 0 ? token : Math.min(span, (by ? n_k : n_q) - 1);
    const [from, to] = [Math.min(token, end), Math.max(token, end) + 1];
    const { starts } = this;
    return this.grouped && this.same && starts.length > 1
      ? [wordOf(starts, from)[0], wordOf(starts, to - 1)[1]]
      : [from, to];
  }

  private nameOf(t: number): string {
    return this.context.scene.has_tokens ? `${count(t)} “${shortened(printable(this.tokens[t] ?? ""))}”` : count(t);
  }

  private showText(): void {
    this.loadText(async (current) => {
      const { context, axis } = this;
      const { n_q, n_k } = layerOf(context);
      const n = axis === "key" ? n_k : n_q;
      const here = tokensOf(context)[axis];
      await here?.load(0, n);
      if (!current()) return;
      this.tokens = Array.from({ length: n }, (_, t) => here?.at(t) ?? `${t} `);
      this.starts = wordStarts(this.tokens);
      const name = this.same ? "Tokens of the text" : axis === "key" ? "Keys" : "Queries";
      const several = this.same ? ", with Shift several" : "";
      this.lines.element.setAttribute("aria-label", `${name}. Arrow keys choose one${several}.`);
      this.lines.element.dataset.axis = this.list.dataset.axis = axis;
      this.back.dataset.axis = this.chosenAxis;
      this.lines.setTokens(this.tokens);
      this.search.setTokens(this.context.scene.has_tokens ? this.tokens : []);
      this.showWeights(true);
    });
  }

  private showWeights(scroll: boolean): void {
    this.loadWeights(async (current) => {
      const { data, store } = this.context;
      const [at, token] = [headAt(store.state), this.picked()];
      const { by } = store.state;
      const [from, to] = this.range();
      const one = by ? data.column : data.row;
      const [answer, norms] = await Promise.all([
        to - from > 1 ? spanWeights(data, at, [from, to], this.tokens.length, by) : one.call(data, at, from),
        by ? NOTHING : data.norms(at),
        this.showChoosing(),
      ]);
      if (!current() || answer.length !== this.tokens.length) return;
      const moved = takenOf(answer, norms);
      const taken = this.grouped && moved.length ? byWords(moved, this.starts, "sum") : moved;
      const weights = this.grouped ? byWords(answer, this.starts, by ? "mean" : "sum") : answer;
      const hidden = store.state.hide && !by;
      const top = weights.reduce((most, w, t) => (w > most && !(hidden && t === 0) ? w : most), 0) || 1;
      this.lines.shade(weights, top);
      const sink = this.sinkOf(answer, by);
      this.drawKey = () => this.key.replaceChildren(shadeKey(store.state, top, largestHere(sink)));
      this.drawKey();
      await this.describe(weights, taken, sink, current);
      if (this.short) await this.showBack(at, token, current);
      if (scroll) this.lines.show(token, "auto");
    });
  }

  /** The text in which a token is chosen, where the shaded one is another. */
  private async showChoosing(): Promise<void> {
    this.choosing.element.hidden = this.same;
    const { n_q, n_k } = layerOf(this.context);
    const axis = this.chosenAxis;
    if (!this.same) await this.choosing.show(axis, axis === "query" ? n_q : n_k, this.range());
  }

  private async describe(
    weights: Float32Array,
    taken: Float32Array,
    sink: number | null,
    current: () => boolean,
  ): Promise<void> {
    const { context, starts, tokens } = this;
    const { by } = context.store.state;
    const of = this.range();
    const joined = (from: number, to: number): string =>
      tokens
        .slice(from, Math.min(to, from + 80))
        .map(printable)
        .join("");
    const said = this.same && context.scene.has_tokens ? ` “${shortened(joined(...of))}”` : "";
    const several = `${count(of[0])} to ${count(of[1] - 1)}${said}`;
    const name = of[1] - of[0] > 1 ? several : await named(context, this.chosenAxis, of[0]);
    if (!current()) return;
    const listing = {
      heading: by ? `What attends to ${name}` : `What ${name} attends to`,
      weights,
      taken,
      tokens,
      starts: this.grouped ? starts : undefined,
      of,
      by,
      sink,
      most: this.short ? fitting(this.aside.clientHeight) : LISTED,
      act: (t: number) => this.lines.show(t, "center"),
    };
    this.list.replaceChildren(...listOf(context, listing));
  }

  /** The direction that is not shaded, and what the chosen token looks at in other heads. */
  private async showBack(at: HeadAt, token: number, current: () => boolean): Promise<void> {
    const { data, store } = this.context;
    const { by } = store.state;
    this.back.replaceChildren();
    if (this.grouped || store.state.span >= 0) return;
    // Of another text, what was chosen there is looked back from.
    const from = this.same ? token : this.other();
    const backwards = by ? data.row : data.column;
    const [others, heads] = await Promise.all([
      from < 0 ? null : backwards.call(data, at, from),
      by ? [] : data.token(at.scene, token),
    ]);
    const back = others ? await this.backwards(others, from) : [];
    const name = await named(this.context, this.chosenAxis, token);
    if (!current()) return;
    const room = fitting(this.aside.clientHeight) - 1 - (others ? LISTED / 2 : 0);
    const heading = `What ${name} attends to most in each head`;
    this.back.replaceChildren(...back, ...headsList(this.context, heads, heading, token, this.tokens, room));
  }

  /** What a row of weights leaves to the learned sink; null for a column, and where there is none. */
  private sinkOf(weights: Float32Array, by: boolean): number | null {
    return by ? null : sinkShare(layerOf(this.context), weights);
  }

  /** The list of the direction that is not shaded, for a token of the shaded text. */
  private async backwards(weights: Float32Array, token: number): Promise<HTMLElement[]> {
    const { context } = this;
    const { by } = context.store.state;
    const name = await named(context, this.axis, token);
    const tokens = tokensOf(context)[this.chosenAxis];
    await tokens?.load(0, weights.length);
    const listing = {
      heading: by ? `What ${name} attends to` : `What attends to ${name}`,
      weights,
      taken: NOTHING,
      tokens: Array.from(weights, (_, t) => tokens?.at(t) ?? `${t}`),
      of: [token, token + 1] as const,
      by: !by,
      sink: this.sinkOf(weights, !by),
      most: by ? LISTED : LISTED / 2,
      act: (t: number) => this.pick(t, false),
    };
    return listOf(context, listing);
  }

  private drawControls(): void {
    const { store, scene } = this.context;
    const turn = (to: string): void => {
      const by = to === "true";
      // In one text the chosen tokens stay; of two, each has its own.
      store.set(this.same ? { by, [by ? "j" : "i"]: this.picked(), span: store.state.span } : { by, span: -1 });
    };
    const ways = [
      ["false", "what the chosen token attends to"],
      ["true", "what attends to the chosen token"],
    ] as const;
    const summed = "Tokens of a word together: the sum of the weights on its keys, the mean of those of its queries.";
    const words = tick("Words", store.state.words, (on) => store.set({ words: on }), summed);
    this.controls.replaceChildren(
      choice("Shade", ways, String(store.state.by), turn),
      toneChoice(store),
      ...(scene.has_tokens ? [words, this.search.element] : []),
      ...(store.state.by ? [] : [this.hiding]),
      h(
        "p",
        { class: "help" },
        "Click a token to choose it; with Shift, several: their mean as queries, their sum as keys.",
      ),
      this.key,
    );
  }
}
