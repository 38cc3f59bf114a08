import type { BothTokens, HeadAt } from "../data";
import { h, redraw } from "../dom";
import { figure } from "../numbers/format";
import type { Cell } from "../parts/deepmap";
import { headPickers } from "../parts/headpickers";
import { mapControls } from "../parts/mapcontrols";
import { MapPanes } from "../parts/mappanes";
import { DifferencePicture, HeadPicture } from "../parts/pictures";
import type { State } from "../state";
import { addressOf, amiss, captionOf, comparedHead, sceneOf } from "./compared";
import {
  chosen,
  headAt,
  latest,
  lookOf,
  named,
  tokensOf,
  touches,
  type Context,
  type MakeView,
  type View,
} from "./view";

export const compareView: MakeView = (context) => new CompareView(context);

/** Two heads side by side, and how they differ; of two prompts or captures as well. */
class CompareView implements View {
  private readonly pickers = h("div", { class: "controls" });
  private readonly panes: MapPanes;
  private readonly message = h("p", { class: "empty" });
  private readonly readout = h("p", { class: "readout" });
  readonly element: HTMLElement;
  private heads: HeadPicture[] = [];
  private readonly load;
  private readonly write;

  constructor(private readonly context: Context) {
    const { store } = context;
    this.load = latest(context.fail);
    this.write = latest(context.fail);
    this.panes = new MapPanes({
      onPoint: (cell) => this.describe(cell ?? chosen(context)),
      onPick: (cell) => store.set(cell),
      onError: context.fail,
    });
    this.element = h(
      "section",
      { class: "view compare", "aria-label": "Compare" },
      this.pickers,
      mapControls(store, this.panes.lock),
      this.panes.turner,
      this.panes.element,
      this.message,
      h("div", { class: "below" }, this.readout, ...this.panes.keys),
    );
  }

  update(state: State, changed: ReadonlySet<keyof State>): void {
    if (touches(changed, "scene", "layer", "head", "other")) this.show();
    else if (touches(changed, "kind", "tone", "scale", "hide")) this.panes.recolour(lookOf(state));
    if (this.panes.shown && touches(changed, "i", "j")) this.choose();
  }

  destroy(): void {
    this.panes.destroy();
  }

  private ends(): readonly [HeadAt, HeadAt] {
    return [headAt(this.context.store.state), comparedHead(this.context)];
  }

  private show(): void {
    const { data, store, scenes } = this.context;
    this.load(async (current) => {
      const ends = this.ends();
      const pick = (at: HeadAt): void => store.set({ other: addressOf(at) });
      redraw(this.pickers, ...headPickers(scenes, ends[1], pick));
      const look = lookOf(store.state);
      const [a, b] = await Promise.all([
        HeadPicture.of(this.context, ends[0], look),
        HeadPicture.of(this.context, ends[1], look),
      ]);
      if (!current()) return;
      this.heads = [a, b];
      const alike = a.info.n_q === b.info.n_q && a.info.n_k === b.info.n_k;
      const panes = [a, b].map((picture, k) => ({
        caption: captionOf(this.context, ends[k]),
        picture,
        tokens: this.tokensOf(ends[k]),
      }));
      this.panes.show(panes, alike ? new DifferencePicture(data, ...ends, [a, b], look) : null);
      this.message.textContent = amiss(this.context, alike);
      this.choose();
    });
  }

  private tokensOf(at: HeadAt): BothTokens {
    const { data, store, scenes } = this.context;
    if (at.scene === store.state.scene) return tokensOf(this.context);
    if (!sceneOf(at, scenes)?.has_tokens) return { query: null, key: null };
    return { query: data.tokens(at.scene, "query"), key: data.tokens(at.scene, "key") };
  }

  private choose(): void {
    const cell = chosen(this.context);
    this.panes.choose(cell);
    this.describe(cell);
  }

  private describe(cell: Cell): void {
    this.write(async (current) => {
      const [one, other] = this.ends();
      const [query, key, a, b] = await Promise.all([
        named(this.context, "query", cell.i),
        named(this.context, "key", cell.j),
        this.weight(one, cell),
        this.weight(other, cell),
      ]);
      if (!current()) return;
      const sinks = this.heads.map((picture) => picture.sinks[cell.i]);
      this.readout.replaceChildren(
        `query ${query} → key ${key} `,
        h("output", {}, `${figure(a)} and ${figure(b)}`),
        ` difference ${figure((a || 0) - (b || 0))}`,
        sinks.some(Number.isFinite) ? ` · query → the learned sink ${sinks.map(figure).join(" and ")}` : "",
      );
    });
  }

  /** A head's weight of a pair, NaN where it has no such pair. */
  private async weight(at: HeadAt, { i, j }: Cell): Promise<number> {
    const { data } = this.context;
    const info = await data.map(at);
    return i < info.n_q && j < info.n_k ? data.weight(at, info, i, j) : NaN;
  }
}
