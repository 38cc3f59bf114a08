/** A text of tokens in lines, shaded by their weights; only the lines that are seen are elements. */

import { elementScroll, observeElementOffset, observeElementRect, Virtualizer } from "@tanstack/virtual-core";

import { fitted, h } from "../dom";
import { css, ramp, readableOn, SCALES, toned, type ScaleName, type Tone } from "../numbers/colour";
import { figure, readable, shortened } from "../numbers/format";
import { inside } from "../numbers/windows";
import { breakLines, lineOf, type Line } from "./lines";

/** Pixels of a line: of a text, and of one so short that it is written large. */
const LINE_PX = [28, 44] as const;
/** Lines up to which a text is written large. */
const FEW_LINES = 3;
const LEAST_COLUMNS = 12;

/** How the lines look, and what happens to them. */
export interface Reader {
  scale(): ScaleName;
  tone(): Tone;
  /** The tokens [from, to) that are marked as chosen. */
  chosen(): readonly [number, number];
  nameOf(token: number): string;
  pick(token: number, several: boolean): void;
  /** Where arrow keys go on from. */
  end(several: boolean): number;
}

export class ShadedLines {
  private readonly sizer = h("div", { class: "sizer" });
  readonly element = h(
    "div",
    { class: "text-scroll sheet", tabindex: 0, role: "listbox", "aria-multiselectable": "true" },
    this.sizer,
  );
  readonly strip = h("canvas", {
    class: "strip",
    title: "Where in the text the weight lies. Click to go there.",
    "aria-hidden": "true",
  });
  private tokens: readonly string[] = [];
  private weights: Float32Array = new Float32Array(0);
  private top = 1;
  lines: Line[] = [];
  private linePx: number = LINE_PX[0];
  /** Columns of a line: no token is longer. */
  private across: number = LEAST_COLUMNS;
  private width = 0;
  private readonly drawn = new Map<number, HTMLElement>();
  private readonly virtual: Virtualizer<HTMLElement, HTMLElement>;
  private readonly unmount: () => void;
  private readonly watcher: ResizeObserver;

  /** laidOut: called when the text was broken into lines. */
  constructor(
    private readonly reader: Reader,
    private readonly laidOut: () => void,
  ) {
    this.virtual = new Virtualizer<HTMLElement, HTMLElement>(this.options());
    this.unmount = this.virtual._didMount();
    this.element.addEventListener("click", (event) => this.click(event));
    this.element.addEventListener("mousedown", (event) => event.shiftKey && event.preventDefault()); // letters stay unmarked
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.strip.addEventListener("click", (event) => {
      const share = event.offsetY / this.strip.clientHeight;
      this.virtual.scrollToIndex(Math.floor(share * this.lines.length), { align: "center" });
    });
    this.watcher = new ResizeObserver(() => {
      if (this.element.clientWidth === this.width || !this.tokens.length) return;
      this.width = this.element.clientWidth;
      this.layout();
    });
    this.watcher.observe(this.element);
  }

  setTokens(tokens: readonly string[]): void {
    this.tokens = tokens;
    this.weights = new Float32Array(tokens.length);
    this.layout();
  }

  /** Shades tokens by weights, `top` being the darkest. */
  shade(weights: Float32Array, top: number): void {
    [this.weights, this.top] = [weights, top];
    this.draw(true);
  }

  /** Scrolls to a token. */
  show(token: number, align: "auto" | "center"): void {
    if (this.lines.length)
      this.virtual.scrollToIndex(lineOf(this.lines, Math.min(token, this.tokens.length - 1)), { align });
  }

  redraw(): void {
    this.draw(true);
  }

  destroy(): void {
    this.watcher.disconnect();
    this.unmount();
  }

  private options() {
    return {
      count: this.lines.length,
      getScrollElement: () => this.element,
      estimateSize: () => this.linePx,
      overscan: 8,
      scrollToFn: elementScroll,
      observeElementRect,
      observeElementOffset,
      onChange: () => this.draw(false),
    };
  }

  private layout(): void {
    for (const large of [false, true]) {
      this.element.classList.toggle("large", large);
      this.linePx = LINE_PX[large ? 1 : 0];
      const letter = h("span", { class: "token probe" }, "0".repeat(50));
      this.sizer.append(letter);
      const wide = letter.getBoundingClientRect().width / 50;
      this.across = Math.max(LEAST_COLUMNS, Math.floor((this.element.clientWidth - 34) / wide));
      letter.remove();
      this.lines = breakLines(this.tokens, this.across);
      if (this.lines.length > FEW_LINES) break;
    }
    this.laidOut();
    this.virtual.setOptions(this.options());
    this.virtual._willUpdate();
    this.virtual.measure();
    this.draw(true);
  }

