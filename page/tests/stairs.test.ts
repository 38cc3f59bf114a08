import { describe, expect, it } from "vitest";

import { binAt, FEW_PAIRS, roundMarks, stairs } from "../src/numbers/stairs";

const profile = {
  start: 0,
  step: 1,
  label: "",
  values: [0.5, 0.25, 0.125, null],
  edges: [0, 1, 2, 10, 40],
  pairs: [100, 99, FEW_PAIRS - 1, 3],
};

describe("means by distance", () => {
  it("are steps that begin and end at the edges of their bins", () => {
    const made = stairs(profile);
    expect(made.x).toEqual([-0.5, 0.5, 1.5, 9.5, 39.5]);
    expect([made.many.length, made.few.length]).toEqual([5, 5]);
    expect(made.many).toEqual([0.5, 0.25, 0.25, null, null]);
    expect(made.few).toEqual([null, null, 0.125, null, null]);
  });
  it("say which distances and how many pairs they are of, and mark few", () => {
    const made = stairs(profile);
    expect(binAt(made, 1)).toEqual({ name: "1", text: "0.25 (99 pairs)", few: false });
    expect(binAt(made, 2)).toEqual({ name: "2 to 9", text: "0.125 (15 pairs)", few: true });
    expect(binAt(made, 4).name).toBe("10 to 39"); // the last place has no step of its own
  });
  it("have marks at distances, not beside them", () => {
    expect(roundMarks(-0.5, 53.5)).toEqual([0, 1, 2, 5, 10, 20, 50]);
    expect(roundMarks(-12, 3)).toEqual([-10, -5, -2, -1, 0, 1, 2]);
  });
});
