import { h, pointing } from "../dom";
import { arcsIn, leastOf, shownFrom, USUAL, windowOf, type Block } from "../numbers/arcs";
import { css, ramp, SCALES, toned } from "../numbers/colour";
import { count, printable } from "../numbers/format";
import { inside } from "../numbers/windows";
import { powerSlider } from "../parts/powerslider";
import { drawArcs, inColumns, type TokenRow } from "../parts/arcdrawing";
import { hideTick, toneChoice } from "../parts/mapcontrols";
import type { State } from "../state";
import {
  chosenQuery,
  headAt,
  keyOf,
  latest,
  layerOf,
  sameTokens,
  scaleName,
  sinksOf,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

/** Where on the scale of colours arcs begin, that none is as light as the paper. */
const FAINTEST = 0.2;

/** Pixels beside and below the arcs. */
const MARGIN = 16;

export const arcsView: MakeView = (context) => new Arcs(context);

/** Up to 64 tokens, or queries and keys, with an arc for every weight that is seen. */
class Arcs implements View {
  private readonly controls = h("div", { class: "controls" });
  private readonly caption = h("p", { class: "note" });
  private readonly place = h("div", {
    class: "arcs-scroll sheet",
    tabindex: 0,
    role: "group",
    "aria-label": "Arcs from queries to keys",
  });
  readonly element = h(
    "section",
    { class: "view arcs", "aria-label": "Arcs" },
    this.controls,
    this.caption,
    this.place,
  );
  private readonly hiding;
  private readonly load;
  /** The weight from which arcs are drawn, and whether the reader chose it. */
  private least = USUAL;
  private set = false;

  constructor(private readonly context: Context) {
    this.load = latest(context.fail);
    this.hiding = hideTick(context.store);
    this.drawControls();
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    this.hiding.querySelector("input")!.checked = this.context.store.state.hide;
    if (touches(changed, "scene", "layer", "head", "i", "j", "by", "tone", "scale", "hide")) this.show();
  }

  /** The chosen query, and the key that is chosen, or that stands where the query does. */
  private ends(): { i: number; j: number } {
    const { state } = this.context.store;
    const layer = layerOf(this.context);
    const i = chosenQuery(state, layer);
    if (sameTokens(layer)) return { i, j: i };
    const across = layer.n_q > 1 ? Math.round((i * (layer.n_k - 1)) / (layer.n_q - 1)) : layer.n_k - 1;
    return { i, j: state.j < 0 ? (keyOf(layer, i) ?? across) : Math.min(state.j, layer.n_k - 1) };
  }

  private show(): void {
    this.load(async (current) => {
      const { data, store } = this.context;
      const layer = layerOf(this.context);
      const at = headAt(store.state);
      const { i, j } = this.ends();
      const [r, c] = [windowOf(layer.n_q, i), windowOf(layer.n_k, j)];
      const { query, key } = tokensOf(this.context);
      const [weights, sinks] = await Promise.all([
        data.values(at, r.start, r.stop, c.start, c.stop),
        sinksOf(this.context, at),
        query?.load(r.start, r.stop),
        key?.load(c.start, c.stop),
      ]);
      if (!current()) return;
      const [rows, cols] = [r.stop - r.start, c.stop - c.start];
      this.draw({ weights, rows, cols, r0: r.start, c0: c.start, sinks });
    });
  }

  private draw(block: Block): void {
    const { store } = this.context;
    const layer = layerOf(this.context);
    const same = sameTokens(layer);
    const arcs = arcsIn(block, same, store.state.hide);
    const usual = this.set ? this.least : leastOf(arcs);
    if (usual !== this.least) {
      this.least = usual;
      this.drawControls();
    }
    const shown = shownFrom(arcs, this.least);
    const scale = SCALES[scaleName(store.state)];
    const { by, i, j, tone } = store.state;
    const queries = this.row("query", block.r0, block.rows);
    const rows = same ? ([queries] as const) : ([queries, this.row("key", block.c0, block.cols)] as const);
    const sink = block.sinks.length > 0 && !store.state.hide;
    const ends = inColumns({ rows, sink }) ? "Queries left, keys right. " : "Queries above, keys below. ";
    this.describe(block, same ? "" : ends, shown.length === 0);
    this.place.replaceChildren(
      drawArcs({
        arcs: shown,
        rows,
        sink,
        picking: !same && by && j >= 0 ? "key" : i >= 0 ? "query" : null,
        colour: (weight) => css(ramp(scale, Math.max(FAINTEST, toned(weight, 1, tone)))),
        width: this.place.clientWidth,
        height: this.place.clientHeight - MARGIN,
      }),
    );
  }

  private row(axis: TokenRow["axis"], start: number, n: number): TokenRow {
    const { store } = this.context;
    const tokens = tokensOf(this.context)[axis];
    const word = (t: number): string => {
      const token = tokens?.at(t);
      return token === undefined ? count(t) : printable(token);
    };
    const same = sameTokens(layerOf(this.context));
    const { i, j } = this.ends();
    return {
      axis,
      start,
      words: Array.from({ length: n }, (_, k) => word(start + k)),
      chosen: axis === "query" ? i : store.state.j < 0 ? -1 : j,
      pick: (token) =>
        store.set(axis === "key" ? { j: token, by: true } : same ? { i: token } : { i: token, by: false }),
    };
  }

  /** Says which tokens are shown where that is not all of them, and goes to others. */
  private describe({ r0, rows, c0, cols }: Block, ends: string, empty: boolean): void {
    const { n_q, n_k } = layerOf(this.context);
    const same = sameTokens(layerOf(this.context));
    this.caption.replaceChildren(
      ends,
      ...(rows < n_q ? this.turning(same ? "Tokens" : "Queries", "i", r0, rows, n_q) : []),
      ...(!same && cols < n_k ? this.turning("Keys", "j", c0, cols, n_k) : []),
      empty ? " No weight is as large as this: move the slider to the left." : "",
    );
  }

  private turning(what: string, axis: "i" | "j", start: number, shown: number, n: number): (HTMLElement | string)[] {
    const middle = start + (shown >> 1);
    const move = (by: number, text: string): HTMLElement => {
      const go = (): void => this.context.store.set({ [axis]: inside(middle + by, n) });
      return h("button", { type: "button", click: go }, text);
    };
    const name = ` ${what} ${count(start)} to ${count(start + shown - 1)} `;
    return [move(-shown, "‹ before"), name, move(shown, "after ›"), " "];
  }

  private drawControls(): void {
    const slider = powerSlider("Weights from", [-5, 0, 0.02], this.least, (least) => {
      [this.least, this.set] = [least, true];
      this.show();
    });
    this.controls.replaceChildren(
      slider,
      toneChoice(this.context.store),
      this.hiding,
      h("p", { class: "help" }, `${pointing()} a token to see its arcs alone.`),
    );
  }
}
