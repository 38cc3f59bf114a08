/** A picture with the heat of weights on its patches: large, to choose patches on, or as small as a head's. */

import type { Grid } from "../data";
import { fitted, h, perFrame } from "../dom";
import type { ScaleName, Tone } from "../numbers/colour";
import { heatPixels, moments, patchAt, pooled, regionOf, secondsText, stepped } from "../numbers/grids";

export interface HeatLook {
  tone: Tone;
  scale: ScaleName;
}

/** What is drawn: weights on patches up to `top`, over a picture where it is known. */
export interface Heat {
  grid: Grid;
  image: ImageBitmap | null;
  /** None: the picture alone. */
  weights: Float32Array | null;
  top: number;
  look: HeatLook;
}

/** The width of a picture over its height. */
export const aspectOf = ({ kind, width, height, rows, columns }: Grid): number =>
  kind === "sound" ? 5 : width && height ? width / height : columns / rows;

type Canvas = CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D;

/** Draws a picture in so many pixels, in grey where heat comes on it. */
export function paintPicture(context: Canvas, { image, weights }: Heat, width: number, height: number): void {
  if (!image) return;
  if (weights) context.filter = "grayscale(1)";
  context.drawImage(image, 0, 0, width, height);
  context.filter = "none";
}

/** Draws a picture and its heat in so many pixels. */
export function paintHeat(context: Canvas, heat: Heat, width: number, height: number): void {
  const { grid, image, weights, top, look } = heat;
  paintPicture(context, heat, width, height);
  if (!weights) return;
  const pixels = heatPixels(weights, top, { ...look, over: image !== null });
  const small = new OffscreenCanvas(grid.columns, grid.rows);
  const data = new ImageData(new Uint8ClampedArray(pixels.buffer as ArrayBuffer), grid.columns, grid.rows);
  small.getContext("2d")?.putImageData(data, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, width, height);
  context.imageSmoothingEnabled = true;
}

