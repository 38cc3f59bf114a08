import { describe, expect, it } from "vitest";

import { byWords, wordOf, wordStarts } from "../src/numbers/words";

const words = (tokens: string[]): string[] => {
  const starts = wordStarts(tokens);
  return starts.slice(0, -1).map((start, k) => tokens.slice(start, starts[k + 1]).join(""));
};

describe("words", () => {
  it("are made of bytes, with the blank before them", () => {
    const bytes = ["⊢", ..."Dr. Né", "₂", ..." isn't on\nit"];
    expect(words(bytes)).toEqual(["⊢", "Dr", ".", " Né₂", " isn't", " on", "\n", "it"]);
  });
  it("are made of pieces, however those mark blanks", () => {
    expect(words(["The", " qu", "ick", " fox", ",", " 20", "24"])).toEqual(["The", " quick", " fox", ",", " 2024"]);
    expect(words(["the ", "cat ", "sat"])).toEqual(["the ", "cat ", "sat"]);
    expect(words(["play", "##ing"])).toEqual(["play##ing"]);
    expect(words(["日", "本", "a", "b"])).toEqual(["日", "本", "ab"]);
    expect(words([])).toEqual([]);
  });
  it("hold every token once", () => {
    const starts = wordStarts(Array.from("one two, three"));
    for (let t = 0; t < 14; t++) {
      const [from, to] = wordOf(starts, t);
      expect(from <= t && t < to).toBe(true);
    }
  });
  it("sum the weights on their keys and average those of their queries", () => {
    const weights = Float32Array.of(0.5, 0.25, 0.125, NaN, NaN);
    expect([...byWords(weights, [0, 1, 3, 5], "sum")]).toEqual([0.5, 0.375, 0.375, NaN, NaN]);
    expect([...byWords(weights, [0, 2, 4, 5], "mean")]).toEqual([0.375, 0.375, 0.0625, 0.0625, NaN]);
  });
});
