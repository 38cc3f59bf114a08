import "uplot/dist/uPlot.min.css";

import uPlot from "uplot";

import type { Profile } from "../data";
import { h, tick } from "../dom";
import { count, figure } from "../numbers/format";
import { binAt, FEW_PAIRS, roundMarks, stairs, type Stairs } from "../numbers/stairs";
import { headAt, latest, touches, type MakeView } from "./view";

const CHARTS: readonly (readonly [key: string, title: string, axis: string, help: string])[] = [
  [
    "offset",
    "By distance",
    "distance: query − key",
    "How much weight lies so many tokens back: a peak at 1 is a previous-token head.",
  ],
  ["entropy", "Entropy", "query", "In nats: 0 where one key has all the weight."],
  [
    "normalized_entropy",
    "Normalized entropy",
    "query",
    "Over the logarithm of how many keys the query sees: 1 is uniform.",
  ],
  ["received", "Attention received", "key", "The weight that a key gets from all queries: a lone high key is a sink."],
  ["sink", "On the first key", "query", "The weight on key 0."],
  ["learned_sink", "On the learned sink", "query", "What rows of weights are short of 1."],
  ["lse", "Log-sum-exp", "query", "The logarithm of the softmax's denominator."],
];

/** Pixels of a chart from top to bottom, at least and at most. */
const TALL = [170, 260] as const;
/** Pixels from top to bottom of what stands around two rows of charts. */
const AROUND = 320;
/** Pixels from one mark of an axis to the next. */
const APART = 34;

