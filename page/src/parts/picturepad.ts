/** Draw a digit on a picture, open a photograph, or take another stored one: the model that runs here reads it. */

import { readsPictures } from "../data";
import { h } from "../dom";
import { encoded, placed, plainGround, SIDE, toned } from "../numbers/digits";
import type { Context } from "../views/view";
import { bar } from "./tokenrow";

/** Pictures that came with the model. */
const STORED = 20;
/** Pixels of a side of the pad, and of the pen. */
const [PAD, PEN] = [192, 18];
const LISTED = 3;

export interface PicturePad {
  readonly element: HTMLElement;
}

/** Grey pixels (SIDE, SIDE) from 0 to 1 of the middle of a picture. */
function greyOf(image: ImageBitmap): Float32Array {
  const side = Math.min(image.width, image.height);
  const context = new OffscreenCanvas(SIDE, SIDE).getContext("2d") as OffscreenCanvasRenderingContext2D;
  context.imageSmoothingQuality = "high";
  const [x, y] = [(image.width - side) / 2, (image.height - side) / 2];
  context.drawImage(image, x, y, side, side, 0, 0, SIDE, SIDE);
  const { data } = context.getImageData(0, 0, SIDE, SIDE);
  return Float32Array.from({ length: SIDE * SIDE }, (_, p) => (data[4 * p] + data[4 * p + 1] + data[4 * p + 2]) / 765);
}

/** What the model makes of the picture. */
function oddsOf({ scene }: Context): HTMLElement {
  const bars = (scene.odds ?? [])
    .slice(0, LISTED)
    .map(({ token, probability }) =>
      bar(h("span", { class: "word" }, token), probability, `${(100 * probability).toFixed(1)} %`),
    );
  return h("div", {}, h("h2", {}, "The model says"), h("ol", { class: "shares next" }, ...bars));
}

/** The pad itself: white strokes on the ground of the picture that is made. */
class Pad {
  readonly canvas = h("canvas", {
    ...{ width: PAD, height: PAD, class: "pad", role: "img" },
    "aria-label": "Draw a digit here with the pointer; the stored pictures need none.",
  });
  private readonly context = this.canvas.getContext("2d", { willReadFrequently: true }) as CanvasRenderingContext2D;
  private last: [number, number] | null = null;

  constructor() {
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.last = this.at(event);
      this.line(event);
    });
    this.canvas.addEventListener("pointermove", (event) => this.last && this.line(event));
    this.canvas.addEventListener("pointerup", () => (this.last = null));
  }

  clear(): void {
    this.context.clearRect(0, 0, PAD, PAD);
  }

  /** How much of each pixel is drawn on. */
  ink(): Float32Array {
    const { data } = this.context.getImageData(0, 0, PAD, PAD);
    return Float32Array.from({ length: PAD * PAD }, (_, p) => data[4 * p + 3] / 255);
  }

  private at({ offsetX, offsetY }: PointerEvent): [number, number] {
    const by = PAD / this.canvas.clientWidth;
    return [offsetX * by, offsetY * by];
  }

  private line(event: PointerEvent): void {
    const { context, last } = this;
    if (!last) return;
    const to = this.at(event);
    Object.assign(context, { lineWidth: PEN, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
    context.beginPath();
    context.moveTo(...last);
    context.lineTo(...to);
    context.stroke();
    this.last = to;
  }
}

/** What digits are drawn on: a photograph stays, although each picture is a scene of its own. */
let ground = plainGround();

export function picturePad(context: Context): PicturePad {
  const { scene } = context;
  if (!readsPictures(scene)) return { element: h("div", { hidden: true }) };
  const problem = h("p", { class: "problem", role: "alert" });
  const run = (picture: string): void => {
    problem.textContent = "";
    const failed = (error: unknown): void => void (problem.textContent = (error as Error).message);
    context.run({ ...scene.settings!, picture }, "drawing").catch(failed);
  };
  const pad = new Pad();
  const read = (ink = pad.ink()): void => run(encoded(placed(ground, ink, PAD)));
  const readDrawing = (): void => {
    const ink = pad.ink();
    if (ink.some((x) => x > 0)) read(ink);
    else problem.textContent = "Nothing is drawn yet: draw a digit on the grey square.";
  };
  const open = (file: Blob | undefined): void => {
    if (!file) return;
    const take = (image: ImageBitmap): void => {
      ground = toned(greyOf(image));
      read();
    };
    createImageBitmap(file).then(take, () => (problem.textContent = "This file is no picture that the browser reads."));
  };
  const stored = Number(scene.settings?.picture);
  const next = String(Number.isNaN(stored) ? 0 : (stored + 1) % STORED);
  const file = h("input", { type: "file", accept: "image/*", hidden: true, change: () => open(file.files?.[0]) });
  const element = h(
    "section",
    { class: "picture-pad", "aria-label": "Another picture" },
    oddsOf(context),
    pad.canvas,
    h(
      "div",
      { class: "pad-acts" },
      h("button", { type: "button", click: readDrawing }, "Read the drawing"),
      h("button", { type: "button", click: () => pad.clear() }, "Clear the pad"),
      h("button", { type: "button", "data-focus": "next", click: () => run(next) }, "Another stored picture"),
      h("button", { type: "button", click: () => file.click() }, "Open a photograph"),
      h("p", { class: "help" }, "A digit that you draw is put on grey, or on a photograph that you open or drop here."),
      problem,
    ),
    file,
  );
  element.addEventListener("dragover", (event) => event.preventDefault());
  element.addEventListener("drop", (event) => {
    event.preventDefault();
    open(event.dataTransfer?.files[0]);
  });
  return { element };
}
