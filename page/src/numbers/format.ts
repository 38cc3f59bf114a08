/** Numbers and tokens made fit to read. */

/** A weight or score with four figures that count; not a number is a dash. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-4 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replaceAll("-", "−");
}

/** The same of a number with so many digits. */
export const rounded = (value: number, digits: number): string => figure(Number(value.toPrecision(digits)));

/** A number in few letters, for a cell of a map. */
export function short(value: number): string {
  const size = Math.abs(value);
  const text = size === 0 || size >= 0.001 ? String(Number(value.toPrecision(2))) : value.toExponential(0);
  return text.replaceAll("-", "−");
}

export const count = (n: number): string => n.toLocaleString("en");

const MARKS: Record<string, string> = { " ": "·", "\n": "↵", "\t": "⇥", "\r": "␍" };

function escaped(c: string): string {
  const code = c.codePointAt(0) ?? 0;
  const hidden = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/u.test(c);
  return hidden ? `\\u{${code.toString(16)}}` : c;
}

/** A token on one line, every character to be seen. */
export function printable(token: string): string {
  return Array.from(token, (c) => MARKS[c] ?? escaped(c)).join("");
}

/** A token as part of a text: blanks stay, other controls become escapes. */
export function readable(token: string): string {
  return Array.from(token, (c) => (c === " " || c === "\n" ? c : c === "\t" ? "    " : escaped(c))).join("");
}

const WIDE =
  /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Extended_Pictographic}/u;

/** How many columns of a monospaced font a text takes. */
export function columns(text: string): number {
  let width = 0;
  for (const c of text) width += c < "\u0300" ? 1 : /\p{M}/u.test(c) ? 0 : WIDE.test(c) ? 2 : 1;
  return width;
}

/** As much of a text as fits into so many columns; an ellipsis where it goes on. */
export function shortened(text: string, most = 40): string {
  let [used, fits] = [0, 0]; // columns; code units that leave a column free
  for (const c of text) {
    used += columns(c);
    if (used > most) return `${text.slice(0, fits)}…`;
    if (used < most) fits += c.length;
  }
  return text;
}
