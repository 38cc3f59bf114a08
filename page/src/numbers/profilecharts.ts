/** What charts of a head along its positions show. */

import type { Profile } from "../data";
import { count, figure } from "./format";
import { binAt, roundMarks, stairs } from "./stairs";

interface Chart {
  key: string;
  title: string;
  axis: string;
  help: string;
}

const CHARTS: readonly Chart[] = [
  {
    key: "offset",
    title: "By distance",
    axis: "distance: query − key",
    help: "How much weight lies so many tokens back: a peak at 1 is a previous-token head.",
  },
  { key: "entropy", title: "Entropy", axis: "query", help: "In nats: 0 where one key has all the weight." },
  {
    key: "normalized_entropy",
    title: "Normalized entropy",
    axis: "query",
    help: "Over the logarithm of how many keys the query sees: 1 is uniform.",
  },
  {
    key: "received",
    title: "Attention received",
    axis: "key",
    help: "The weight that a key gets from all queries: a lone high key is a sink.",
  },
  { key: "sink", title: "On the first key", axis: "query", help: "The weight on key 0." },
  {
    key: "learned_sink",
    title: "On the learned sink",
    axis: "query",
    help: "What rows of weights are short of 1.",
  },
  { key: "lse", title: "Log-sum-exp", axis: "query", help: "The logarithm of the softmax's denominator." },
];

/** What runs along the chart of a profile. */
export const axisOf = (key: string): string => CHARTS.find((chart) => chart.key === key)?.axis ?? "query";

/** The charts of those profiles that are there; the tokens of two texts have no distance. */
export function chartsOf(
  profiles: Readonly<Record<string, Profile>>,
  cross: boolean,
): (Chart & { profile: Profile })[] {
  return CHARTS.flatMap((chart) => {
    const profile = cross && chart.key === "offset" ? undefined : profiles[chart.key];
    return profile ? [{ ...chart, profile }] : [];
  });
}

/** The positions that the values of a profile without bins are of. */
export const positionsOf = ({ start, step, values }: Profile): number[] => values.map((_, k) => start + k * step);

/** The position of value k, or its distances, as text. */
const placeOf = (profile: Profile, k: number): string =>
  profile.edges ? binAt(stairs(profile), k).name : count(Math.round(profile.start + k * profile.step));

/** A chart in a sentence. */
export function summary(profile: Profile, title: string): string {
  let [low, high, at] = [Infinity, -Infinity, -1];
  profile.values.forEach((value, k) => {
    if (value === null) return;
    low = Math.min(low, value);
    if (value > high) [high, at] = [value, k];
  });
  if (low > high) return `${title}: nothing to show`;
  return `${title}: ${profile.label}, from ${figure(low)} to ${figure(high)}, highest at ${placeOf(profile, Math.max(0, at))}`;
}

/** An axis of distances: what it shows, and its marks; the whole range and no marks of its own where it is linear. */
export function distances(
  x: readonly number[],
  logarithmic: boolean,
): { range: [number, number]; marks: number[] } | null {
  const range: [number, number] = [x[0], x[x.length - 1]];
  return logarithmic ? { range, marks: roundMarks(...range) } : null;
}

/** Numbers of marks, empty where one would stand nearer than so many pixels to the one before. */
export function thinned(marks: readonly (number | null)[], pixel: (mark: number) => number, apart: number): string[] {
  let before = -Infinity;
  return marks.map((mark) => {
    const here = mark === null ? NaN : pixel(mark);
    if (mark === null || !(here - before >= apart)) return "";
    before = here;
    return count(mark);
  });
}