/** A head along its positions. */
export const profilesView: MakeView = (context) => {
  const { data, store } = context;
  const charts = h("div", { class: "charts" });
  const note = h("p", { class: "note", role: "status" });
  let logarithmic = true;
  let plots: uPlot[] = [];
  let profiles: Record<string, Profile> | null = null;
  const element = h(
    "section",
    { class: "view profiles", "aria-label": "Profiles" },
    h(
      "div",
      { class: "controls" },
      tick("Logarithmic distance", logarithmic, (on) => {
        logarithmic = on;
        draw();
      }),
    ),
    note,
    charts,
  );

  /** As tall as leaves room for two rows of charts. */
  const tall = (): number => Math.max(TALL[0], Math.min(TALL[1], (element.clientHeight - AROUND) / 2));

  function draw(): void {
    for (const plot of plots) plot.destroy();
    plots = [];
    charts.replaceChildren();
    if (!profiles) return;
    const shown = CHARTS.flatMap(([key, title, axis, help]) => {
      const profile = profiles?.[key];
      if (!profile) return [];
      const place = h("div", { class: "plot", role: "img", "aria-label": summary(profile, title) });
      charts.append(h("figure", {}, h("figcaption", {}, h("b", {}, title), h("small", {}, help)), place));
      return [{ place, profile, axis, title }];
    });
    plots = shown.map(({ place, profile, axis, title }) =>
      profile.edges ? steps(place, stairs(profile), axis) : line(place, profile, axis, title.toLowerCase()),
    );
  }

  const figures = (_: uPlot, values: number[]): string[] =>
    values.map((v) => (v === null ? "" : figure(Number(v.toPrecision(3)))));

  /** What all charts have in common. */
  function chart(place: HTMLElement, axis: string, more: Partial<uPlot.Axis>, scale: uPlot.Scale): uPlot.Options {
    const style = getComputedStyle(place);
    const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const font = `11px ${style.getPropertyValue("--sans")}`;
    const look = { stroke: style.getPropertyValue("--ink-soft"), grid, ticks: grid, font };
    return {
      width: place.clientWidth || 400,
      height: tall(),
      legend: { live: true },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: { x: { time: false, ...scale } },
      axes: [
        { ...look, label: axis, labelFont: font, labelSize: 18, size: 30, ...more },
        { ...look, size: 58, values: figures },
      ],
      series: [],
    };
  }

  function line(place: HTMLElement, profile: Profile, axis: string, name: string): uPlot {
    const x = profile.values.map((_, k) => profile.start + k * profile.step);
    const values = (_: uPlot, marks: number[]): string[] => marks.map((v) => (v === null ? "" : count(v)));
    const options = chart(place, axis, { values }, {});
    options.series = [
      { label: axis, value: (_, v) => (v === null || v === undefined ? "–" : count(Math.round(v))) },
      {
        label: name,
        stroke: getComputedStyle(place).getPropertyValue("--accent"),
        width: 1.6,
        points: { show: x.length < 60 },
        value: (_, v) => figure(v),
      },
    ];
    return new uPlot(options, [x, profile.values], place);
  }

  /** Means of bins, a step each; those of few pairs apart from the others. */
  function steps(place: HTMLElement, bins: Stairs, axis: string): uPlot {
    const style = getComputedStyle(place);
    const marks = logarithmic ? roundMarks(bins.x[0], bins.x[bins.x.length - 1]) : null;
    const options = chart(
      place,
      axis,
      {
        // A step has its number below its middle.
        ...(marks ? { splits: () => marks, space: 1 } : {}),
        values: (plot, at) => {
          let before = -Infinity;
          return at.map((v) => {
            const here = v === null ? NaN : plot.valToPos(v, "x");
            if (!(here - before >= APART) && before !== -Infinity) return "";
            before = here;
            return count(v);
          });
        },
        filter: (_, at) => at,
      },
      logarithmic ? { distr: 4, asinh: 1, range: () => [bins.x[0], bins.x[bins.x.length - 1]] } : {},
    );
    const paths = uPlot.paths.stepped?.({ align: 1 });
    const ink = style.getPropertyValue("--accent");
    options.series = [
      { label: "distance", value: (_, __, ___, k) => (k === null ? "–" : binAt(bins, k).name) },
      {
        label: "mean weight",
        stroke: ink,
        width: 1.6,
        paths,
        points: { show: false },
        value: (_, __, ___, k) => (k === null ? "–" : binAt(bins, k).text),
      },
      {
        label: `mean of fewer than ${FEW_PAIRS} pairs`,
        stroke: style.getPropertyValue("--mark"),
        width: 1.2,
        dash: [3, 2],
        paths,
        points: { show: false },
        value: (_, __, ___, k) => (k !== null && binAt(bins, k).few ? "yes" : "–"),
      },
    ];
    return new uPlot(options, [bins.x, bins.many, bins.few], place);
  }

  const load = latest(context.fail);
  const show = (): void => {
    note.textContent = "Summing over all pairs …";
    load(async (current) => {
      const answer = await data.profiles(headAt(store.state));
      if (!current()) return;
      note.textContent = "";
      profiles = answer;
      draw();
    });
  };
  let width = 0;
  const watcher = new ResizeObserver(() => {
    if (charts.clientWidth === width) return;
    width = charts.clientWidth;
    plots.forEach((one) => {
      const place = one.root.parentElement as HTMLElement;
      if (place.clientWidth) one.setSize({ width: place.clientWidth, height: tall() });
    });
  });
  watcher.observe(charts);

  return {
    element,
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head")) show();
      else if (changed.has("scale")) draw();
    },
    destroy() {
      watcher.disconnect();
      for (const one of plots) one.destroy();
    },
  };
};

function summary(profile: Profile, title: string): string {
  const values = profile.values.filter((value): value is number => value !== null);
  let [low, high, at] = [Infinity, -Infinity, 0];
  profile.values.forEach((value, k) => {
    if (value === null) return;
    low = Math.min(low, value);
    if (value > high) [high, at] = [value, k];
  });
  if (!values.length) return `${title}: nothing to show`;
  const where = profile.edges ? binAt(stairs(profile), at).name : count(Math.round(profile.start + at * profile.step));
  return `${title}: ${profile.label}, from ${figure(low)} to ${figure(high)}, highest at ${where}`;
}
