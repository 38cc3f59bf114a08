import { elementScroll, observeElementOffset, observeElementRect, Virtualizer } from "@tanstack/virtual-core";

import type { HeadAt } from "../data";
import { choice, fitted, h, tick } from "../dom";
import { css, ramp, readableOn, SCALES, toned } from "../numbers/colour";
import { count, figure, printable, readable, shortened } from "../numbers/format";
import { byWords, wordOf, wordStarts } from "../numbers/words";
import { toneChoice } from "../parts/mapcontrols";
import { breakLines, lineOf, type Line } from "../parts/lines";
import { TAKEN, takenOf } from "../parts/moved";
import { spanWeights } from "./spans";
import { chosen, headAt, headName, latest, layerOf, scaleName, touches, type MakeView } from "./view";

/** Pixels of a line: of a text, and of one so short that it is written large. */
const LINE_PX = [28, 44] as const;
/** Lines up to which a text is written large, and up to which what is listed stands below it, not beside. */
const FEW_LINES = 3;
const SHORT = 8;
const LISTED = 10;
/** Pixels of a listed token, and above the list. */
const ENTRY = [28, 60] as const;

/** The text, shaded by what a token attends to, or by what attends to it. */
export const textView: MakeView = (context) => {
  const { data, store } = context;
  const sizer = h("div", { class: "sizer" });
  const scroller = h(
    "div",
    {
      class: "text-scroll sheet",
      tabindex: 0,
      role: "listbox",
      "aria-multiselectable": "true",
      "aria-label": "Tokens of the text. Arrow keys choose one, with Shift several.",
    },
    sizer,
  );
  const strip = h("canvas", {
    class: "strip",
    title: "Where in the text the weight lies. Click to go there.",
    "aria-hidden": "true",
  });
  const columns = h("p", { class: "columns" }, h("b", {}, "weight"), h("b", { title: TAKEN }, "× ‖value‖"));
  const list = h("ol", { class: "strongest" });
  const heading = h("h2", {});
  // Other heads, and the other direction: shown where there is room.
  const back = h("div", { class: "back" });
  const aside = h("aside", {}, h("div", {}, heading, columns, list), back);
  const controls = h("div", { class: "controls" });
  const main = h("div", { class: "text-main" }, scroller, strip, aside);
  const element = h("section", { class: "view text", "aria-label": "Text" }, controls, main);

  let tokens: string[] = [];
  let lines: Line[] = [];
  let weights: Float32Array = new Float32Array(0);
  /** Weights times the lengths of values; empty where those are not known. */
  let taken: Float32Array = new Float32Array(0);
  let top = 1;
  let linePx: number = LINE_PX[0];
  /** Columns of a line: no token is longer. */
  let across = 20;
  /** Where the words of the tokens begin, and their end. */
  let starts: number[] = [];
  const drawn = new Map<number, HTMLElement>();
  const joined = (from: number, to: number): string =>
    tokens
      .slice(from, Math.min(to, from + 80))
      .map(printable)
      .join("");
  const nameOf = (t: number): string =>
    context.scene.has_tokens ? `${count(t)} “${shortened(printable(tokens[t] ?? ""))}”` : count(t);

  const options = () => ({
    count: lines.length,
    getScrollElement: () => scroller,
    estimateSize: () => linePx,
    overscan: 8,
    scrollToFn: elementScroll,
    observeElementRect,
    observeElementOffset,
    onChange: () => draw(false),
  });
  const virtual = new Virtualizer<HTMLElement, HTMLElement>(options());
  const unmount = virtual._didMount();

  /** Weights fall on keys where the chosen token is a query, and on queries where it is a key. */
  const shadedAxis = (): "query" | "key" => (store.state.by ? "query" : "key");
  const picked = (): number => {
    const { i, j } = chosen(context);
    return store.state.by ? j : i;
  };
  const pick = (token: number): void => store.set({ ...(store.state.by ? { j: token } : { i: token }), span: -1 });
  /** Whether what is chosen and what is shaded are the same tokens. */
  const same = (): boolean => layerOf(context).n_q === layerOf(context).n_k && !layerOf(context).cross;
  const grouped = (): boolean => store.state.words && context.scene.has_tokens;
  /** The tokens that are chosen, [from, to): one, several, or the words that those are in. */
  const range = (): [number, number] => {
    const token = picked();
    const n = store.state.by ? layerOf(context).n_k : layerOf(context).n_q;
    const end = store.state.span < 0 ? token : Math.min(store.state.span, n - 1);
    const [from, to] = [Math.min(token, end), Math.max(token, end) + 1];
    return grouped() && same() && starts.length > 1 ? [wordOf(starts, from)[0], wordOf(starts, to - 1)[1]] : [from, to];
  };

  function lineElement(index: number): HTMLElement {
    const { start, stop } = lines[index];
    const line = h("div", { class: "line", role: "presentation" });
    line.style.transform = `translateY(${index * linePx}px)`;
    const scale = SCALES[scaleName(store.state)];
    const [from, to] = same() ? range() : [0, 0]; // what is chosen is no token of another text
    for (let t = start; t < stop; t++) {
      const weight = weights[t];
      const span = h("span", {
        class: "token",
        "data-token": t,
        role: "option",
        "aria-selected": t >= from && t < to ? "true" : "false",
      });
      span.textContent = shortened(readable(tokens[t]).replaceAll("\n", "↵"), across) || "∅";
      if (weight > 0) {
        const place = toned(weight, top, store.state.tone);
        if (place > 0.03) {
          const colour = ramp(scale, place);
          span.style.background = css(colour);
          span.style.color = readableOn(colour);
        }
      } else if (Number.isNaN(weight)) span.classList.add("hidden");
      if (t >= from && t < to) span.classList.add("chosen");
      span.title = `${nameOf(t)}: ${Number.isNaN(weight) ? "hidden by the mask" : figure(weight)}`;
      line.append(span);
    }
    return line;
  }

  function draw(anew: boolean): void {
    const items = virtual.getVirtualItems();
    const wanted = new Set(items.map((item) => item.index));
    for (const [index, line] of drawn) {
      if (anew || !wanted.has(index)) {
        line.remove();
        drawn.delete(index);
      }
    }
    for (const index of wanted) {
      if (drawn.has(index)) continue;
      const line = lineElement(index);
      drawn.set(index, line);
      sizer.append(line);
    }
    sizer.style.height = `${virtual.getTotalSize()}px`;
    drawStrip();
  }

  /** The whole text in one column: the largest weight of every row of pixels, and the part that is seen. */
  function drawStrip(): void {
    const canvas = fitted(strip);
    const [width, height] = [strip.clientWidth, strip.clientHeight];
    const scale = SCALES[scaleName(store.state)];
    const largest = new Float32Array(height);
    for (let line = 0; line < lines.length; line++) {
      const y = Math.floor((line / lines.length) * height);
      for (let t = lines[line].start; t < lines[line].stop; t++) if (weights[t] > largest[y]) largest[y] = weights[t];
    }
    const thick = Math.max(1, Math.ceil(height / Math.max(1, lines.length)));
    for (let y = 0; y < height; y++) {
      if (!largest[y]) continue;
      canvas.fillStyle = css(ramp(scale, toned(largest[y], top, store.state.tone)));
      canvas.fillRect(2, y, width - 4, Math.min(thick, 12));
    }
    const total = virtual.getTotalSize() || 1;
    canvas.strokeStyle = getComputedStyle(strip).getPropertyValue("--mark");
    canvas.lineWidth = 1.5;
    const from = ((virtual.scrollOffset ?? 0) / total) * height;
    canvas.strokeRect(1, from + 1, width - 2, Math.max(4, Math.min(1, scroller.clientHeight / total) * height - 2));
  }

  function layout(): void {
    for (const large of [false, true]) {
      scroller.classList.toggle("large", large);
      linePx = LINE_PX[large ? 1 : 0];
      const letter = h("span", { class: "token probe" }, "0".repeat(50));
      sizer.append(letter);
      across = Math.max(20, Math.floor((scroller.clientWidth - 34) / (letter.getBoundingClientRect().width / 50)));
      letter.remove();
      lines = breakLines(tokens, across);
      if (lines.length > FEW_LINES) break;
    }
    main.classList.toggle("short", lines.length <= SHORT);
    virtual.setOptions(options());
    virtual._willUpdate();
    virtual.measure();
    draw(true);
  }

  const loadText = latest(context.fail);
  const showText = (): void =>
    loadText(async (current) => {
      const axis = shadedAxis();
      const n = axis === "key" ? layerOf(context).n_k : layerOf(context).n_q;
      if (context.scene.has_tokens) {
        const here = data.tokens(store.state.scene, axis);
        await here.load(0, n);
        if (!current()) return;
        tokens = Array.from({ length: n }, (_, t) => here.at(t) ?? "");
      } else tokens = Array.from({ length: n }, (_, t) => `${t} `);
      starts = wordStarts(tokens);
      weights = new Float32Array(n);
      layout();
      showWeights(true);
    });

  const loadWeights = latest(context.fail);
  const showWeights = (scroll: boolean): void =>
    loadWeights(async (current) => {
      const at = headAt(store.state);
      const token = picked();
      const { by } = store.state;
      const [from, to] = range();
      const answer = await (to - from > 1
        ? spanWeights(data, at, [from, to], tokens.length, by)
        : by
          ? data.column(at, from)
          : data.row(at, from));
      const norms = by ? new Float32Array(0) : await data.norms(at);
      if (!current() || answer.length !== tokens.length) return;
      const moved = takenOf(answer, norms);
      taken = grouped() && moved.length ? byWords(moved, starts, "sum") : moved;
      weights = grouped() ? byWords(answer, starts, by ? "mean" : "sum") : answer;
      const hidden = store.state.hide && !store.state.by;
      top = weights.reduce((most, w, t) => (w > most && !(hidden && t === 0) ? w : most), 0) || 1;
      draw(true);
      describe(token);
      if (main.classList.contains("short")) await showBack(at, token, current);
      if (scroll && lines.length)
        virtual.scrollToIndex(lineOf(lines, Math.min(token, tokens.length - 1)), { align: "auto" });
    });

  function describe(token: number): void {
    const [from, to] = range();
    const order = largestOf(weights, grouped() ? starts.slice(0, -1) : undefined).slice(
      0,
      main.classList.contains("short") ? fitting() : LISTED,
    );
    const several = `${count(from)} to ${count(to - 1)}${same() && context.scene.has_tokens ? ` “${shortened(joined(from, to))}”` : ""}`;
    const name = to - from > 1 ? several : same() ? nameOf(token) : count(token);
    heading.textContent = store.state.by ? `What attends to ${name}` : `What ${name} attends to`;
    columns.hidden = !taken.length;
    const show = (t: number): void => virtual.scrollToIndex(lineOf(lines, t), { align: "center" });
    list.replaceChildren(...order.map((t) => listed(t, weights[t], taken[t], () => show(t))));
  }

  /** Those of the tokens that have weight, the heaviest first. */
  const largestOf = (of: Float32Array, among: readonly number[] = Array.from(of.keys())): number[] =>
    among.filter((t) => of[t] > 0).sort((a, b) => of[b] - of[a]);

  /** A line of what is looked at, or looks. */
  function listed(t: number, weight: number, more: number | undefined, act: () => void): HTMLElement {
    const share = h("span", { class: "share" });
    share.style.setProperty("--share", String(weight));
    return h(
      "li",
      {},
      h(
        "button",
        { type: "button", click: act, "data-weight": String(weight), "data-token": t },
        context.scene.has_tokens &&
          h("span", { class: "which" }, shortened(grouped() ? joined(...wordOf(starts, t)) : printable(tokens[t]))),
        h("small", {}, count(t)),
        share,
        h("b", {}, figure(weight)),
        more !== undefined && h("b", { title: TAKEN, "data-taken": more }, figure(Number(more.toPrecision(3)))),
      ),
    );
  }

  /** So many tokens fit into the list of a short text, which stands below it. */
  const fitting = (): number => Math.max(LISTED, Math.floor((aside.clientHeight - ENTRY[1]) / ENTRY[0]));

  /** What the chosen token looks at in other heads, and the direction that is not shaded. */
  async function showBack(at: HeadAt, token: number, current: () => boolean): Promise<void> {
    const { by } = store.state;
    back.replaceChildren();
    if (grouped() || store.state.span >= 0) return;
    const [others, heads] = await Promise.all([
      !same() ? null : by ? data.row(at, token) : data.column(at, token),
      by ? [] : data.token(at.scene, token),
    ]);
    if (!current()) return;
    const name = same() ? nameOf(token) : count(token);
    const order = others ? largestOf(others).slice(0, by ? LISTED : LISTED / 2) : [];
    const sorted = heads.filter(({ keys }) => keys.length).sort((a, b) => b.weights[0] - a.weights[0]);
    if (others)
      back.append(
        h("h2", {}, by ? `What ${name} attends to` : `What attends to ${name}`),
        h("ol", { class: "strongest" }, ...order.map((t) => listed(t, others[t], undefined, () => pick(t)))),
      );
    if (!sorted.length) return;
    back.append(
      h("h2", {}, `What ${name} attends to most in each head`),
      h(
        "ol",
        { class: "strongest" },
        ...sorted.slice(0, fitting() - order.length - 1).map((row) => {
          const { layer, head } = row;
          const line = listed(row.keys[0], row.weights[0], undefined, () => store.set({ layer, head }));
          line.querySelector("button")?.prepend(h("span", { class: "name" }, headName(context.scene, layer, head)));
          return line;
        }),
      ),
    );
  }

  function drawControls(): void {
    controls.replaceChildren(
      choice(
        "Shade",
        [
          ["false", "what the chosen token attends to"],
          ["true", "what attends to the chosen token"],
        ],
        String(store.state.by),
        (by) => {
          const token = picked();
          const { span } = store.state;
          store.set(by === "true" ? { by: true, j: token, span } : { by: false, i: token, span });
        },
      ),
      toneChoice(store),
      ...(context.scene.has_tokens
        ? [
            tick(
              "Words",
              store.state.words,
              (words) => store.set({ words }),
              "Tokens of a word together: the sum of the weights on its keys, the mean of those of its queries.",
            ),
          ]
        : []),
      h(
        "p",
        { class: "help" },
        "Click a token to choose it; with Shift, several: their mean as queries, their sum as keys.",
      ),
    );
  }

  sizer.addEventListener("click", (event) => {
    const token = (event.target as HTMLElement).closest("[data-token]")?.getAttribute("data-token");
    if (token && event.shiftKey) store.set({ span: Number(token) });
    else if (token) pick(Number(token));
  });
  sizer.addEventListener("mousedown", (event) => event.shiftKey && event.preventDefault()); // letters stay unmarked
  strip.addEventListener("click", (event) => {
    const share = event.offsetY / strip.clientHeight;
    virtual.scrollToIndex(Math.floor(share * lines.length), { align: "center" });
  });
  scroller.addEventListener("keydown", (event) => {
    const end = event.shiftKey && store.state.span >= 0 ? store.state.span : picked();
    const line = lines[lineOf(lines, end)];
    if (!line) return;
    const steps: Record<string, number> = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -(line.stop - line.start),
      ArrowDown: line.stop - line.start,
      Home: -Infinity,
      End: Infinity,
    };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const to = Math.max(0, Math.min(tokens.length - 1, end + step));
    if (event.shiftKey) store.set({ span: to });
    else pick(to);
    virtual.scrollToIndex(lineOf(lines, to), { align: "auto" });
  });
  let width = 0;
  const watcher = new ResizeObserver(() => {
    if (scroller.clientWidth === width || !tokens.length) return;
    width = scroller.clientWidth;
    layout();
  });
  watcher.observe(scroller);

  return {
    element,
    update(_, changed) {
      if (touches(changed, "by", "tone", "scene", "words")) drawControls();
      const axis = layerOf(context);
      const other = tokens.length !== (shadedAxis() === "key" ? axis.n_k : axis.n_q);
      if (changed.has("scene") || (changed.has("by") && axis.cross) || other) showText();
      else if (touches(changed, "layer", "head", "i", "j", "by", "hide", "words", "span")) showWeights(false);
      else draw(true);
    },
    destroy() {
      watcher.disconnect();
      unmount();
    },
  };
};
