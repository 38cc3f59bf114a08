import { describe, expect, it } from "vitest";

import { pixelTable, ramp, SCALES, toned, weightAt } from "../src/numbers/colour";
import { columns, printable, readable, shortened } from "../src/numbers/format";
import { fromHalf, halfValues, toHalf } from "../src/numbers/half";
import { maxLevel, perPixel, tileBlock } from "../src/numbers/levels";
import { letterSize, markEvery } from "../src/parts/rulers";
import { breakLines, lineOf } from "../src/parts/lines";

describe("half floats", () => {
  it("keep every pattern of bits but those of NaN", () => {
    for (let bits = 0; bits < 65536; bits++) {
      const value = halfValues[bits];
      if (Number.isNaN(value)) expect((bits & 0x7c00) === 0x7c00 && (bits & 0x3ff) !== 0).toBe(true);
      else expect(toHalf(value)).toBe(bits);
    }
    expect(halfValues[toHalf(NaN)]).toBeNaN();
  });
  it("are the nearest, ties to even", () => {
    const cases = [
      [1 + 2 ** -11, 1],
      [1 + 3 * 2 ** -11, 1 + 2 ** -9],
      [2 ** -25, 0],
      [2 ** -24 * 1.5, 2 ** -23],
      [65519, 65504],
      [65520, Infinity],
    ];
    for (const [value, nearest] of cases) expect(halfValues[toHalf(value)]).toBe(nearest);
    for (let k = 0; k < 2000; k++) {
      const value = 10 ** (-6 * Math.random());
      expect(Math.abs(halfValues[toHalf(value)] - value)).toBeLessThanOrEqual(
        Math.max(2 ** -25, value * 2 ** -11) * 1.0001,
      );
    }
  });
  it("are read as they lie", () => {
    expect([...fromHalf(new Uint16Array([0x3c00, 0x3800, 0xc000, 0x0001]))]).toEqual([1, 0.5, -2, 2 ** -24]);
  });
});

describe("colours", () => {
  it("begin and end where the scale does, and grow lighter or darker all the way", () => {
    for (const scale of Object.values(SCALES)) {
      const light = Array.from({ length: 101 }, (_, k) => ramp(scale, k / 100)).map(
        ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b,
      );
      const direction = Math.sign(light[100] - light[0]);
      for (let k = 1; k <= 100; k++) expect((light[k] - light[k - 1]) * direction).toBeGreaterThan(-1.5);
      expect(ramp(scale, -3)).toEqual([...scale[0]]);
      expect(ramp(scale, 7)).toEqual([...scale[scale.length - 1]]);
    }
  });
  it("say which weight they mean", () => {
    for (const tone of ["linear", "root", "log"] as const) {
      for (const place of [0.1, 0.5, 1]) expect(toned(weightAt(place, 0.3, tone), 0.3, tone)).toBeCloseTo(place, 12);
      expect(toned(0, 0.3, tone)).toBe(0);
      expect(toned(9, 0.3, tone)).toBe(1);
    }
  });
  it("are looked up by bits; NaN is transparent", () => {
    const table = pixelTable(SCALES.viridis, 1, "linear");
    expect(table[toHalf(NaN)]).toBe(0);
    expect(table[toHalf(1)]).toBe(0xff25e7fd);
    expect(table[toHalf(0)]).toBe(0xff540144);
  });
});

describe("levels", () => {
  it("halve until a tile holds the map", () => {
    expect([1, 256, 257, 512, 100_000].map((n) => maxLevel(n, 5, 256))).toEqual([0, 0, 1, 1, 9]);
  });
  it("cover every pair once", () => {
    const pyramid = { n_q: 700, n_k: 1000, tile: 256, max_level: 2 };
    for (let level = 0; level <= 2; level++) {
      const seen = new Uint8Array(700 * 1000);
      const across = Math.ceil(1000 / (256 * perPixel(pyramid, level)));
      for (let y = 0; y < across; y++) {
        for (let x = 0; x < across; x++) {
          const { r0, r1, c0, c1 } = tileBlock(pyramid, level, x, y);
          for (let i = r0; i < r1; i++) for (let j = c0; j < c1; j++) seen[i * 1000 + j]++;
        }
      }
      expect(seen.every((times) => times === 1)).toBe(true);
    }
    expect(tileBlock(pyramid, 1, 1, 1)).toEqual({ r0: 512, r1: 700, c0: 512, c1: 1000, rows: 94, cols: 244 });
  });
});

