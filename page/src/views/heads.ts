import type { Column, HeadRow, Heads, Scene } from "../data";
import { breakable, choice, h, redraw } from "../dom";
import { figure } from "../numbers/format";
import { keepEven } from "../parts/evenrows";
import { areMeasured, pairsOf } from "../parts/findings";
import { headCard, highest, type Sorted } from "../parts/headcard";
import { kindList } from "../parts/kindlist";
import { shadeKey } from "../parts/legend";
import { headPixels, sinkFirst, thumb } from "../parts/thumb";
import type { State } from "../state";
import { latest, scaleName, touches, type Context, type MakeView, type View } from "./view";

/** So many heads have room to be drawn larger. */
const FEW = 16;

/** A name that says no more than its layer's number does, unless there are several stacks of layers. */
const NUMBERED = /(^|\.)(layers?|h|blocks?)[ .]\d+(\.|$)/;

/** Every head of every layer, small; sorted and filtered by what was measured. */
export const headsView: MakeView = (context) => new HeadsView(context);

class HeadsView implements View {
  private readonly grid = h("div", { class: "cards" });
  private readonly controls = h("div", { class: "controls" });
  private readonly note = h("p", { class: "note", role: "status" });
  private readonly aside = h("aside", {
    class: "kinds",
    "aria-label": "The strongest heads of each kind",
    hidden: true,
  });
  private readonly estimates = h(
    "p",
    { class: "note", hidden: true },
    "≈ A picture of a long head is an estimate from some of its queries, until the maps of its layer have been computed; maps are exact.",
  );
  private readonly main = h(
    "div",
    { class: "heads-main", tabindex: 0, role: "region", "aria-label": "All heads" },
    this.grid,
    this.aside,
  );
  readonly element = h(
    "section",
    { class: "view heads", "aria-label": "Heads" },
    this.controls,
    this.note,
    this.estimates,
    this.main,
  );
  private heads: Heads;
  private readonly wanted = new IntersectionObserver((entries) => this.fill(entries), { rootMargin: "300px" });
  private readonly even = keepEven(this.main, ".layer .row, .cards:not(.by-layer)");
  private readonly load: ReturnType<typeof latest>;

  constructor(private readonly context: Context) {
    this.heads = { columns: [], rows: unmeasured(context.scene) };
    this.load = latest(context.fail);
    this.main.style.setProperty("--most", String(Math.max(...context.scene.layers.map((layer) => layer.heads))));
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    if (changed.has("scene")) this.show();
    else if (touches(changed, "sort", "filter", "scale", "tone")) {
      this.drawControls();
      this.draw();
    } else if (touches(changed, "least", "layer", "head")) this.draw();
  }

  destroy(): void {
    this.wanted.disconnect();
    this.even.end();
  }

  /** The column that heads are sorted by, null where they are in their own order. */
  private get column(): Column | null {
    return this.heads.columns.find(({ name }) => name === this.context.store.state.sort) ?? null;
  }

