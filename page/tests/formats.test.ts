import { describe, expect, it } from "vitest";

import { changeText, figure, lossText, scoreText, short, weightText } from "../src/numbers/format";
import cases from "./formats.json";

type Cases = [number | null, string][];

const FUNCTIONS: Record<string, (value: number) => string> = {
  figure: (value) => figure(value),
  weight: weightText,
  score: scoreText,
  change: changeText,
  loss: lossText,
};

describe("numbers as text", () => {
  it.each(Object.entries(FUNCTIONS))("are those of the terminal: %s", (kind, write) => {
    const known = (cases as unknown as Record<string, Cases>)[kind];
    expect(known.map(([value]) => write(value ?? NaN))).toEqual(known.map(([, text]) => text));
  });

  it("are empty where there is none, and may have fewer digits", () => {
    expect([null, undefined].map((value) => [figure(value), weightText(value), scoreText(value)]).flat()).toEqual(
      Array(6).fill("–"),
    );
    expect([0.0625, 0.25, 1234].map((value) => figure(value, 2))).toEqual(["0.063", "0.25", "1200"]);
    expect([Infinity, -Infinity].map((value) => figure(value))).toEqual(["∞", "−∞"]);
  });

  it("are short in cells", () => {
    expect([0, 1, 0.123456, -0.00456, 0.000999, 1.6e-12].map(short)).toEqual([
      "0",
      "1",
      "0.12",
      "−0.0046",
      "0.001",
      "2·10⁻¹²",
    ]);
  });
});
