import { describe, expect, it } from "vitest";

import type { Words } from "../src/data";
import { outlineOf, told } from "../src/model/outlines";

const N = 24;
const IDS = Uint8Array.from({ length: N }, (_, k) => k);
const REPEATED = IDS.map((k) => k % 12);

/** A causal map with these weights on earlier keys, and the rest on the first. */
function map(of: (i: number) => [key: number, weight: number][], ids = IDS): Parameters<typeof outlineOf>[0] {
  const weights = new Float32Array(N * N);
  for (let i = 0; i < N; i++) {
    let rest = 1;
    for (const [key, weight] of of(i)) {
      if (key < 0 || key > i) continue;
      weights[i * N + key] += weight;
      rest -= weight;
    }
    weights[i * N] += rest;
  }
  return { weights, ids, prefix: 1, causal: true };
}

const names = (...given: Parameters<typeof map>): string[] => outlineOf(map(...given)).map(({ name }) => name);

describe("the outline of a map", () => {
  it("names what is there, the heaviest first", () => {
    expect(names(() => [])).toEqual(["sink"]);
    expect(names((i) => [[i - 1, 1]])).toEqual(["previous"]);
    expect(names((i) => [[i, 1]])).toEqual(["current"]);
    expect(names((i) => [[i - 3, 1]])).toEqual(["back"]);
    expect(names(() => [[5, 1]])).toEqual(["column"]);
    expect(names((i) => [[i - 1, 0.7]])).toEqual(["previous", "sink"]);
    expect(names((i) => (i > 12 ? [[i - 11, 0.7]] : []), REPEATED)).toEqual(["sink", "induction"]);
    expect(names((i) => (i >= 12 ? [[i - 12, 1]] : []), REPEATED)).toEqual(["sink", "duplicate"]);
    expect(names((i) => Array.from({ length: i + 1 }, (_, j) => [j, 1 / (i + 1)]))).toEqual(["even"]);
  });

  it("names the heaviest weight with its tokens", () => {
    const claims = outlineOf(map((i) => (i === 20 ? [[7, 1]] : [])));
    const words = { articles: ["The", "Another"], heaviest: ["Its", "Its other"], others: ["later", "other", ""] };
    const tokens = Array.from({ length: N }, (_, k) => (k === 20 ? "7" : String(k)));
    const [sink, heaviest] = told(claims, tokens, true, words as unknown as Words);
    expect(sink).toMatchObject({ name: "sink", parts: { key: "“0”", share: "0.96", a: "The" } });
    expect(heaviest).toMatchObject({
      name: "heaviest",
      parts: { from: "7 “7” (1.000 from 20 “7”)", its: "Its other" },
    });
  });
});
