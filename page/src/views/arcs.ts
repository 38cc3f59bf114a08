import { h, pointing, s } from "../dom";
import { css, ramp, SCALES, toned } from "../numbers/colour";
import { count, figure, printable, shortened } from "../numbers/format";
import { toneChoice } from "../parts/mapcontrols";
import { chosenQuery, headAt, latest, layerOf, scaleName, tokensOf, touches, type MakeView } from "./view";

const MOST = 64;
/** How much room a token has, in pixels. */
const SLOTS = { least: 18, most: 40 };
const STRONGEST = 400;
/** Letters of a token, at most, and pixels that they take. */
const LETTERS = 14;
const LABELS = 130;
/** Where on the scale of colours arcs begin, that none is as light as the paper. */
const FAINTEST = 0.2;
/** The weight from which there are arcs, unless so few reach it that a lower one says more. */
const USUAL = 0.05;
const FEW = 10;
const ENOUGH = 100;

function automatic(weights: Float32Array, n: number): number {
  const others = weights
    .filter((w, p) => w > 0 && Math.floor(p / n) !== p % n)
    .sort()
    .reverse();
  if (others.length < FEW || others[FEW - 1] >= USUAL) return USUAL;
  return Math.max(1e-5, Number((others[ENOUGH] ?? others[others.length - 1]).toPrecision(1)));
}