  /** Brings the pictures of the cards that come into view. */
  private fill(entries: IntersectionObserverEntry[]): void {
    const { store, fail } = this.context;
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      this.wanted.unobserve(target);
      const [layer, head] = (target.getAttribute("data-head") as string).split("/").map(Number);
      headPixels(this.context, layer, head, scaleName(store.state)).then((pixels) => {
        target.replaceChildren(thumb(pixels));
        if (pixels.exact) return;
        target.append(h("span", { class: "about", title: "An estimate" }, "≈"));
        this.estimates.hidden = false;
      }, fail);
    }
  }

  private card(row: HeadRow, sorted: Sorted | null): HTMLElement {
    const picture = h("div", { class: "thumb sheet", "data-head": `${row.layer}/${row.head}` });
    this.wanted.observe(picture);
    return headCard(this.context, row, picture, sorted);
  }

  private draw(): void {
    const { grid, column, heads } = this;
    const { state } = this.context.store;
    const rows = shown(heads.rows, state, column);
    this.wanted.disconnect();
    const ordered = !column && state.filter === "all";
    grid.classList.toggle("by-layer", ordered);
    this.main.classList.toggle("few", heads.rows.length <= FEW);
    const sorted = column && { column, high: highest(column, heads.rows) };
    if (ordered) grid.replaceChildren(...this.byLayer(rows));
    else grid.replaceChildren(...rows.map((row) => this.card(row, sorted)));
    this.even.set();
    if (!rows.length)
      grid.replaceChildren(h("p", { class: "empty" }, "No head is like this. Choose another kind or a lower score."));
  }

  private byLayer(rows: readonly HeadRow[]): HTMLElement[] {
    const { layers } = this.context.scene;
    const stacks = new Set(layers.map(({ name }) => name.replace(/\d+/g, ""))).size > 1;
    const told = (name: string): boolean => stacks || !NUMBERED.test(name);
    return layers.map(({ name, number }, l) => {
      const title = `Layer ${number}`;
      const mine = rows.filter(({ layer }) => layer === l).map((row) => this.card(row, null));
      return h(
        "div",
        { class: "layer", role: "group", "aria-label": title },
        h("h2", { title: name }, title, told(name) && h("small", {}, ...breakable(name))),
        h("div", { class: "row" }, ...mine),
      );
    });
  }

  private drawControls(): void {
    const { store, words, scene } = this.context;
    const { heads, column } = this;
    const { sort, filter } = store.state;
    const kinds = [...new Set(heads.rows.flatMap(kindNames))].sort();
    const columns = heads.columns.map(({ name, label }) => [name, label] as const);
    const names = kinds.map((kind) => [kind, kind === "none" ? "no notable kind" : kind] as const);
    const kind = words.kinds.find(({ name }) => name === filter);
    redraw(
      this.controls,
      choice("Sort by", [["place", "layer and head"], ...columns], sort, (name) =>
        store.set({ sort: name, least: heads.columns.find((one) => one.name === name)?.low ?? 0 }),
      ),
      choice("Kind", [["all", "all kinds"], ...names], filter, (name) => store.set({ filter: name })),
      ...(column ? this.threshold(column) : []),
      kind && h("p", { class: "help" }, `${kind.definition} Score: ${kind.meaning}.`),
      !kind && !column && h("p", { class: "help" }, `A kind is named with its score; ${words.tentative}.`),
      legend(store.state, scene),
    );
  }

  /** The least score that is shown, and what the score is. */
  private threshold(column: Column): HTMLElement[] {
    const { store } = this.context;
    const high = highest(column, this.heads.rows);
    const shown = h("output", {}, figure(store.state.least));
    const slider = h("input", {
      type: "range",
      "data-focus": "least",
      min: column.low,
      max: high,
      step: (high - column.low) / 100 || 0.01,
      value: store.state.least,
      input: () => {
        shown.textContent = figure(Number(slider.value));
        store.set({ least: Number(slider.value) });
      },
    });
    return [
      h("label", { class: "field" }, h("span", {}, "At least"), slider, shown),
      h("p", { class: "help" }, column.help),
    ];
  }

  /** Measures the heads; where that takes long, once it is asked for. */
  private show(): void {
    const { data, store, scene } = this.context;
    this.drawControls();
    this.draw();
    if (!areMeasured(this.context)) {
      const measure = (): void => {
        data.measured.add(store.state.scene);
        this.show();
      };
      this.note.replaceChildren(
        `Scores and kinds take a pass over all ${(pairsOf(scene) / 1e9).toFixed(0)} billion pairs. `,
        h("button", { type: "button", click: measure }, "Measure the heads"),
      );
      return;
    }
    this.note.textContent = "Measuring the heads …";
    this.load(async (current) => {
      const answer = await data.heads(store.state.scene);
      if (!current()) return;
      this.heads = answer;
      this.note.textContent = "";
      this.drawControls();
      this.aside.hidden = !answer.columns.length;
      this.aside.replaceChildren(...kindList(this.context, answer));
      this.draw();
    });
  }
}

/** The heads of a scene before they are measured. */
const unmeasured = (scene: Scene): HeadRow[] =>
  scene.layers.flatMap((layer, l) =>
    Array.from({ length: layer.heads }, (_, head) => ({
      layer: l,
      head,
      kv_head: head,
      kind: null,
      kinds: [],
      scores: {},
    })),
  );

/** The kinds that a head is found under. */
const kindNames = (row: HeadRow): string[] => (row.kinds.length ? row.kinds.map(({ kind }) => kind) : ["none"]);

/** The heads of a kind with a score as asked for, in the order of the scores. */
function shown(rows: readonly HeadRow[], { filter, least }: State, column: Column | null): HeadRow[] {
  const mine = rows.filter((row) => filter === "all" || kindNames(row).includes(filter));
  if (!column) return mine;
  const score = (row: HeadRow): number => row.scores[column.name] ?? -Infinity;
  return mine.filter((row) => least <= column.low || score(row) >= least).sort((a, b) => score(b) - score(a));
}

/** What the colours and the axes of the pictures are. */
const legend = (state: State, scene: Scene): HTMLElement =>
  h("div", { class: "heads-legend" }, `query ↓ key →${sinkFirst(scene)}`, shadeKey(state, 1, " in every head"));
