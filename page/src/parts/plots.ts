/** Charts of profiles, by uPlot. */

import "uplot/dist/uPlot.min.css";

import uPlot from "uplot";

import type { Profile } from "../data";
import { count, figure } from "../numbers/format";
import { distances, positionsOf, thinned } from "../numbers/profilecharts";
import { binAt, FEW_PAIRS, type Stairs } from "../numbers/stairs";

/** Pixels from one mark of an axis to the next. */
const APART = 34;

/** Values up to which each is a point of the line. */
const POINTS = 60;

/** Where a chart stands, how high it is, and what runs along it. */
export interface Plot {
  place: HTMLElement;
  height: number;
  axis: string;
}

type Known = number | null | undefined;

const styled = (place: HTMLElement, name: string): string => getComputedStyle(place).getPropertyValue(name);

/** What all charts have in common. */
function frame({ place, height, axis }: Plot, along: Partial<uPlot.Axis>, scale: uPlot.Scale): uPlot.Options {
  const grid = { stroke: styled(place, "--line"), width: 1 };
  const font = `11px ${styled(place, "--sans")}`;
  const look = { stroke: styled(place, "--ink-soft"), grid, ticks: grid, font };
  const figures = (_: uPlot, marks: Known[]): string[] =>
    marks.map((v) => (v === null || v === undefined ? "" : figure(v)));
  return {
    width: place.clientWidth || 400,
    height,
    legend: { live: true },
    cursor: { y: false, drag: { x: true, y: false } },
    scales: { x: { time: false, ...scale } },
    axes: [
      { ...look, label: axis, labelFont: font, labelSize: 18, size: 30, ...along },
      { ...look, size: 58, values: figures },
    ],
    series: [],
  };
}

/** A value for each position, as a line. */
export function linePlot(plot: Plot, profile: Profile, name: string): uPlot {
  const x = positionsOf(profile);
  const values = (_: uPlot, marks: Known[]): string[] =>
    marks.map((v) => (v === null || v === undefined ? "" : count(v)));
  const options = frame(plot, { values }, {});
  options.series = [
    { label: plot.axis, value: (_, v: Known) => (v === null || v === undefined ? "–" : count(Math.round(v))) },
    {
      label: name,
      stroke: styled(plot.place, "--accent"),
      width: 1.6,
      points: { show: x.length < POINTS },
      value: (_, v) => figure(v),
    },
  ];
  return new uPlot(options, [x, profile.values], plot.place);
}

/** What the legend says of the bin under the pointer. */
const ofBin =
  (bins: Stairs, told: (bin: ReturnType<typeof binAt>) => string): uPlot.Series.Value =>
  (_, __, ___, k) =>
    k === null ? "–" : told(binAt(bins, k));

/** Means of bins of distances, a step each; those of few pairs apart from the others. */
export function stepsPlot(plot: Plot, bins: Stairs, logarithmic: boolean): uPlot {
  const { place } = plot;
  const along = distances(bins.x, logarithmic);
  const options = frame(
    plot,
    {
      ...(along ? { splits: () => along.marks, space: 1 } : {}),
      // A step has its number below its middle.
      values: (self, marks) => thinned(marks, (mark) => self.valToPos(mark, "x"), APART),
      filter: (_, marks) => marks,
    },
    along ? { distr: 4, asinh: 1, range: () => along.range } : {},
  );
  const paths = uPlot.paths.stepped?.({ align: 1 });
  const curve = { paths, points: { show: false } };
  options.series = [
    { label: "distance", value: ofBin(bins, ({ name }) => name) },
    {
      ...curve,
      label: "mean weight",
      stroke: styled(place, "--accent"),
      width: 1.6,
      value: ofBin(bins, ({ text }) => text),
    },
    {
      ...curve,
      label: `mean of fewer than ${FEW_PAIRS} pairs`,
      stroke: styled(place, "--mark"),
      width: 1.2,
      dash: [3, 2],
      value: ofBin(bins, ({ few }) => (few ? "yes" : "–")),
    },
  ];
  return new uPlot(options, [bins.x, bins.many, bins.few], place);
}
