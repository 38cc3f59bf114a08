/** Pictures for the example vision transformer: a drawn digit as large as those that it was trained on. */

/** Pixels of a picture, and of a digit, on a side. */
export const SIDE = 48;
export const DIGIT = 16;
/** The grey of a ground, its contrast, and how light a digit is on it. */
const [GREY, CONTRAST, INK] = [0.4, 0.15, 1.1];

/** The mean of a square of pixels (size, size) around a place, in shares; 0 outside. */
function meanIn(pixels: Float32Array, size: number, x0: number, y0: number, wide: number): number {
  const inside = (at: number): number => Math.max(0, Math.min(size, Math.round(at)));
  const [left, right, above, below] = [inside(x0), inside(x0 + wide), inside(y0), inside(y0 + wide)];
  let sum = 0;
  for (let y = above; y < below; y++) for (let x = left; x < right; x++) sum += pixels[y * size + x];
  return sum / Math.max(1, wide * wide);
}

/** The box of what is drawn on (size, size) pixels: its middle and its longer side; null where nothing is. */
export function boxOf(ink: Float32Array, size: number): { x: number; y: number; side: number } | null {
  let [x0, x1, y0, y1] = [size, -1, size, -1];
  ink.forEach((value, p) => {
    if (value < 0.1) return;
    const [x, y] = [p % size, Math.floor(p / size)];
    [x0, x1, y0, y1] = [Math.min(x0, x), Math.max(x1, x), Math.min(y0, y), Math.max(y1, y)];
  });
  if (x1 < 0) return null;
  return { x: (x0 + x1 + 1) / 2, y: (y0 + y1 + 1) / 2, side: Math.max(x1 - x0, y1 - y0) + 1 };
}

/** Puts what is drawn on (size, size) pixels on a ground (SIDE, SIDE) where it was drawn, DIGIT pixels large. */
export function placed(ground: Float32Array, ink: Float32Array, size: number): Float32Array {
  const made = ground.slice();
  const box = boxOf(ink, size);
  if (!box) return made;
  const corner = (at: number): number =>
    Math.max(0, Math.min(SIDE - DIGIT, Math.round((at / size) * SIDE - DIGIT / 2)));
  const [left, above, step] = [corner(box.x), corner(box.y), box.side / DIGIT];
  const [x0, y0] = [box.x - box.side / 2, box.y - box.side / 2];
  for (let r = 0; r < DIGIT; r++)
    for (let c = 0; c < DIGIT; c++) {
      const at = (above + r) * SIDE + left + c;
      const light = INK * meanIn(ink, size, x0 + c * step, y0 + r * step, step);
      made[at] = Math.min(1, Math.max(made[at], light));
    }
  return made;
}

/** A photograph (SIDE, SIDE) as the model saw them: around a grey, with little contrast. */
export function toned(pixels: Float32Array): Float32Array {
  const mean = pixels.reduce((sum, x) => sum + x, 0) / pixels.length;
  const deviation = Math.sqrt(pixels.reduce((sum, x) => sum + (x - mean) ** 2, 0) / pixels.length);
  return pixels.map((x) => Math.min(1, Math.max(0, ((x - mean) / (deviation + 0.05)) * CONTRAST + GREY)));
}

/** Nothing but grey. */
export const plainGround = (): Float32Array => new Float32Array(SIDE * SIDE).fill(GREY);

/** Pixels from 0 to 1 as base64 of bytes. */
export const encoded = (pixels: Float32Array): string =>
  btoa(String.fromCharCode(...pixels.map((x) => Math.round(255 * x))));
