import { describe, expect, it } from "vitest";

import type { Grid, Scene } from "../src/data";
import {
  heatPixels,
  heatSaid,
  laid,
  meanOf,
  moments,
  patchAt,
  patchOf,
  placeName,
  pooled,
  regionName,
  regionOf,
  rowStarts,
  stepped,
  sumOf,
  wordsOf,
} from "../src/numbers/grids";
import { marksOf } from "../src/parts/gridmarks";

const grid: Grid = {
  ...{ kind: "picture", side: "both", rows: 2, columns: 3, tokens: [1, 2, 3, 4, 5, -1] },
  ...{ picture: null, width: 30, height: 20, seconds: null },
};
const sound: Grid = { ...grid, kind: "sound", side: "keys", rows: 1, columns: 100, seconds: 2 };

describe("a grid", () => {
  it("finds the patch of a token, and of a place", () => {
    expect([0, 1, 5, 6, -1].map((token) => patchOf(grid, token))).toEqual([-1, 0, 4, -1, -1]);
    expect(patchAt(grid, 0.5, 0.9)).toBe(4);
    expect([patchAt(grid, 1, 0.5), patchAt(grid, -0.1, 0.5)]).toEqual([-1, -1]);
  });
  it("has rectangles between any two corners", () => {
    expect(regionOf(grid, 1, 5)).toEqual([1, 2, 4, 5]);
    expect(regionOf(grid, 2, 4)).toEqual([1, 2, 4, 5]);
    expect(regionOf(grid, 3, 3)).toEqual([3]);
  });
  it("is walked over without leaving it", () => {
    expect(stepped(grid, 0, 1, 1)).toBe(4);
    expect(stepped(grid, 0, -1, -1)).toBe(0);
    expect(stepped(grid, 5, 3, 9)).toBe(5);
  });
  it("lays weights of tokens on patches", () => {
    expect([...laid(grid, [9, 1, 2, 3, 4, 5])]).toEqual([1, 2, 3, 4, 5, NaN]);
  });
  it("says where a patch is, and when a frame", () => {
    expect(placeName(grid, 4)).toBe("row 2, column 2");
    expect(placeName(sound, 50)).toBe("1.00 to 1.02 s");
    expect(placeName({ ...sound, seconds: null }, 50)).toBe("frame 50");
    expect(regionName(sound, [74, 75, 76])).toBe("1.48 to 1.54 s");
    expect([[], [4], [0, 1]].map((patches) => regionName(grid, patches))).toEqual(["", "row 2, column 2", "2 patches"]);
  });
  it("knows the tokens that are words", () => {
    expect(wordsOf([grid], 8)).toEqual([0, 6, 7]);
  });
  it("begins its rows at tokens, and ends after the last", () => {
    expect(rowStarts([grid])).toEqual([1, 4, 6]);
    expect(rowStarts([sound])).toEqual([]);
    const scene = (side: Grid["side"]) => ({ grids: [{ ...grid, side }] }) as unknown as Scene;
    expect(marksOf(scene("keys"))).toEqual({ key: [1, 4, 6], query: [] });
    expect(marksOf(scene("both")).query).toEqual([1, 4, 6]);
    expect(marksOf({} as Scene)).toEqual({ key: [], query: [] });
  });
  it("marks moments of a sound at round numbers", () => {
    expect(moments(2, 5)).toEqual([0, 0.5, 1, 1.5, 2]);
    expect(moments(30, 10)).toEqual([0, 5, 10, 15, 20, 25, 30]);
  });
});

describe("heat", () => {
  const heat = Float32Array.from([0, 1, 0.25, 0, 0, NaN]);
  it("has a colour a patch, none where there is no token, and lets a picture through", () => {
    const look = { tone: "linear", scale: "viridis" } as const;
    const over = heatPixels(heat, 1, { ...look, over: true });
    const alone = heatPixels(heat, 1, { ...look, over: false });
    expect(over[5]).toBe(0);
    expect([...over].slice(0, 3).map((x) => x >>> 24)).toEqual([51, 153, 77]);
    expect([...alone].slice(0, 5).every((x) => x >>> 24 === 255)).toBe(true);
    expect(alone[1] & 0xffffff).toBe(0x25e7fd); // the end of viridis
  });
  it("loses no weight in a small picture", () => {
    expect(pooled(grid, heat, 3)).toEqual({ grid, heat });
    const { grid: small, heat: largest } = pooled(grid, heat, 2);
    expect([small.rows, small.columns]).toEqual([1, 2]);
    expect([...largest]).toEqual([1, 0.25]);
    expect(pooled(grid, new Float32Array(6).fill(NaN), 1).heat).toEqual(Float32Array.of(NaN));
  });
  it("is said in words", () => {
    expect(heatSaid(grid, heat)).toBe("Most on row 1, column 2 (1), row 1, column 3 (0.25).");
    expect(heatSaid(grid, new Float32Array(6))).toBe("Nothing on it.");
  });
  it("is averaged over heads, and added up over a region", () => {
    const two = [Float32Array.of(1, 0), Float32Array.of(0, 0.5)];
    expect([...meanOf(two)]).toEqual([0.5, 0.25]);
    expect([...sumOf(two)]).toEqual([1, 0.5]);
  });
});