  private draw(anew: boolean): void {
    const wanted = new Set(this.virtual.getVirtualItems().map((item) => item.index));
    for (const [index, line] of this.drawn) {
      if (anew || !wanted.has(index)) {
        line.remove();
        this.drawn.delete(index);
      }
    }
    for (const index of wanted) {
      if (this.drawn.has(index)) continue;
      const line = this.line(index);
      this.drawn.set(index, line);
      this.sizer.append(line);
    }
    this.sizer.style.height = `${this.virtual.getTotalSize()}px`;
    this.drawStrip();
  }

  private line(index: number): HTMLElement {
    const { start, stop } = this.lines[index];
    const line = h("div", { class: "line", role: "presentation" });
    line.style.transform = `translateY(${index * this.linePx}px)`;
    const [from, to] = this.reader.chosen();
    for (let t = start; t < stop; t++) line.append(this.token(t, t >= from && t < to));
    return line;
  }

  private token(t: number, chosen: boolean): HTMLElement {
    const weight = this.weights[t];
    const span = h("span", { class: "token", "data-token": t, role: "option", "aria-selected": String(chosen) });
    span.textContent = shortened(readable(this.tokens[t]).replaceAll("\n", "↵"), this.across) || "∅";
    const place = weight > 0 ? toned(weight, this.top, this.reader.tone()) : 0;
    if (place > 0.03) {
      const colour = ramp(SCALES[this.reader.scale()], place);
      span.style.background = css(colour);
      span.style.color = readableOn(colour);
    } else if (Number.isNaN(weight)) span.classList.add("hidden");
    if (chosen) span.classList.add("chosen");
    span.title = `${this.reader.nameOf(t)}: ${Number.isNaN(weight) ? "hidden by the mask" : figure(weight)}`;
    return span;
  }

  /** The whole text in one column: the largest weight of every row of pixels, and the part that is seen. */
  private drawStrip(): void {
    const canvas = fitted(this.strip);
    const [width, height] = [this.strip.clientWidth, this.strip.clientHeight];
    const scale = SCALES[this.reader.scale()];
    const { lines, weights } = this;
    const largest = new Float32Array(height);
    for (let line = 0; line < lines.length; line++) {
      const y = Math.floor((line / lines.length) * height);
      for (let t = lines[line].start; t < lines[line].stop; t++) if (weights[t] > largest[y]) largest[y] = weights[t];
    }
    const thick = Math.max(1, Math.ceil(height / Math.max(1, lines.length)));
    for (let y = 0; y < height; y++) {
      if (!largest[y]) continue;
      canvas.fillStyle = css(ramp(scale, toned(largest[y], this.top, this.reader.tone())));
      canvas.fillRect(2, y, width - 4, Math.min(thick, 12));
    }
    const total = this.virtual.getTotalSize() || 1;
    canvas.strokeStyle = getComputedStyle(this.strip).getPropertyValue("--mark");
    canvas.lineWidth = 1.5;
    const from = ((this.virtual.scrollOffset ?? 0) / total) * height;
    const seen = Math.min(1, this.element.clientHeight / total) * height;
    canvas.strokeRect(1, from + 1, width - 2, Math.max(4, seen - 2));
  }

  private click(event: MouseEvent): void {
    const token = (event.target as HTMLElement).closest("[data-token]")?.getAttribute("data-token");
    if (token) this.reader.pick(Number(token), event.shiftKey);
  }

  private key(event: KeyboardEvent): void {
    const end = this.reader.end(event.shiftKey);
    const line = this.lines[lineOf(this.lines, end)];
    const step = line && stepOf(event.key, line.stop - line.start);
    if (step === undefined) return;
    event.preventDefault();
    const to = inside(end + step, this.tokens.length);
    this.reader.pick(to, event.shiftKey);
    this.show(to, "auto");
  }
}

/** How many tokens a key goes on, in lines of so many tokens. */
export function stepOf(key: string, line: number): number | undefined {
  const steps: Record<string, number> = {
    ArrowLeft: -1,
    ArrowRight: 1,
    ArrowUp: -line,
    ArrowDown: line,
    Home: -Infinity,
    End: Infinity,
  };
  return steps[key];
}
