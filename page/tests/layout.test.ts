import { describe, expect, it } from "vitest";

import { evenColumns } from "../src/parts/evenrows";
import { labelOf } from "../src/parts/headgrid";
import { cellWidth, stageOf } from "../src/parts/stage";

describe("rows of heads", () => {
  it("are wrapped into lines of even length", () => {
    expect(evenColumns(9, 9 * 40, 36, 4)).toBe(9);
    expect(evenColumns(9, 8 * 40, 36, 4)).toBe(5);
    expect(evenColumns(9, 7 * 40, 36, 4)).toBe(5);
    expect(evenColumns(9, 4 * 40, 36, 4)).toBe(3);
    expect(evenColumns(9, 0, 36, 4)).toBe(1);
    for (let n = 1; n < 40; n++) {
      for (let fit = 1; fit < 20; fit++) {
        const columns = evenColumns(n, fit * 40, 36, 4);
        expect(columns).toBeLessThanOrEqual(fit);
        const lines = Math.ceil(n / fit);
        expect(Math.ceil(n / columns)).toBe(lines); // no line more than it takes
        expect(Math.ceil(n / lines)).toBe(columns); // and none longer than its share
      }
    }
  });
});

describe("the label of a head", () => {
  const kind = { kind: "induction", name: "induction", score: 0.3, tentative: true };
  const head = { layer: 0, head: 4, kv_head: 4, kind: null, scores: {} };
  it("is its kind where there is room, else its number, once", () => {
    expect(labelOf({ ...head, kinds: [kind] }, 5, true)).toBe("induction?");
    expect(labelOf({ ...head, kinds: [kind] }, 5, false)).toBe("H5");
    expect(labelOf({ ...head, kinds: [] }, 5, true)).toBe("H5");
  });
});

describe("a stage", () => {
  it("has the shape of its matrix", () => {
    expect(stageOf(54, 54, 700, 623)).toEqual({ wide: 623, high: 623 });
    expect(stageOf(54, 54, 320, 623)).toEqual({ wide: 320, high: 320 });
    const { wide, high } = stageOf(50, 100, 702, 702);
    expect([wide, high]).toEqual([702, 352]);
  });
  it("is no larger than its cells, and never too small to be seen", () => {
    expect(stageOf(3, 3, 900, 900)).toEqual({ wide: 290, high: 290 });
    expect(stageOf(1, 1000, 800, 600)).toEqual({ wide: 800, high: 240 });
    expect(stageOf(1, 1000, 800, 100)).toEqual({ wide: 800, high: 100 });
    expect(cellWidth(1, 1000, 800, 600)).toBe(0.8);
  });
});
