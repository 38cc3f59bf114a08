import { choice, h } from "../dom";
import { css, ramp, SCALES, toned } from "../numbers/colour";
import { figure } from "../numbers/format";
import { measures, normals, softmax, type RowMeasures } from "../numbers/softmax";
import { chart } from "../parts/chart";
import { tokenChooser } from "../parts/chooser";
import { nameOf } from "../parts/sentences";
import { Refused } from "../source/source";
import { chosenQuery, headAt, headName, latest, layerOf, scaleName, tokensOf, touches, type MakeView } from "./view";

/** Pairs up to which a whole head is drawn; of a larger one the rows up to the chosen query. */
const WHOLE = 2 ** 16;
const ROWS = 64;
const MOST_VALUES = 2 ** 20;

/** Columns and bars that are drawn; of more, the largest weight of each. */
const COLUMNS = 512;
const BARS = 128;

const TEMPERATURES = Array.from({ length: 61 }, (_, k) => 10 ** (-1.5 + k / 20));
const FEATURES = Array.from({ length: 51 }, (_, k) => 2 ** (k / 5));

const SIDES = [
  ["with 1/√d", "first"],
  ["without", "second"],
] as const;

const MEASURES: readonly (readonly [name: keyof RowMeasures, title: string, help: string])[] = [
  ["entropy", "Entropy of the row", "in nats; 0: one key has all"],
  ["largest", "Largest weight", "1: one key has all"],
  ["gradient", "Gradient of the softmax", "Σ p(1 − p); 0: nothing left to learn from"],
];

