import { describe, expect, it } from "vitest";

import { placeIn, Tokens } from "../src/data";

async function tokens(text: string): Promise<Tokens> {
  const all = text.split(" ");
  const result = new Tokens((start) => {
    if (start >= all.length) return Promise.reject(new RangeError("there are no such tokens"));
    return Promise.resolve({ total: all.length, tokens: all.slice(start, start + 4096) });
  });
  await result.load(0, all.length);
  return result;
}

describe("a chosen token, after another text was typed,", () => {
  const place = async (next: string, before: string, at: number): Promise<number> =>
    placeIn(await tokens(next), next.split(" ").length, await tokens(before), at);

  it("is where it is again, the nearest of several", async () => {
    expect(
      await place("The dog ch ased the ball because it was bored", "The cat sat on the mat because it was tired", 7),
    ).toBe(7);
    expect(await place("The big dog slept because it was bored", "The cat sat because it was tired", 4)).toBe(5);
    expect(await place("it a b c it", "x y z it", 3)).toBe(4);
  });
  it("is the one at its place, where it is gone", async () => {
    expect(await place("a b c", "a it c", 1)).toBe(1);
    expect(await place("a b", "a b it", 2)).toBe(-1);
  });
  it("stays none", async () => {
    expect(await place("a b", "a b", -1)).toBe(-1);
  });
});
