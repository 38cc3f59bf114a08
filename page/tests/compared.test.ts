import { describe, expect, it } from "vitest";

import type { Scene } from "../src/data";
import { START } from "../src/state";
import { addressOf, amiss, captionOf, comparedHead, headNamed } from "../src/views/compared";
import type { Context } from "../src/views/view";

const layer = { number: 4, numbers: [0, 2, 5], heads: 3 };
const scenes = [
  { id: "a", name: "a text", batch: 1, layers: [layer] },
  { id: "b", name: "another", batch: 2, layers: [layer, layer] },
] as unknown as Scene[];
const context = (other: string): Context =>
  ({ scenes, store: { state: { ...START, scene: "a", layer: 0, head: 2, other } } }) as unknown as Context;

describe("the compared head", () => {
  it("is the one that the address names", () => {
    const at = { scene: "b:1", layer: 1, head: 2 };
    expect(headNamed(addressOf(at), scenes)).toEqual(at);
    expect(comparedHead(context("b:1/1/2"))).toEqual(at);
  });

  it("is the next head of the layer where none is named, or one that is not here", () => {
    for (const other of ["", "c/0/0", "a:1/0/0", "a/1/0", "a/0/3", "a/0/-1", "a/0/0.5", "__proto__/x/y"])
      expect(comparedHead(context(other))).toEqual({ scene: "a", layer: 0, head: 0 });
  });

  it("has its scene in its caption where that is another", () => {
    expect(captionOf(context(""), { scene: "a", layer: 0, head: 1 })).toBe("L4 H2");
    expect(captionOf(context(""), { scene: "b:1", layer: 0, head: 2 })).toBe("L4 H5 · another");
  });

  it("is missed where it is gone, as a difference of two sizes is", () => {
    expect([amiss(context(""), true), amiss(context("b/0/0"), true)]).toEqual(["", ""]);
    expect(amiss(context("c/0/0"), false)).toBe(
      "The head that was compared, c/0/0, is not here any more. These maps have different sizes, so there is no difference to draw.",
    );
  });
});
