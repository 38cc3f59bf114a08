/** Profiles of a head as a figure. */

import type { Profile } from "../data";
import { count, figure } from "../numbers/format";
import { axisOf, positionsOf } from "../numbers/profilecharts";
import { binAt, stairs } from "../numbers/stairs";
import { headAt, layerOf, type Context } from "../views/view";
import { Drawing, LINE, SOFT, wrapped } from "./drawing";
import { capital, nameOfHead, ofText, WIDE } from "./frame";

/** Pixels of a chart: what it takes in all, and its frame from the left and from above. */
const CHART = { wide: WIDE / 2, high: 208, left: 56, top: 50, right: 16, frame: 104 };

/** Letters of a title in a line, in lines of so many pixels. */
const TITLE = { letters: 46, line: 13 };

interface Frame {
  across(x: number): number;
  up(y: number): number;
}

/** The curve of a profile as a path, a step for each bin where it has bins. */
function curve(profile: Profile, x: readonly number[], { across, up }: Frame): string {
  let [d, before] = ["", NaN];
  profile.values.forEach((value, k) => {
    const v = value ?? NaN;
    if (Number.isFinite(v)) {
      d += `${Number.isNaN(before) ? "M" : "L"}${across(x[k]).toFixed(1)} ${up(v).toFixed(1)}`;
      if (profile.edges) d += `L${across(x[k + 1]).toFixed(1)} ${up(v).toFixed(1)}`;
    }
    before = v;
  });
  return d;
}

function drawProfile(drawing: Drawing, key: string, profile: Profile, x0: number, y0: number): void {
  const [left, top, wide, high] = [x0 + CHART.left, y0 + CHART.top, CHART.wide - CHART.left - CHART.right, CHART.frame];
  const values = profile.values.map((v) => v ?? NaN);
  const x = profile.edges ? stairs(profile).x.map((v) => Math.asinh(v)) : positionsOf(profile);
  const seen = values.filter(Number.isFinite);
  const [low, least] = [Math.min(0, ...seen), Math.max(...seen, 1e-12)];
  const frame: Frame = {
    across: (v) => left + ((v - x[0]) / (x[x.length - 1] - x[0] || 1)) * wide,
    up: (v) => top + high - ((v - low) / (least - low)) * high,
  };
  const title = wrapped(capital(profile.label), TITLE.letters).slice(0, 2);
  title.forEach((line, k) => {
    const y = top - 10 - (title.length - 1 - k) * TITLE.line;
    drawing.text(left, y, line, { size: 10.5, bold: true });
  });
  drawing.box(left, top, wide, high, "none", LINE);
  const d = curve(profile, x, frame);
  if (d) drawing.path(d, "#1f5c9e", 1.4);
  const small = { size: 9.5, fill: SOFT };
  drawing.text(left - 5, top + 8, figure(least, 2), { ...small, anchor: "end" });
  drawing.text(left - 5, top + high, figure(low, 2), { ...small, anchor: "end" });
  const ends = profile.edges
    ? [0, values.length - 1].map((k) => binAt(stairs(profile), k).name)
    : [profile.start, profile.start + (values.length - 1) * profile.step].map(count);
  drawing.text(left, top + high + 14, ends[0], small);
  drawing.text(left + wide, top + high + 14, ends[1], { ...small, anchor: "end" });
  drawing.text(left + wide / 2, top + high + 30, axisOf(key), { ...small, size: 10, anchor: "middle" });
}

export async function profilesFigure(context: Context): Promise<Drawing> {
  const profiles = await context.data.profiles(headAt(context.store.state));
  const drawing = new Drawing(WIDE, `Profiles of ${nameOfHead(context)} ${ofText(context)}`);
  const { cross } = layerOf(context);
  const drawn = Object.entries(profiles).filter(([key]) => key !== "offset" || !cross);
  drawn.forEach(([key, profile], n) =>
    drawProfile(drawing, key, profile, (n % 2) * CHART.wide, Math.floor(n / 2) * CHART.high),
  );
  const distances = cross ? "" : "; distances on a logarithmic axis";
  drawing.caption(`${capital(nameOfHead(context))} ${ofText(context)} along its positions${distances}.`);
  return drawing;
}