/** Up to 64 tokens with an arc for every weight that is seen. */
export const arcsView: MakeView = (context) => {
  const { data, store } = context;
  const controls = h("div", { class: "controls" });
  const place = h("div", {
    class: "arcs-scroll sheet",
    tabindex: 0,
    role: "group",
    "aria-label": "Arcs from queries to keys",
  });
  const caption = h("p", { class: "note" });
  const element = h("section", { class: "view arcs", "aria-label": "Arcs" }, controls, caption, place);
  let least = USUAL;
  let set = false;

  /** The first of the tokens that are shown, so that the chosen query is among them. */
  const windowOf = (): { start: number; stop: number } => {
    const { n_q, n_k } = layerOf(context);
    const n = Math.min(n_q, n_k);
    const i = chosenQuery(store.state, layerOf(context));
    const start = Math.max(0, Math.min(n - MOST, i - (MOST >> 1)));
    return { start, stop: Math.min(n, start + MOST) };
  };

  const load = latest(context.fail);
  const show = (): void =>
    load(async (current) => {
      const { start, stop } = windowOf();
      const { query } = tokensOf(context);
      const [weights] = await Promise.all([
        data.values(headAt(store.state), start, stop, start, stop),
        query?.load(start, stop),
      ]);
      if (!current()) return;
      const usual = set ? least : automatic(weights, stop - start);
      if (usual !== least) {
        least = usual;
        drawControls();
      }
      const words = Array.from({ length: stop - start }, (_, k) =>
        query ? printable(query.at(start + k) ?? "") : count(start + k),
      );
      const whole = stop - start === Math.max(layerOf(context).n_q, layerOf(context).n_k);
      const { n_q } = layerOf(context);
      const move = (by: number, text: string): HTMLElement =>
        h(
          "button",
          { type: "button", click: () => store.set({ i: Math.max(0, Math.min(n_q - 1, start + (MOST >> 1) + by)) }) },
          text,
        );
      caption.replaceChildren(
        ...(whole
          ? []
          : [move(-MOST, "‹ before"), ` Tokens ${count(start)} to ${count(stop - 1)} `, move(MOST, "after ›")]),
      );
      place.replaceChildren(drawing(words, weights, start));
    });

  function drawing(words: string[], weights: Float32Array, start: number): SVGElement {
    const n = words.length;
    const picked = chosenQuery(store.state, layerOf(context)) - start;
    const shown: { i: number; j: number; w: number }[] = [];
    weights.forEach((w, p) => {
      const [i, j] = [Math.floor(p / n), p % n];
      if (w >= least && i !== j && !(store.state.hide && j + start === 0)) shown.push({ i, j, w });
    });
    if (!shown.length) caption.append(" No weight is as large as this: move the slider to the left.");
    shown.sort((a, b) => b.w - a.w).length = Math.min(shown.length, STRONGEST);
    const slot = Math.max(SLOTS.least, Math.min(SLOTS.most, (place.clientWidth - 60) / n));
    const reach = Math.max(1, ...shown.map(({ i, j }) => Math.abs(i - j)));
    const rise = Math.min(Math.max(250, place.clientHeight - LABELS - 20), (reach * slot) / 2);
    const [width, base] = [n * slot + 40, rise + 14];
    const height = base + LABELS;
    const scale = SCALES[scaleName(store.state)];
    const x = (k: number): number => 20 + (k + 0.5) * slot;
    const svg = s("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      role: "group",
      "aria-label": "Tokens in a row, arcs from each to those it attends to",
    });
    for (const { i, j, w } of [...shown].reverse()) {
      const tall = (Math.abs(i - j) / reach) * rise;
      const path = s("path", {
        d: `M${x(i)} ${base} C${x(i)} ${base - tall * 1.33} ${x(j)} ${base - tall * 1.33} ${x(j)} ${base}`,
        stroke: css(ramp(scale, Math.max(FAINTEST, toned(w, 1, store.state.tone)))),
        "stroke-width": 0.8 + 3.2 * Math.sqrt(w),
        class: i === picked ? "arc chosen" : "arc",
        "data-i": i,
      });
      path.append(
        s("title", {}, document.createTextNode(`${shortened(words[i])} → ${shortened(words[j])}: ${figure(w)}`)),
      );
      svg.append(path);
    }
    words.forEach((word, k) => {
      const label = s(
        "text",
        // Turned, letters stand to the right of their baseline: centred, they are below the end of the arc.
        { transform: `translate(${x(k)} ${base + 10}) rotate(90)`, "dominant-baseline": "central" },
        document.createTextNode(shortened(word, LETTERS)),
      );
      const token = s(
        "g",
        {
          class: k === picked ? "word chosen" : "word",
          tabindex: 0,
          role: "button",
          "aria-label": `${start + k} ${shortened(word)}`,
          "aria-pressed": k === picked ? "true" : "false",
          click: () => store.set({ i: start + k }),
          keydown: (event: KeyboardEvent) =>
            (event.key === "Enter" || event.key === " ") && (event.preventDefault(), store.set({ i: start + k })),
          mouseenter: () => light(svg, k),
          mouseleave: () => light(svg, -1),
        },
        s("rect", {
          x: x(k) - slot / 2,
          y: base + 2,
          width: slot,
          height: Math.min(124, 18 + 8 * Math.min(LETTERS, Array.from(word).length)),
          rx: 4,
        }),
        label,
      );
      svg.append(token);
    });
    svg.classList.toggle("picking", store.state.i >= 0);
    return svg;
  }

  const light = (svg: SVGElement, i: number): void => {
    svg.classList.toggle("lit", i >= 0);
    for (const arc of svg.querySelectorAll(".arc"))
      arc.classList.toggle("on", arc.getAttribute("data-i") === String(i));
  };

  function drawControls(): void {
    const shown = h("output", {}, figure(least));
    const slider = h("input", {
      type: "range",
      min: -5,
      max: 0,
      step: 0.02,
      value: Math.log10(least),
      input: () => {
        [least, set] = [Number((10 ** Number(slider.value)).toPrecision(2)), true];
        shown.textContent = figure(least);
        show();
      },
    });
    controls.replaceChildren(
      h("label", { class: "field" }, h("span", {}, "Weights from"), slider, shown),
      toneChoice(store),
      h("p", { class: "help" }, `${pointing()} a token to see its arcs alone.`),
    );
  }
  drawControls();

  return {
    element,
    update(_, changed) {
      if (touches(changed, "scene", "layer", "head", "i", "tone", "scale", "hide")) show();
    },
  };
};
