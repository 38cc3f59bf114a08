import "uplot/dist/uPlot.min.css";

import uPlot from "uplot";

import type { Profile } from "../data";
import { h, tick } from "../dom";
import { count, figure } from "../numbers/format";
import { headAt, latest, touches, type MakeView } from "./view";

const CHARTS: readonly (readonly [key: string, title: string, axis: string, help: string])[] = [
  [
    "offset",
    "By distance",
    "query − key",
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
  ["lse", "Log-sum-exp", "query", "The logarithm of the softmax's denominator."],
];

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
      return [
        {
          place,
          profile,
          axis,
          name: title.toLowerCase(),
          logX: logarithmic && key === "offset" && profile.start >= 0,
        },
      ];
    });
    plots = shown.map(({ place, profile, axis, name, logX }) => plot(place, profile, axis, name, logX));
  }

  function plot(place: HTMLElement, profile: Profile, axis: string, name: string, logX: boolean): uPlot {
    const style = getComputedStyle(place);
    const ink = style.getPropertyValue("--ink-soft");
    const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const font = `11px ${style.getPropertyValue("--sans")}`;
    const shift = logX ? 1 : 0; // a logarithm has no place for distance 0
    const x = profile.values.map((_, k) => profile.start + k * profile.step + shift);
    const figures = (_: uPlot, values: number[]): string[] =>
      values.map((v) => (v === null ? "" : figure(Number(v.toPrecision(3)))));
    return new uPlot(
      {
        width: place.clientWidth || 400,
        height: 170,
        legend: { live: true },
        cursor: { y: false, drag: { x: true, y: false } },
        scales: { x: { time: false, ...(logX ? { distr: 3, log: 10 } : {}) } },
        axes: [
          {
            stroke: ink,
            grid,
            ticks: grid,
            font,
            label: logX ? `${axis} + 1` : axis,
            labelFont: font,
            labelSize: 18,
            size: 30,
            values: (_, values) => values.map((v) => (v === null ? "" : count(v))),
          },
          { stroke: ink, grid, ticks: grid, font, size: 58, values: figures },
        ],
        series: [
          { label: axis, value: (_, v) => (v === null || v === undefined ? "–" : count(Math.round(v - shift))) },
          {
            label: name,
            stroke: style.getPropertyValue("--accent"),
            width: 1.6,
            points: { show: x.length < 60 },
            value: (_, v) => figure(v),
          },
        ],
      },
      [x, profile.values],
      place,
    );
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
      if (place.clientWidth) one.setSize({ width: place.clientWidth, height: 170 });
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
  return `${title}: ${profile.label}, from ${figure(low)} to ${figure(high)}, highest at ${count(Math.round(profile.start + at * profile.step))}`;
}
