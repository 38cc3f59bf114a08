/** Lists of shares as figures. */

import { shortened } from "../numbers/format";
import { INK, SOFT, type Drawing } from "./drawing";

export const BLUE = "#1f5c9e";
export const ORANGE = "#c2410c";
const TRACK = "#dfe3ea";

export interface Bar {
  name: string;
  /** Stands beside the name, in grey. */
  about?: string;
  /** How much of its track is filled, from 0 to 1. */
  share: number;
  said: string;
  fill?: string;
}

export interface BarPlace {
  x: number;
  y: number;
  width: number;
  /** Pixels of the names. */
  names: number;
  mono?: boolean;
}

/** Pixels from one bar to the next. */
export const BAR = 18;
/** Pixels of the number at a bar's end. */
const SAID = 52;

/** Draws bars one below the other, all on tracks of one length; returns where they end. */
export function drawBars(drawing: Drawing, bars: readonly Bar[], place: BarPlace): number {
  const { x, width, names, mono } = place;
  const track = width - names - SAID;
  let y = place.y;
  for (const { name, about, share, said, fill } of bars) {
    drawing.text(x, y + 11, shortened(name, Math.floor((about ? names - 34 : names) / 7)), { size: 11, mono });
    if (about) drawing.text(x + names - 6, y + 11, about, { size: 9.5, fill: SOFT, anchor: "end" });
    drawing.box(x + names, y + 3, track, 8, TRACK);
    drawing.box(x + names, y + 3, track * Math.max(0, Math.min(1, share)), 8, fill ?? BLUE);
    drawing.text(x + width, y + 11, said, { size: 11, anchor: "end", fill: INK });
    y += BAR;
  }
  return y;
}
