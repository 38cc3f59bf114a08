/** A text of tokens broken into lines, by columns of a monospaced font, so that no line has to be measured. */

import { columns, readable } from "../numbers/format";

export interface Line {
  /** Tokens [start, stop). */
  start: number;
  stop: number;
}

/** Letters of scripts that have no blanks between words. */
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]/u;
/** Bytes of a letter after its first, and pieces of a word after its first. */
const GOES_ON = /^(?:[₂₃₄]$|##)/;

/** Whether a line may end between two tokens; `spaced`: the text has blanks between its words. */
function mayBreak(before: string, token: string, spaced: boolean): boolean {
  if (GOES_ON.test(token)) return false;
  return !spaced || /\s$/.test(before) || /^\s/.test(token) || UNSPACED.test(before) || UNSPACED.test(token);
}

/** Lines of so many columns. They end between words; inside of one only where it is longer than a line. */
export function breakLines(tokens: readonly string[], width: number): Line[] {
  const lines: Line[] = [];
  const spaced = tokens.some((token) => /\s/.test(token));
  // Tokens longer than a line are cut where they are drawn.
  const wide = tokens.map((token) => Math.min(width, columns(readable(token).replaceAll("\n", "↵"))));
  let [start, used, best] = [0, 0, 0]; // of the line: its first token, its columns, and where it ends best
  const end = (stop: number): void => {
    lines.push({ start, stop });
    [start, best] = [stop, stop];
  };
  tokens.forEach((token, index) => {
    if (index > start && mayBreak(tokens[index - 1], token, spaced)) best = index;
    while (used > 0 && used + wide[index] > width) {
      end(best > start ? best : index);
      used = wide.slice(start, index).reduce((sum, columns) => sum + columns, 0);
    }
    used += wide[index];
    if (token.includes("\n")) {
      end(index + 1);
      used = 0;
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
