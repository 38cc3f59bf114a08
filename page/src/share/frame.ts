/** What all figures share: their width, and how they call what they show. */

import type { HeadAt } from "../data";
import type { ScaleName, Tone } from "../numbers/colour";
import { shortened } from "../numbers/format";
import type { Look } from "../parts/pictures";
import type { State } from "../state";
import { headAt, lookOf, scaleName, type Context } from "../views/view";

/** Pixels of a figure's width: 7 inches, the text of a page. */
export const WIDE = 672;

/** How weights become colours, in words. */
export const TONES: Record<Tone, string> = {
  linear: "in proportion to the weight",
  root: "by the square root of the weight",
  log: "by the logarithm of the weight",
};

export const nameOfHead = (context: Context, at: HeadAt = headAt(context.store.state)): string => {
  const scene = context.scenes.find((one) => one.id === at.scene.split(":")[0]) ?? context.scene;
  const { number, numbers } = scene.layers[at.layer];
  return `layer ${number}, head ${numbers[at.head]}`;
};

export const capital = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);
export const ofText = (context: Context): string => `of “${shortened(context.scene.name, 60)}”`;

/** The scale of colours on white paper, whatever the page is. */
export const printed = (state: State): ScaleName => scaleName({ ...state, dark: false });

/** How a map is drawn on white paper. */
export const printedLook = (state: State): Look => ({ ...lookOf(state), scale: printed(state) });