/** Scores with and without 1/√d side by side, at any temperature. */
export const scaleView: MakeView = (context) => {
  const { data, store, scene } = context;
  const controls = h("div", { class: "controls" });
  const missing = h("p", { class: "empty", role: "status" });
  const note = h("p", { class: "note" });
  const panes = SIDES.map(([title]) => ({
    title: h("h2", {}, title),
    canvas: h("canvas", { role: "img" }),
    marked: h("span", { "aria-hidden": "true" }),
    bars: h("div", { class: "bars", role: "img" }),
    told: h("p", { class: "told" }),
  }));
  const pair = h(
    "div",
    { class: "pair" },
    ...panes.map(({ title, canvas, marked, bars, told }) =>
      h("div", { class: "side" }, title, h("div", { class: "drawn sheet" }, canvas, marked), bars, told),
    ),
  );
  const charts = h("div", { class: "charts" });
  const element = h(
    "section",
    { class: "view scale", "aria-label": "Scale", tabindex: 0 },
    controls,
    missing,
    h("div", { class: "scale-main" }, pair, charts),
    note,
  );
  let temperature = 1;
  let against: "temperature" | "d" = "temperature";
  let block: { dots: Float32Array; r0: number; rows: number; n_k: number } | null = null;
  let variance: number[] = [];

  /** The factors on dot products of both sides. */
  const factors = (d: number, t: number): [number, number] => [1 / (Math.sqrt(d) * t), 1 / t];

  function draw(): void {
    if (!block) return;
    const { dots, r0, rows, n_k } = block;
    const { d } = layerOf(context);
    const i = chosenQuery(store.state, layerOf(context)) - r0;
    const scale = SCALES[scaleName(store.state)];
    factors(d, temperature).forEach((factor, side) => {
      const { canvas, marked, bars, told } = panes[side];
      const columns = Math.min(n_k, COLUMNS);
      [canvas.width, canvas.height] = [columns, rows];
      const context2d = canvas.getContext("2d") as CanvasRenderingContext2D;
      let mine: Float64Array = new Float64Array(0);
      for (let r = 0; r < rows; r++) {
        const weights = softmax(dots.subarray(r * n_k, (r + 1) * n_k), factor);
        if (r === i) mine = weights;
        pooled(weights, columns).forEach((weight, x) => {
          if (Number.isNaN(weight)) return;
          context2d.fillStyle = css(ramp(scale, toned(weight, 1, "root")));
          context2d.fillRect(x, r, 1, 1);
        });
      }
      marked.style.top = `${(100 * i) / rows}%`;
      marked.style.height = `${100 / rows}%`;
      const { entropy, largest, gradient } = measures(mine);
      const said = `largest weight ${largest.toFixed(2)}, entropy ${entropy.toFixed(2)}, gradient ${gradient.toFixed(2)}`;
      told.textContent = said;
      canvas.setAttribute("aria-label", `Map ${SIDES[side][0]}; the chosen row: ${said}`);
      bars.setAttribute("aria-label", `The chosen row ${SIDES[side][0]}: ${said}`);
      bars.replaceChildren(
        ...Array.from(pooled(mine, BARS), (weight) => {
          const bar = h("span", {});
          bar.style.setProperty("--size", String(weight || 0));
          return bar;
        }),
      );
    });
    drawCharts(dots.subarray(i * n_k, (i + 1) * n_k), d);
  }

  function drawCharts(row: Float32Array, d: number): void {
    const seen = row.filter((x) => !Number.isNaN(x));
    const random = normals(Math.min(512, Math.max(2, seen.length)));
    const byFeatures = against === "d";
    const x = byFeatures ? FEATURES : TEMPERATURES;
    const sides = [0, 1].map((side) =>
      x.map((at) =>
        byFeatures
          ? measures(softmax(random, Math.sqrt(at) * factors(at, temperature)[side]))
          : measures(softmax(seen, factors(d, at)[side])),
      ),
    );
    const axis = byFeatures ? "d, features of random vectors" : "temperature";
    charts.replaceChildren(
      ...MEASURES.map(([name, title, help]) =>
        chart({
          title,
          help,
          axis,
          x,
          logarithmic: true,
          mark: byFeatures ? d : temperature,
          lines: SIDES.map(([said, kind], side) => ({ name: said, kind, values: sides[side].map((one) => one[name]) })),
        }),
      ),
      ...(variance.length > 1
        ? [
            chart({
              title: "Var(q · k) against d",
              help: "it grows with the number of features; 1/√d takes that back",
              axis: "features",
              x: variance.map((_, k) => k + 1),
              logarithmic: false,
              lines: [
                { name: "q · k of this head", kind: "second", values: variance },
                {
                  name: "growing with d",
                  kind: "third",
                  values: variance.map((_, k) => ((k + 1) * variance[d - 1]) / d),
                },
                { name: "q · k / √d", kind: "first", values: variance.map((v, k) => v / (k + 1)) },
              ],
            }),
          ]
        : []),
    );
  }

  function drawControls(): void {
    const layer = layerOf(context);
    const shown = h("output", {}, figure(temperature));
    const slider = h("input", {
      type: "range",
      min: -1.5,
      max: 1.5,
      step: 0.05,
      value: Math.log10(temperature),
      "aria-label": "Temperature",
      input: () => {
        temperature = Number((10 ** Number(slider.value)).toPrecision(2));
        shown.textContent = figure(temperature);
        draw();
      },
    });
    const active = controls.contains(document.activeElement) ? document.activeElement?.getAttribute("title") : null;
    controls.replaceChildren(
      tokenChooser(context, "Query", "query", chosenQuery(store.state, layer), layer.n_q, (to) => store.set({ i: to })),
      h("label", { class: "field" }, h("span", {}, "Temperature"), slider, shown),
      choice(
        "Curves against",
        [
          ["temperature", "temperature"],
          ["d", "d"],
        ],
        against,
        (to) => {
          against = to as typeof against;
          draw();
        },
      ),
    );
    if (active) controls.querySelector<HTMLElement>(`[title="${active}"]`)?.focus();
  }

  const load = latest(context.fail);
  const show = (): void => {
    drawControls();
    load(async (current) => {
      const at = headAt(store.state);
      const layer = layerOf(context);
      const i = chosenQuery(store.state, layer);
      const whole = layer.n_q * layer.n_k <= WHOLE;
      const few = Math.max(1, Math.min(ROWS, Math.floor(MOST_VALUES / layer.n_k)));
      const [r0, r1] = whole ? [0, layer.n_q] : [Math.max(0, i + 1 - few), i + 1];
      const tokens = tokensOf(context).query;
      try {
        const [dots, spread] = await Promise.all([
          data.dots(at, r0, r1, 0, layer.n_k),
          data.variance(at),
          tokens?.load(i, i + 1),
        ]);
        if (!current()) return;
        block = { dots, r0, rows: r1 - r0, n_k: layer.n_k };
        variance = spread;
      } catch (error) {
        if (!(error instanceof Refused) || !current()) throw error;
        missing.textContent = error.message;
        pair.hidden = charts.hidden = true;
        return;
      }
      missing.textContent = "";
      pair.hidden = charts.hidden = false;
      const name = headName(scene, at.layer, at.head);
      const token = tokens ? nameOf({ [i]: tokens.at(i) ?? "" } as unknown as string[], i) : nameOf(null, i);
      const some = whole ? "" : `, rows ${r0} to ${r1 - 1}`;
      panes[0].title.textContent = `${name} with 1/√d, d = ${layer.d}`;
      panes[1].title.textContent = `${name} without`;
      const usual = Math.abs(layer.scale * Math.sqrt(layer.d) - 1) < 1e-6;
      note.textContent = [
        `Both maps have one colour scale, from 0 to 1${some}. The marked row, also as bars, is query ${token}.`,
        usual ? "" : `This layer scales by ${figure(layer.scale)} itself.`,
        layer.plain ? "" : `Of its rules (${layer.rules}) only what hides keys is applied here.`,
      ]
        .filter(Boolean)
        .join(" ");
      draw();
    });
  };

  return {
    element,
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head", "i")) show();
      else if (changed.has("scale")) draw();
    },
  };
};

/** The largest of each of at most so many parts; NaN where a part holds nothing. */
function pooled(values: Float64Array, parts: number): Float64Array {
  if (values.length <= parts) return values;
  const out = new Float64Array(parts).fill(NaN);
  values.forEach((value, j) => {
    const at = Math.floor((j * parts) / values.length);
    if (!(value <= out[at])) out[at] = Number.isNaN(value) ? out[at] : value;
  });
  return out;
}
