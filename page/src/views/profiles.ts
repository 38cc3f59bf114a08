import type uPlot from "uplot";

import type { Profile } from "../data";
import { h, tick } from "../dom";
import { chartsOf, summary } from "../numbers/profilecharts";
import { stairs } from "../numbers/stairs";
import { linePlot, stepsPlot } from "../parts/plots";
import type { State } from "../state";
import { headAt, latest, layerOf, touches, type Context, type MakeView, type View } from "./view";

/** Pixels of a chart from top to bottom, at least and at most. */
const TALL = [170, 260] as const;
/** Pixels from top to bottom of what stands around two rows of charts. */
const AROUND = 320;

export const profilesView: MakeView = (context) => new ProfilesView(context);

/** A head along its positions. */
class ProfilesView implements View {
  private profiles: Record<string, Profile> = {};
  private logarithmic = true;
  private plots: uPlot[] = [];
  /** The width that the charts were made for. */
  private width = 0;
  private readonly charts = h("div", { class: "charts" });
  private readonly note = h("p", { class: "note", role: "status" });
  readonly element = h(
    "section",
    { class: "view profiles", "aria-label": "Profiles" },
    h(
      "div",
      { class: "controls" },
      tick("Logarithmic distance", this.logarithmic, (on) => this.setLogarithmic(on)),
    ),
    this.note,
    this.charts,
  );
  private readonly watcher = new ResizeObserver(() => this.fit());
  private readonly load;

  constructor(private readonly context: Context) {
    this.load = latest(context.fail);
    this.watcher.observe(this.charts);
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    if (touches(changed, "scene", "layer", "head")) this.show();
    else if (changed.has("scale")) this.draw();
  }

  destroy(): void {
    this.watcher.disconnect();
    for (const one of this.plots) one.destroy();
  }

  private show(): void {
    this.note.textContent = "Summing over all pairs …";
    this.load(async (current) => {
      const profiles = await this.context.data.profiles(headAt(this.context.store.state));
      if (!current()) return;
      this.note.textContent = "";
      this.profiles = profiles;
      this.draw();
    });
  }

  private setLogarithmic(on: boolean): void {
    this.logarithmic = on;
    this.draw();
  }

  /** Draws every chart anew. */
  private draw(): void {
    for (const plot of this.plots) plot.destroy();
    const charts = chartsOf(this.profiles, layerOf(this.context).cross);
    const places = charts.map(({ profile, title }) =>
      h("div", { class: "plot", role: "img", "aria-label": summary(profile, title) }),
    );
    this.charts.replaceChildren(
      ...charts.map(({ title, help }, k) =>
        h("figure", {}, h("figcaption", {}, h("b", {}, title), h("small", {}, help)), places[k]),
      ),
    );
    // A chart is as wide as its place, which takes all of them to be there.
    this.plots = charts.map(({ profile, axis, title }, k) => {
      const plot = { place: places[k], height: this.tall(), axis };
      return profile.edges
        ? stepsPlot(plot, stairs(profile), this.logarithmic)
        : linePlot(plot, profile, title.toLowerCase());
    });
  }

  /** As tall as leaves room for two rows of charts. */
  private tall(): number {
    return Math.max(TALL[0], Math.min(TALL[1], (this.element.clientHeight - AROUND) / 2));
  }

  /** Makes the charts as wide as they now may be. */
  private fit(): void {
    if (this.charts.clientWidth === this.width) return;
    this.width = this.charts.clientWidth;
    for (const plot of this.plots) {
      const { clientWidth: width } = plot.root.parentElement as HTMLElement;
      if (width) plot.setSize({ width, height: this.tall() });
    }
  }
}
