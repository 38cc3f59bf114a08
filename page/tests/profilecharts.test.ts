import { describe, expect, it } from "vitest";

import { axisOf, chartsOf, distances, positionsOf, summary, thinned } from "../src/numbers/profilecharts";

const line = { start: 10, step: 5, label: "the entropy", values: [null, 1, 0.25, 2] };
const steps = { start: 0, step: 1, label: "mean weight", values: [0.5, 0.75], edges: [0, 1, 4], pairs: [9, 20] };

describe("charts of a head", () => {
  it("are of the profiles that are there, in an order of their own", () => {
    expect(
      chartsOf({ received: line, offset: steps, unknown: line }, false).map(({ key, axis }) => [key, axis]),
    ).toEqual([
      ["offset", "distance: query − key"],
      ["received", "key"],
    ]);
    expect(axisOf("entropy")).toBe("query");
    expect(chartsOf({}, false)).toEqual([]);
    expect(chartsOf({ offset: steps }, true)).toEqual([]);
  });

  it("say where they are highest", () => {
    expect(positionsOf(line)).toEqual([10, 15, 20, 25]);
    expect(summary(line, "Entropy")).toBe("Entropy: the entropy, from 0.25 to 2, highest at 25");
    expect(summary(steps, "By distance")).toBe("By distance: mean weight, from 0.5 to 0.75, highest at 1 to 3");
    expect(summary({ ...line, values: [null, null] }, "Entropy")).toBe("Entropy: nothing to show");
  });

  it("have round marks on a logarithmic axis, and as many as there is room for", () => {
    expect(distances([-0.5, 2.5], true)).toEqual({ range: [-0.5, 2.5], marks: [0, 1, 2] });
    expect(distances([-0.5, 2.5], false)).toBeNull();
    expect(thinned([0, 1, 2, null, 5000], (mark) => mark * 20, 34)).toEqual(["0", "", "2", "", "5,000"]);
  });
});
