import { expect, test } from "vitest";
import { saying } from "../src/parts/working";
import { whenReady, type Working } from "../src/source/source";

test("what is said while an answer takes its time", () => {
  expect(saying({ share: null })).toBe("Waiting for the kernel …");
  expect(saying({ share: 0.254 })).toBe("Computing: 25 %");
  expect(saying({ share: 0.25, stage: "layer 3 of 12, 9 s left", total: 12 })).toBe("Layer 3 of 12, 9 s left …");
});

test("an answer that is not there yet is asked for again, and its stages are told", async () => {
  const answers = [
    { status: 202, body: { progress: 0, stage: "loading the model", total: 0 } },
    { status: 202, body: { progress: 0.5 } },
    { status: 200, body: "here" },
  ];
  const told: Working[] = [];
  const answer = await whenReady(
    () => Promise.resolve(answers.shift() as { status: number; body: unknown }),
    (working) => told.push(working),
  );
  expect(answer).toBe("here");
  expect(told).toEqual([
    { share: 0, stage: "loading the model", total: 0 },
    { share: 0.5, stage: undefined, total: undefined },
    { share: 1 },
  ]);
});
