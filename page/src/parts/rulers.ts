/** Rulers of a map: tokens where there is room for them, numbers where there is not. */

import type { Tokens } from "../data";
import { fitted } from "../dom";
import { count, printable } from "../numbers/format";

/** How an axis lies on the screen: pixel = start + index · step. */
export interface Axis {
  start: number;
  step: number;
  n: number;
  tokens: Tokens | null;
  /** The index to mark, or −1. */
  marked: number;
}

/** The pixels from one label to the next that tokens need. */
const LINE = 8;

/** The largest letters of a label. */
const LARGEST = 12;

/** The pixels that stay free between labels, whose letters are not quite as high as their size says. */
const APART = 0.5;

const STEPS = [1, 2, 5];

/** The smallest of 1, 2, 5, 10, … that leaves so many pixels between marks. */
export function markEvery(step: number, room: number): number {
  for (let power = 1; ; power *= 10) {
    for (const s of STEPS) if (s * power * step >= room) return s * power;
  }
}

/** The size of tokens that are so far apart, their lines one above the other; 0 where none can be read. */
export function letterSize(step: number): number {
  return step < LINE ? 0 : Math.min(LARGEST, step - APART);
}

export function drawRuler(canvas: HTMLCanvasElement, axis: Axis, vertical: boolean, arrived: () => void): void {
  const context = fitted(canvas);
  const style = getComputedStyle(canvas);
  const [length, thickness] = vertical
    ? [canvas.clientHeight, canvas.clientWidth]
    : [canvas.clientWidth, canvas.clientHeight];
  const first = Math.max(0, Math.floor(-axis.start / axis.step));
  const last = Math.min(axis.n - 1, Math.ceil((length - axis.start) / axis.step));
  if (last < first) return;
  const size = axis.tokens ? letterSize(axis.step) : 0;
  const words = size > 0;
  if (words)
    void axis.tokens?.load(first, last + 1).then(
      (fresh) => fresh && arrived(),
      () => {},
    );
  const every = words ? 1 : markEvery(axis.step, vertical ? 44 : 72);
  const labelOf = (index: number): string => (words ? printable(axis.tokens?.at(index) ?? "") : count(index));

  context.textBaseline = "middle";
  context.font = `${words ? size : 11}px ${style.getPropertyValue(words ? "--mono" : "--sans")}`;
  // Tokens of a letter or two lie as they are read; longer ones are turned, all of them.
  const widest = (): number => {
    let most = 0;
    for (let index = first; index <= last; index++)
      most = Math.max(most, context.measureText(labelOf(index).slice(0, 80)).width);
    return most;
  };
  const lying = !vertical && (!words || axis.step > 70 || widest() + APART <= axis.step);
  const put = (index: number, marked: boolean): void => {
    let place = axis.start + (index + 0.5) * axis.step;
    if (place < -2 || place > length + 2) return;
    if (marked || !words) place = Math.max(8, Math.min(length - 8, place)); // the first and the last are not cut off
    context.save();
    if (vertical) context.translate(thickness - 7, place);
    else context.translate(place, thickness - (lying ? 12 : 7));
    if (!vertical && !lying) context.rotate(Math.PI / 2);
    context.textAlign = lying ? "center" : "right";
    const shown = cut(context, labelOf(index), lying ? Math.max(axis.step, 70) : thickness - 12);
    if (marked) {
      const width = context.measureText(shown).width + 8;
      context.fillStyle = style.getPropertyValue("--accent");
      context.fillRect(lying ? -width / 2 : 4 - width, -8, width, 16);
    }
    context.fillStyle = style.getPropertyValue(marked ? "--on-accent" : "--ink-soft");
    context.fillText(shown, 0, 1);
    context.restore();
  };
  context.fillStyle = style.getPropertyValue("--line-strong");
  for (let index = Math.ceil(first / every) * every; index <= last; index += every) {
    if (Math.abs(index - axis.marked) * axis.step >= (words ? 1 : 40) || axis.marked < 0) put(index, false);
    const place = Math.round(axis.start + (index + 0.5) * axis.step);
    if (vertical) context.fillRect(thickness - 4, place, 4, 1);
    else context.fillRect(place, thickness - 4, 1, 4);
    context.fillStyle = style.getPropertyValue("--line-strong");
  }
  if (axis.marked >= 0) put(axis.marked, true);
}

function cut(context: CanvasRenderingContext2D, text: string, room: number): string {
  let letters = Array.from(text.slice(0, 200));
  if (text.length <= 200 && context.measureText(text).width <= room) return text;
  while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) letters = letters.slice(0, -1);
  return `${letters.join("")}…`;
}
