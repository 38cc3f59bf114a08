/** Colour scales whose order survives colour blindness, greyscale and print; the same as in regard's other pictures. */

import { halfValues } from "./half";

type Rgb = readonly [number, number, number];

const anchors = (text: string): Rgb[] =>
  text.split(" ").map((hex) => [0, 2, 4].map((k) => parseInt(hex.slice(k, k + 2), 16)) as unknown as Rgb);

/** From nothing to everything. Viridis: Smith and van der Walt, 2015 (CC0). Cividis: Nuñez, Anderton and Renslow, 2018. */
export const SCALES = {
  viridis: anchors(
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c 1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725",
  ),
  cividis: anchors("00204d 00336f 39486b 575c6d 707173 8a8779 a69d75 c4b56c e4cf5b ffea46"),
  ink: anchors("eef1f6 d3dfec b3cce1 8eb6d6 669dc9 4482b8 2f67a3 244d8a 1e346d 191d4c"),
  night: anchors("1c212c 20304a 24446b 2b5b92 3a75b6 5793cf 7db0e2 a8cbf0 d0e3f8 f3f8ff"),
} as const;

/** Negative, zero, positive: orange and blue differ for every kind of colour vision. */
export const SIGNED = anchors("8a3d00 c4681a e89a55 f6cfa8 f4f4f4 b4d2ec 6aa6dc 2f74b8 0f4680");

/** The same on dark paper. */
const SIGNED_NIGHT = anchors("ffc48f e0924f a9652a 63422a 20242c 29476a 3c76a8 6aaae0 b4dafc");

/** The scale of signed numbers that goes with one of weights: its middle is the colour of nothing there. */
export const signedScale = (scale: ScaleName): readonly Rgb[] => (scale === "night" ? SIGNED_NIGHT : SIGNED);

export type ScaleName = keyof typeof SCALES;
export type Tone = "linear" | "root" | "log";

/** How many decades a logarithmic scale shows. */
export const DECADES = 4;

export function ramp(scale: readonly Rgb[], at: number): Rgb {
  const x = Math.min(1, Math.max(0, at)) * (scale.length - 1);
  const k = Math.min(Math.floor(x), scale.length - 2);
  const mix = (c: 0 | 1 | 2): number => Math.round(scale[k][c] + (x - k) * (scale[k + 1][c] - scale[k][c]));
  return [mix(0), mix(1), mix(2)];
}

export const css = ([r, g, b]: Rgb): string => `rgb(${r} ${g} ${b})`;

/** Where a weight lies on the scale from 0 to 1, `top` being its end. */
export function toned(weight: number, top: number, tone: Tone): number {
  const share = weight / top;
  if (!(share > 0)) return 0;
  if (tone === "linear") return Math.min(1, share);
  if (tone === "root") return Math.min(1, Math.sqrt(share));
  return Math.min(1, Math.max(0, 1 + Math.log10(share) / DECADES));
}

/** The weight at a place of the scale: `toned` backwards. */
export function weightAt(place: number, top: number, tone: Tone): number {
  if (tone === "linear") return top * place;
  if (tone === "root") return top * place * place;
  return top * 10 ** ((place - 1) * DECADES);
}

/** Near black or near white, whichever is read better on a colour (WCAG relative luminance). */
export function readableOn(colour: Rgb): string {
  const [r, g, b] = colour.map((c) => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#101010" : "#f8f8f8";
}

const STEPS = 512;

function pack([r, g, b]: Rgb): number {
  return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
}

/** The pixel (RGBA, little endian) of every half float, so that colouring a tile is a look-up; NaN is transparent. */
export function pixelTable(scale: readonly Rgb[], top: number, tone: Tone): Uint32Array {
  const steps = Uint32Array.from({ length: STEPS + 1 }, (_, k) => pack(ramp(scale, k / STEPS)));
  return Uint32Array.from(halfValues, (value) =>
    Number.isNaN(value) ? 0 : steps[Math.round(toned(value, top, tone) * STEPS)],
  );
}

/** Pixels of signed numbers, ±top being the ends of the scale. */
export function signedPixels(values: Float32Array, scale: readonly Rgb[], top: number, tone: Tone): Uint32Array {
  return Uint32Array.from(values, (value) => {
    if (Number.isNaN(value)) return 0;
    const place = toned(Math.abs(value), top, tone) / 2;
    return pack(ramp(scale, 0.5 + (value < 0 ? -place : place)));
  });
}
