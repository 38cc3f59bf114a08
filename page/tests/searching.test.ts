import { describe, expect, it } from "vitest";

import { nextPlace, placesOf } from "../src/numbers/searching";

describe("places of a text", () => {
  const tokens = ["The", " cat", " sat", ".", " Cat", "s", " c", "at"];

  it("are told by the tokens that they lie in, in either case, also across tokens", () => {
    expect(placesOf(tokens, "cat")).toEqual([
      [1, 2],
      [4, 5],
      [6, 8],
    ]);
    expect(placesOf(tokens, "at sat.")).toEqual([[1, 4]]);
    expect(placesOf(tokens, "dog")).toEqual([]);
    expect(placesOf(tokens, "")).toEqual([]);
  });

  it("do not overlap, and several may be in one token", () => {
    expect(placesOf(["aaaa", ""], "aa")).toEqual([
      [0, 1],
      [0, 1],
    ]);
  });

  it("follow each other around the end", () => {
    const places = placesOf(tokens, "cat");
    expect([-1, 1, 4, 6].map((at) => nextPlace(places, at, false))).toEqual([0, 1, 2, 0]);
    expect([6, 4, 1, -1].map((at) => nextPlace(places, at, true))).toEqual([1, 0, 2, 2]);
  });
});
