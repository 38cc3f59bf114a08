/**
 * Numbers and tokens made fit to read. Numbers are written as in the terminal and in pictures: the rules are those of
 * `interpret/formats.py`, and `tests/formats.json` has cases for both.
 */

const POWERS: Record<string, string> = { "-": "⁻", ...Object.fromEntries([..."⁰¹²³⁴⁵⁶⁷⁸⁹"].entries()) };

/** The smallest weight that three decimals show. */
const LEAST = 0.0005;

/** Exponents of the first digit between which a number is written without a power of ten. */
const [SMALLEST, LARGEST] = [-3, 4];

type Known = number | null | undefined;

const minus = (text: string): string => text.replace("-", "−");

/** Attention scores, lengths, differences, a weight that is pointed at: so many digits that count, without zeros at the end. */
export const figure = (value: Known, digits = 3): string => written(value, digits, " × ");

function written(value: Known, digits: number, times: string): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const [mantissa, power] = value
    .toExponential(digits - 1)
    .split("e")
    .map(Number);
  if (power >= SMALLEST && power <= LARGEST) return minus(String(Number(value.toPrecision(digits))));
  return minus(`${mantissa}${times}10`) + Array.from(String(power), (c) => POWERS[c]).join("");
}

/** A weight in a list or a sentence, with three decimals. */
export function weightText(value: Known): string {
  if (!value || !Number.isFinite(value)) return figure(value);
  if (Math.abs(value) < LEAST) return value > 0 ? "<0.001" : ">−0.001";
  return minus(value.toFixed(3));
}

/** A head's score of a kind. */
export const scoreText = (value: Known): string =>
  typeof value === "number" && Number.isFinite(value) ? minus(value.toFixed(2)) : figure(value);

/** A loss, in nats a token. */
export const lossText = (nats: number): string => minus(nats.toFixed(3));

/** A change of the loss with its sign, in nats. */
export const changeText = (nats: number): string => `${nats < 0 ? "−" : "+"}${Math.abs(nats).toFixed(3)}`;

/** A number in few letters, for a cell of a map. */
export function short(value: number): string {
  const text = written(value, 2, "·");
  return text.includes("·") ? written(value, 1, "·") : text;
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
