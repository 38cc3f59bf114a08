import { describe, expect, it } from "vitest";

import { effectsOf, harderBy, outcome, percent, placeSaid, shades } from "../src/numbers/effects";

describe("the effects of heads", () => {
  const rows = [1.25, 1.5, 0.75].map((loss, head) => ({ layer: 0, head, loss }));

  it("are in the order of the loss without each, with a share of the largest change", () => {
    const effects = effectsOf({ loss: 1, rows, done: 1 });
    expect(effects.map(({ head, by, share }) => [head, by, share])).toEqual([
      [1, 0.5, 1],
      [0, 0.25, 0.5],
      [2, -0.25, 0.5],
    ]);
    expect(rows.map(({ head }) => head)).toEqual([0, 1, 2]); // an answer is kept: it is not sorted in place
  });

  it("have places, once all are known", () => {
    const effects = effectsOf({ loss: 1, rows, done: 1 });
    expect(placeSaid("L0 H2", effects, { layer: 0, head: 2 })).toBe("L0 H2 is in place 3 of 3.");
    expect(placeSaid("L0 H2", [], { layer: 0, head: 2 })).toBe("");
  });

  it("are none where no head changes the loss", () => {
    expect(effectsOf({ loss: 1, rows: [{ layer: 0, head: 0, loss: 1 }], done: 1 })[0].share).toBe(0);
  });
});

describe("the text without a head", () => {
  const losses = { before: [1, 2, 3], after: [1.005, 1.6, 3.4] };

  it("is said to rise, to fall or to stay", () => {
    expect(outcome({ before: [1, 2], after: [2, 2] })).toBe(
      "The loss of this text rises from 1.500 to 2.000 nats a token.",
    );
    expect(outcome({ before: [2], after: [1] })).toBe("The loss of this text falls from 2.000 to 1.000 nats a token.");
    expect(outcome(losses)).toBe("The loss of this text rises from 2.000 to 2.002 nats a token.");
    expect(outcome({ before: [2], after: [2.0004] })).toBe("The loss of this text stays as it is, 2.000 nats a token.");
  });

  it("is shaded where a token is clearly harder or easier", () => {
    const told = { i: 0, odds: [], losses, first: 0, predicts: "next" as const };
    const [first, none, easier, harder] = shades(harderBy(told, 4));
    expect(first).toBeNull(); // it is given
    expect(none).toBeNull();
    expect(harder).toBeCloseTo(0, 6);
    expect(easier).toBeCloseTo(1, 6);
    const masked = {
      ...told,
      predicts: "masked" as const,
      losses: { before: [null, 1, null], after: [null, 3, null] },
    };
    expect(harderBy(masked, 3)).toEqual([null, 2, null]);
    expect(harderBy({ ...told, first: 5 }, 9).slice(5)).toEqual([
      null,
      ...[0, 1, 2].map((k) => losses.after[k] - losses.before[k]),
    ]);
    expect(shades([0.01, -0.01])).toEqual([null, null]);
  });
});

it("writes small shares with a decimal", () => {
  expect([0.5, 0.0994, 0.001].map(percent)).toEqual(["50 %", "9.9 %", "0.1 %"]);
});