/** A small picture with its heat. */
export function heatThumb(heat: Heat, wide: number): HTMLCanvasElement {
  const high = Math.max(8, Math.round(wide / aspectOf(heat.grid)));
  const canvas = h("canvas", { width: wide, height: high, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const { grid, heat: weights } = pooled(heat.grid, heat.weights ?? new Float32Array(0), wide / 2);
  if (context) paintHeat(context, { ...heat, grid, weights }, wide, high);
  return canvas;
}

/** Pixels below a sound for its moments. */
const AXIS = 18;

interface Acts {
  /** A patch was chosen, or the region from one to another. */
  pick(patch: number, other: number): void;
  /** A patch is pointed at; −1: none is. */
  point(patch: number): void;
}

const STEPS: Record<string, readonly [down: number, right: number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

/** The large picture: a click chooses a patch, a drag a region, and so do arrow keys, with Shift. */
export class HeatPicture {
  private readonly canvas = h("canvas", { "aria-hidden": "true" });
  readonly element = h(
    "div",
    { class: "heat-stage", tabindex: 0, role: "application", "aria-roledescription": "picture of patches" },
    this.canvas,
  );
  private heat: Heat | null = null;
  private marked: readonly number[] = [];
  private pointed = -1;
  /** The patch where a drag began, and where it is; −1: none is going on. */
  private from = -1;
  private to = -1;
  private readonly draw = perFrame(() => this.paint());
  private readonly watcher = new ResizeObserver(this.draw);

  constructor(private readonly acts: Acts) {
    this.watcher.observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerleave", () => this.hover(-1));
    this.canvas.addEventListener("pointerdown", (event) => this.begin(event));
    this.canvas.addEventListener("pointerup", () => this.end());
    this.canvas.addEventListener("pointercancel", () => (this.from = -1));
    this.element.addEventListener("keydown", (event) => this.key(event));
  }

  /** marked: the chosen patches, the first the one that is moved from. */
  show(heat: Heat, marked: readonly number[], label: string): void {
    this.heat = heat;
    this.marked = marked;
    this.element.style.setProperty("--aspect", String(aspectOf(heat.grid)));
    this.element.classList.toggle("sound", heat.grid.kind === "sound");
    this.element.setAttribute("aria-label", `${label} Arrow keys choose a patch, with Shift a region.`);
    this.draw();
  }

  destroy(): void {
    this.watcher.disconnect();
  }

  private get axis(): number {
    return this.heat?.grid.kind === "sound" ? AXIS : 0;
  }

  private at({ offsetX, offsetY }: PointerEvent): number {
    if (!this.heat) return -1;
    const { clientWidth, clientHeight } = this.canvas;
    return patchAt(this.heat.grid, offsetX / clientWidth, offsetY / (clientHeight - this.axis));
  }

  private begin(event: PointerEvent): void {
    this.from = this.to = this.at(event);
    if (this.from >= 0 && event.pointerType !== "touch") this.canvas.setPointerCapture(event.pointerId);
  }

  private move(event: PointerEvent): void {
    const patch = this.at(event);
    if (this.from >= 0 && patch >= 0) this.to = patch;
    this.hover(patch);
  }

  private end(): void {
    if (this.from >= 0) this.acts.pick(this.from, this.to);
    this.from = -1;
    this.draw();
  }

  private hover(patch: number): void {
    if (patch === this.pointed) return;
    this.pointed = patch;
    this.acts.point(patch);
    this.draw();
  }

  private key(event: KeyboardEvent): void {
    const step = STEPS[event.key];
    if (!step || !this.heat) return;
    event.preventDefault();
    event.stopPropagation();
    const [first = 0] = this.marked;
    const last = event.shiftKey ? (this.marked.at(-1) ?? first) : first;
    const next = stepped(this.heat.grid, last, ...step);
    this.marked = event.shiftKey ? [first, next] : [next]; // the next key does not wait for weights
    this.acts.pick(event.shiftKey ? first : next, next);
  }

  private paint(): void {
    const { heat } = this;
    if (!heat || !this.canvas.clientWidth) return;
    const context = fitted(this.canvas);
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight - this.axis;
    paintHeat(context, heat, width, height);
    const style = getComputedStyle(this.canvas);
    const box = (patches: readonly number[], colour: string, line: number): void =>
      outline(context, heat.grid, patches, [width, height], colour, line);
    const drawn = this.from >= 0 ? regionOf(heat.grid, this.from, this.to) : this.marked;
    box(drawn, style.getPropertyValue("--halo"), 5);
    box(drawn, style.getPropertyValue("--mark"), 2.5);
    if (this.pointed >= 0) box([this.pointed], style.getPropertyValue("--mark"), 1);
    if (this.axis) drawMoments(context, heat.grid, width, height, style);
  }
}

/** Draws a box around patches that make a rectangle. */
function outline(
  context: CanvasRenderingContext2D,
  { rows, columns }: Grid,
  patches: readonly number[],
  [width, height]: readonly [number, number],
  colour: string,
  line: number,
): void {
  if (!patches.length) return;
  const [first, last] = [Math.min(...patches), Math.max(...patches)];
  const [wide, high] = [width / columns, height / rows];
  const [x, y] = [(first % columns) * wide, Math.floor(first / columns) * high];
  context.strokeStyle = colour;
  context.lineWidth = line;
  const [right, below] = [((last % columns) + 1) * wide, (Math.floor(last / columns) + 1) * high];
  context.strokeRect(x, y, Math.max(1, right - x), Math.max(1, below - y));
}

/** Draws the moments of a sound below it. */
function drawMoments(
  context: CanvasRenderingContext2D,
  { seconds }: Grid,
  width: number,
  height: number,
  style: CSSStyleDeclaration,
): void {
  if (!seconds) return;
  context.fillStyle = style.getPropertyValue("--ink-soft");
  context.font = `11px ${style.getPropertyValue("--sans")}`;
  for (const at of moments(seconds, width / 70)) {
    const x = (at / seconds) * width;
    context.fillRect(Math.min(x, width - 1), height, 1, 4);
    context.textAlign = x < 20 ? "left" : x > width - 24 ? "right" : "center";
    context.fillText(`${secondsText(at)} s`, x, height + AXIS - 4);
  }
}
