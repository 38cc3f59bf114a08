import { describe, expect, it } from "vitest";

import type { Ablation, Ablations, Scene } from "../src/data";
import { lossBars, oddsBars } from "../src/share/effects";
import { printed } from "../src/share/frame";
import { profilesFigure } from "../src/share/profiles";
import { START } from "../src/state";
import type { Context } from "../src/views/view";

const layers = [{ number: 4, numbers: [0, 2], heads: 2 }];
const scene = { id: "s", name: "a text", layers } as unknown as Scene;

const long = "the entropy over the logarithm of how many keys the query sees";
const profiles = Object.fromEntries(
  ["offset", "entropy", "received", "sink"].map((key) => [
    key,
    { start: 0, step: 1, values: [0, 1, 0.5], label: long },
  ]),
);

const context = {
  scene,
  scenes: [scene],
  store: { state: { ...START, scene: "s", layer: 0, head: 1, dark: false } },
  data: { profiles: async () => ({ ...profiles, offset: { ...profiles.offset, edges: [0, 1, 2, 3] } }) },
} as unknown as Context;

interface Written {
  x: number;
  y: number;
  size: number;
  anchor: string;
  text: string;
}

const written = (svg: string): Written[] =>
  [
    ...svg.matchAll(
      /<text x="([\d.]+)" y="([\d.]+)" font-size="([\d.]+)" fill="[^"]+" text-anchor="(\w+)"[^>]*>([^<]*)</g,
    ),
  ].map(([, x, y, size, anchor, text]) => ({ x: Number(x), y: Number(y), size: Number(size), anchor, text }));

/** Where a text begins and ends, were its letters as wide as bold ones are. */
function reach({ x, size, anchor, text }: Written): [number, number] {
  const wide = text.length * 0.6 * size;
  if (anchor === "start") return [x, x + wide];
  return anchor === "end" ? [x - wide, x] : [x - wide / 2, x + wide / 2];
}

describe("profiles as a figure", () => {
  it("have titles that lie on nothing, and axes that say what they are", async () => {
    const svg = (await profilesFigure(context)).svg();
    const texts = written(svg);
    const said = texts.map(({ text }) => text);
    expect(said.filter((text) => text === "query")).toHaveLength(2);
    expect(said).toContain("key");
    expect(said).toContain("distance: query − key");
    for (const [k, a] of texts.entries()) {
      for (const b of texts.slice(k + 1)) {
        if (Math.abs(a.y - b.y) >= Math.max(a.size, b.size)) continue;
        const [[a0, a1], [b0, b1]] = [reach(a), reach(b)];
        expect(a1 <= b0 || b1 <= a0, `“${a.text}” and “${b.text}”`).toBe(true);
      }
    }
  });
});

describe("what a head does for the loss", () => {
  it("is a bar for each head, the largest rise first", () => {
    const all = {
      loss: 2,
      rows: [
        { layer: 0, head: 0, loss: 1.9 },
        { layer: 0, head: 1, loss: 2.4 },
      ],
    } as Ablations;
    const bars = lossBars({ scene }, all);
    expect(bars.map(({ name, said }) => [name, said])).toEqual([
      ["L4 H2", "+0.400"],
      ["L4 H0", "−0.100"],
    ]);
    expect(bars[0].share).toBe(1);
    expect(bars[1].share).toBeCloseTo(0.25);
    expect(bars[0].fill).not.toBe(bars[1].fill);
  });
  it("is a pair of bars for each token that is expected", () => {
    const one = { odds: [{ token: " a", before: 0.5, after: 0.25, actual: true }] } as Ablation;
    expect(oddsBars(one).map(({ name, about, said }) => [name, about, said])).toEqual([
      ["·a", "with", "50 %"],
      ["", "without", "25 %"],
    ]);
  });
});

describe("the paper of figures", () => {
  it("is white, whatever the page is", () => {
    expect(printed({ ...START, dark: true })).toBe("ink");
    expect(printed({ ...START, dark: true, scale: "viridis" })).toBe("viridis");
  });
});
