/** A text of tokens broken into lines, by columns of a monospaced font, so that no line has to be measured. */

import { columns, readable } from "../numbers/format";

export interface Line {
  /** Tokens [start, stop). */
  start: number;
  stop: number;
}

export function breakLines(tokens: readonly string[], width: number): Line[] {
  const lines: Line[] = [];
  let start = 0;
  let used = 0;
  tokens.forEach((token, index) => {
    const wide = Math.min(width, columns(readable(token).replaceAll("\n", "↵"))); // longer ones are cut where they are drawn
    if (used > 0 && used + wide > width) {
      lines.push({ start, stop: index });
      [start, used] = [index, 0];
    }
    used += wide;
    if (token.includes("\n")) {
      lines.push({ start, stop: index + 1 });
      [start, used] = [index + 1, 0];
    }
  });
  if (start < tokens.length) lines.push({ start, stop: tokens.length });
  return lines;
}

/** The line that holds a token, by bisection. */
export function lineOf(lines: readonly Line[], token: number): number {
  let [low, high] = [0, lines.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lines[middle].stop <= token) low = middle + 1;
    else high = middle;
  }
  return low;
}