describe("texts", () => {
  it("show what cannot be seen", () => {
    expect(printable(" the\n")).toBe("·the↵");
    expect(printable("\u001b\u202e")).toBe("\\u{1b}\\u{202e}");
    expect(readable("a b\n\u0007")).toBe("a b\n\\u{7}");
  });
  it("know how wide letters are", () => {
    expect(["abc", "日本", "e\u0301", "é"].map(columns)).toEqual([3, 4, 1, 1]);
  });
  it("break into lines that hold every token once", () => {
    const tokens = Array.from({ length: 500 }, (_, k) => "x".repeat(k % 7) + (k % 50 === 49 ? "\n" : " "));
    const lines = breakLines(tokens, 30);
    expect(lines.flatMap(({ start, stop }) => Array.from({ length: stop - start }, (_, k) => start + k))).toEqual(
      tokens.map((_, k) => k),
    );
    for (const { start, stop } of lines)
      expect(columns(tokens.slice(start, stop).join("").replace("\n", "↵"))).toBeLessThanOrEqual(30);
    tokens.forEach((_, k) => {
      const { start, stop } = lines[lineOf(lines, k)];
      expect(start <= k && k < stop).toBe(true);
    });
  });
  it("break between words, and in one only where it is longer than a line", () => {
    const linesOf = (tokens: string[], width: number): string[] =>
      breakLines(tokens, width).map(({ start, stop }) => tokens.slice(start, stop).join(""));
    expect(linesOf(Array.from("why Otokar Brix."), 9)).toEqual(["why ", "Otokar ", "Brix."]);
    expect(linesOf(Array.from("an extraordinary cat"), 8)).toEqual(["an ", "extraord", "inary ", "cat"]);
    expect(linesOf(["why", " Oto", "kar", " Brix", "."], 11)).toEqual(["why Otokar", " Brix."]);
    expect(linesOf(["Oto ", "abc", "defghijkl", "m "], 10)).toEqual(["Oto ", "abc", "defghijkl", "m "]);
    expect(linesOf(["a", "cat", "un", "##believ", "##able"], 18)).toEqual(["acat", "un##believ##able"]);
    expect(linesOf(Array.from("日本語の本"), 6)).toEqual(["日本語", "の本"]);
    expect(linesOf(["a", " ", "Ã", "₂", "Ã", "₂"], 5)).toEqual(["a ", "Ã₂Ã₂"]);
    expect(linesOf(["one", "two", "three"], 7)).toEqual(["onetwo", "three"]);
  });
  it("are cut where they are too long for a line", () => {
    expect(shortened("x".repeat(40))).toBe("x".repeat(40));
    expect(shortened("x".repeat(3000))).toBe(`${"x".repeat(39)}…`);
    expect(columns(shortened("日本語".repeat(30), 20))).toBeLessThanOrEqual(20);
    expect(shortened("\ud83d\ude00".repeat(30), 10)).toBe(`${"\ud83d\ude00".repeat(4)}…`);
    const lines = breakLines(["a ", "y".repeat(3000), "b"], 30);
    expect(lines).toEqual([
      { start: 0, stop: 1 },
      { start: 1, stop: 2 },
      { start: 2, stop: 3 },
    ]);
  });
  it("have letters on a ruler that are no larger than the room between lines", () => {
    for (let step = 1; step < 40; step += 0.1) {
      expect(letterSize(step)).toBeLessThan(step);
      if (step >= 8.01) expect(letterSize(step)).toBeGreaterThan(7);
    }
  });
  it("mark rulers at round numbers with room between", () => {
    expect([0.01, 0.3, 5, 100].map((step) => markEvery(step, 60))).toEqual([10_000, 200, 20, 1]);
  });
});
