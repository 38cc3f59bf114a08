/** A small chart of lines, as SVG. */

import { h, s } from "../dom";
import { figure } from "../numbers/format";

export interface Line {
  name: string;
  /** Which of the page's colours it has. */
  kind: "first" | "second" | "third";
  values: number[];
}

export interface ChartOptions {
  title: string;
  help: string;
  axis: string;
  x: number[];
  logarithmic: boolean;
  lines: Line[];
  /** A place on the axis to mark. */
  mark?: number;
}

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [340, 170, 46, 30, 8];

function ticks(low: number, high: number, logarithmic: boolean): number[] {
  if (logarithmic) {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    return Array.from({ length: Math.floor(Math.log10(high) + 1e-9) - first + 1 }, (_, k) => 10 ** (first + k));
  }
  const raw = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((m) => m * power >= raw) as number);
  const found: number[] = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step)
    found.push(Number(at.toPrecision(6)));
  return found;
}

export function chart({ title, help, axis, x, logarithmic, lines, mark }: ChartOptions): HTMLElement {
  const [low, high] = [x[0], x[x.length - 1]];
  const most = Math.max(...lines.flatMap(({ values }) => values.filter(Number.isFinite)), 1e-9);
  const place = (value: number): number => {
    const share = logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1);
    return LEFT + share * (WIDTH - LEFT - 10);
  };
  const up = (value: number): number => HEIGHT - BOTTOM - (value / most) * (HEIGHT - BOTTOM - TOP);
  const text = (at: number, y: number, said: string, anchor: string): SVGElement =>
    s("text", { x: at, y, "text-anchor": anchor }, document.createTextNode(said));
  const drawing = s(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `${title}, against ${axis}: ${lines.map(({ name, values }) => `${name} from ${figure(values[0], 2)} to ${figure(values[values.length - 1], 2)}`).join("; ")}`,
    },
    ...ticks(0, most, false).flatMap((value) => [
      s("line", { class: "grid", x1: LEFT, x2: WIDTH - 10, y1: up(value), y2: up(value) }),
      text(LEFT - 5, up(value) + 4, figure(value), "end"),
    ]),
    ...ticks(low, high, logarithmic).flatMap((value) => [
      s("line", { class: "grid", x1: place(value), x2: place(value), y1: TOP, y2: HEIGHT - BOTTOM }),
      text(place(value), HEIGHT - BOTTOM + 13, figure(value), "middle"),
    ]),
    text((LEFT + WIDTH) / 2, HEIGHT - 3, axis, "middle"),
    ...(mark !== undefined && mark >= low && mark <= high
      ? [s("line", { class: "mark", x1: place(mark), x2: place(mark), y1: TOP, y2: HEIGHT - BOTTOM })]
      : []),
    ...lines.map(({ kind, values }) =>
      s("polyline", {
        class: kind,
        points: values.map((value, k) => `${place(x[k]).toFixed(1)},${up(value).toFixed(1)}`).join(" "),
      }),
    ),
  );
  return h(
    "figure",
    {},
    h("figcaption", {}, h("b", {}, title), h("small", {}, help)),
    drawing,
    h(
      "p",
      { class: "keys" },
      ...lines.map(({ name, kind }) => h("span", { class: kind }, h("i", { "aria-hidden": "true" }), name)),
    ),
  );
}
