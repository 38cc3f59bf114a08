/** A drawing of boxes, text, lines and pictures, written as SVG, or as PNG at the resolution of print. */

import { readable } from "../numbers/format";
import type { Pixels } from "../parts/pictures";

/** Pixels of a PNG for each of SVG's 96 to an inch: 300 to an inch. */
export const PRINT = 300 / 96;

/** Pixels that a picture has on a side at least, that no reader blurs its cells. */
const SHARP = 1200;

export const SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif";
export const MONO = "ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace";
export const INK = "#1f2328";
export const SOFT = "#4d5566";
export const LINE = "#c9ced6";

export interface Lettering {
  size?: number;
  fill?: string;
  anchor?: "start" | "middle" | "end";
  bold?: boolean;
  mono?: boolean;
  /** Turned to be read from below. */
  upward?: boolean;
  /** Pixels that the whole text takes. */
  length?: number;
}

/** Text as XML holds it: no controls, nothing that is markup. */
export const escaped = (text: string): string =>
  readable(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

const round = (x: number): string => String(Number(x.toFixed(2)));

export class Drawing {
  height = 0;
  private readonly parts: string[] = [];

  constructor(
    readonly width: number,
    /** What it is, for those who do not see it. */
    public title = "",
  ) {}

  private reach(y: number): void {
    this.height = Math.max(this.height, y);
  }

  box(x: number, y: number, width: number, height: number, fill = "none", stroke = "none", line = 1): void {
    const place = `x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"`;
    this.parts.push(`<rect ${place} fill="${fill}" stroke="${stroke}" stroke-width="${line}"/>`);
    this.reach(y + height);
  }

  text(x: number, y: number, text: string, how: Lettering = {}): void {
    const { size = 12, fill = INK, anchor = "start" } = how;
    const turned = how.upward ? ` transform="rotate(-90 ${round(x)} ${round(y)})"` : "";
    const style =
      `x="${round(x)}" y="${round(y)}" font-size="${round(size)}" fill="${fill}" text-anchor="${anchor}"${turned}` +
      (how.bold ? ' font-weight="600"' : "") +
      (how.mono ? ` font-family="${MONO}"` : "") +
      (how.length ? ` textLength="${round(how.length)}"` : "");
    this.parts.push(`<text ${style} xml:space="preserve">${escaped(text)}</text>`);
    this.reach(y + size * 0.4);
  }

  path(d: string, stroke: string, width: number, dash = ""): void {
    const dashes = dash && ` stroke-dasharray="${dash}"`;
    this.parts.push(`<path d="${d}" fill="none" stroke="${stroke}" stroke-width="${round(width)}"${dashes}/>`);
  }

  picture(x: number, y: number, width: number, height: number, pixels: Omit<Pixels, "whole">, sharp = SHARP): void {
    const place = `x="${round(x)}" y="${round(y)}" width="${round(width)}" height="${round(height)}"`;
    const style = 'preserveAspectRatio="none" style="image-rendering:pixelated"';
    this.parts.push(`<image ${place} ${style} href="${pngOf(pixels, sharp)}"/>`);
    this.reach(y + height);
  }

  /** Sentences below all that is there, broken into lines. */
  caption(text: string, size = 11): void {
    const most = Math.floor((this.width - 16) / (0.52 * size));
    let y = this.height + 10;
    for (const line of wrapped(text, most)) this.text(8, (y += size * 1.4), line, { size, fill: SOFT });
    this.reach(y + 8);
  }

  svg(): string {
    const [w, h] = [round(this.width), round(this.height)];
    return (
      `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}" ` +
      `font-family="${SANS}">\n<title>${escaped(this.title)}</title>\n<rect width="100%" height="100%" fill="#fff"/>\n` +
      `${this.parts.join("\n")}\n</svg>\n`
    );
  }

  async png(): Promise<Blob> {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(this.svg())}`;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [Math.round(this.width * PRINT), Math.round(this.height * PRINT)];
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((resolve, reject) =>
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("This browser draws no PNG.")))),
    );
  }
}

/** Lines of whole words, of so many letters at most, longer words cut. */
export function wrapped(text: string, most: number): string[] {
  const lines: string[] = [""];
  for (const word of text.split(" ")) {
    const parts = word.match(new RegExp(`.{1,${most}}`, "gsu")) ?? [""];
    for (const part of parts) {
      const last = lines[lines.length - 1];
      if (!last) lines[lines.length - 1] = part;
      else if (last.length + 1 + part.length <= most) lines[lines.length - 1] = `${last} ${part}`;
      else lines.push(part);
    }
  }
  return lines;
}

/** Pixels as the address of a PNG, every one of them a square of some. */
function pngOf({ rows, cols, data }: Omit<Pixels, "whole">, sharp: number): string {
  const [small, large] = [document.createElement("canvas"), document.createElement("canvas")];
  [small.width, small.height] = [cols, rows];
  const bytes = new Uint8ClampedArray(data.buffer as ArrayBuffer, data.byteOffset, data.byteLength);
  small.getContext("2d")?.putImageData(new ImageData(bytes, cols, rows), 0, 0);
  const times = Math.max(1, Math.ceil(sharp / Math.max(rows, cols)));
  [large.width, large.height] = [cols * times, rows * times];
  const context = large.getContext("2d") as CanvasRenderingContext2D;
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, large.width, large.height);
  return large.toDataURL("image/png");
}
