import { describe, expect, it } from "vitest";

import type { Scene, Told, Words } from "../src/data";
import { afterSink, measures, normals, restOf, softmax } from "../src/numbers/softmax";
import { expects, looks, runBefore, saysOf, shortOf } from "../src/parts/sentences";
import { filled, lineOf } from "../src/parts/terms";

const words = {
  views: { map: "One head; {more} is more, {sum}." },
  more: ["darker", "brighter"],
  sums: ["alone", "with a sink"],
  patterns: {
    last: "The last token, {query}, looks most at {key} (weight {weight}){repeats}.",
    other: "Token {query} looks most at {key} (weight {weight}){repeats}.",
    repeats: ", which followed an earlier {after}",
    expects: "The model expects next: {tokens}.",
    unseen: "Token {query} sees no key.",
    aside: "Elsewhere at {key} (weight {weight}){repeats}.",
    resting: "The learned sink takes {share}.",
  },
  claims: { sink: "{a} {shade} column is {key}.", heaviest: "{its} go to {from}." },
  short: { heaviest: "→ {key} {share}" },
  shades: ["dark", "bright"],
  articles: ["The", "Another"],
  heaviest: ["Weights", "Other weights"],
  others: ["later", "other", "queries"],
} as unknown as Words;
const scene = { prefix: 1, layers: [{ n_q: 6 }], following: [{ token: "\n", probability: 0.25 }] } as unknown as Scene;

describe("sentences", () => {
  it("say where a row looks, and what it repeats", () => {
    const tokens = { query: [..."abcabc"], key: [..."abcabc"] };
    const row = Float32Array.from([0.25, 0, 0, 0.75, 0, NaN]);
    expect(looks(words, scene, row, 5, tokens)).toBe(
      "The last token, 5 “c”, looks most at 3 “a” (weight 0.750), which followed an earlier “abc”.",
    );
    expect(looks(words, scene, new Float32Array(6), 2, null)).toBe("Token 2 sees no key.");
    expect(looks(words, scene, row, 1, null)).toBe("Token 1 looks most at 3 (weight 0.750).");
  });

  it("say where a row looks besides what lists leave aside, and what a learned sink takes", () => {
    const row = Float32Array.from([0.625, 0.25, 0, 0.125, NaN]);
    expect(looks(words, scene, row, 3, null)).toBe(
      "Token 3 looks most at 0 (weight 0.625). Elsewhere at 1 (weight 0.250).",
    );
    expect(looks(words, scene, row, 3, null, false)).toBe("Token 3 looks most at 0 (weight 0.625).");
    const little = row.map((weight) => weight / 8);
    expect(looks(words, scene, little, 3, null)).toBe(
      "Token 3 looks most at 0 (weight 0.078). The learned sink takes 0.875.",
    );
  });

  it("fill in what is said of a map, in the words of its scale", () => {
    const claims: Told[] = [
      { name: "sink", parts: { a: "The", key: "“{a}”" } },
      { name: "heaviest", parts: { its: "Other weights", from: "“b” (0.5 from “c”)", key: "“b”", share: "0.50" } },
    ];
    expect(saysOf(claims, words, false)).toBe("The dark column is “{a}”. Other weights go to “b” (0.5 from “c”).");
    expect(saysOf(claims, words, true)).toContain("The bright column");
    expect(shortOf(claims, words)).toBe("");
    expect(shortOf(claims.slice(1), words)).toBe("→ “b” 0.50");
    expect(shortOf([], words)).toBe("");
  });

  it("name runs from a length on", () => {
    expect(runBefore([..."abcabc"], [..."abcabc"], 5, 3, 1)).toBe("abc");
    expect(runBefore([..."abcabc"], [..."abcabc"], 5, 3, 4)).toBe("");
    expect(runBefore([..."abc"], [..."abc"], 2, 0, 1)).toBe("");
  });

  it("say what comes next, and in which colours", () => {
    expect(expects(words, scene)).toBe("The model expects next: “↵” 25.0%.");
    expect(expects(words, { ...scene, following: [] })).toBe("");
    expect(lineOf("map", words, false)).toBe("One head; darker is more, alone.");
    expect(lineOf("map", words, true)).toBe("One head; brighter is more, alone.");
    expect(lineOf("map", words, false, true)).toBe("One head; darker is more, with a sink.");
    expect(filled("{a} {b}", { a: "{b}" })).toBe("{b} {b}"); // what is filled in is not filled again
  });
});

describe("the softmax of a row", () => {
  it("leaves out what is hidden", () => {
    const weights = softmax([0, Math.log(3), NaN], 1);
    expect(weights[0]).toBeCloseTo(0.25);
    expect(weights[1]).toBeCloseTo(0.75);
    expect(weights[2]).toBeNaN();
  });

  it("has entropy, largest weight and gradient", () => {
    const even = measures([0.5, 0.5, NaN]);
    expect(even.entropy).toBeCloseTo(Math.log(2));
    expect([even.largest, even.gradient]).toEqual([0.5, 0.5]);
    expect(measures([0, 1])).toEqual({ entropy: 0, largest: 1, gradient: 0 });
    const sunk = softmax([0, Math.log(3), NaN], 1, Math.log(4));
    expect([...sunk.slice(0, 2), restOf(sunk)].map((x) => x.toFixed(6))).toEqual(["0.125000", "0.375000", "0.500000"]);
    expect(restOf(softmax([NaN, NaN], 1, 2))).toBe(1);
    expect([...afterSink(Float64Array.from([0.5]), 0.25)]).toEqual([0.25, NaN, 0.5]);
    expect(afterSink(new Float64Array(512), 1)).toHaveLength(512 + 44);
    const cold = softmax([1000, 0], 1);
    expect([...cold]).toEqual([1, 0]);
  });

  it("saturates with d unless it is scaled", () => {
    const x = normals(256);
    const mean = x.reduce((sum, one) => sum + one, 0) / x.length;
    expect(Math.abs(mean)).toBeLessThan(0.2);
    const without = measures(softmax(x, Math.sqrt(1024)));
    const scaled = measures(softmax(x, 1));
    expect(without.gradient).toBeLessThan(0.3);
    expect(scaled.gradient).toBeGreaterThan(0.9);
  });
});
