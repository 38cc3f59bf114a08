import { expect, test } from "vitest";

import drawings from "virtual:formulas";

import { drawn, FORMULAS, numbered } from "../src/numbers/formulas";

test("a drawing holds the numbers of its formula, in their order", () => {
  const html = drawn(String.raw`s_{12,3}=\frac{1}{\sqrt{64}}\;q_{12}\cdot k_{3}`, drawings)!;
  const text = html.replace(/<annotation.*?<\/annotation>/, "").replace(/<[^>]*>/g, " ");
  expect(text.match(/\d+/g)!.join(" ")).toMatch(/^12 3 1 64 12 3 /);
  expect(html).not.toMatch(/7000\d\d/);
});

test("numbers with a fraction or an exponent are numbers", () => {
  for (const number of ["0.125", "6.1e-05"])
    expect(drawn(String.raw`s_{0,1}=${number}\;q_{0}\cdot k_{1}`, drawings)).toContain(number);
});

test("each formula is drawn with a span for each of its numbers", () => {
  for (const formula of FORMULAS)
    for (const number of numbered(formula).match(/7000\d\d/g) ?? []) expect(drawings[formula]).toContain(`>${number}<`);
});

test("a formula that is not known has no drawing", () => {
  expect(drawn(String.raw`\int_0^1 x`, drawings)).toBeUndefined();
});

test("no formula needs a font that the page does not hold", () => {
  expect(Object.values(drawings).join("")).not.toMatch(
    /class="[^"]*(?:ams|bold|(?:math|text)(?:bb|bf|it|cal|frak|scr|sf|tt)\b)/,
  );
});
