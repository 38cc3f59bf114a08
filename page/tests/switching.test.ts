import { describe, expect, it } from "vitest";

import type { Scene } from "../src/data";
import { runsHere, whyNot } from "../src/views/switching";

const scene = (kind: string, settings: object | null, editable = settings !== null): Scene =>
  ({ kind, name: `a ${kind}`, settings, editable }) as unknown as Scene;

const example = scene("example", {});
const saved = scene("example", {}, false);
const lacking = ["cross", "model", "capture", "arrays"].map((kind) => scene(kind, null));

describe("heads that can be switched off", () => {
  it("are those of a model that runs here", () => {
    expect([runsHere(example, "server"), runsHere(example, "notebook"), runsHere(example, "file")]).toEqual([
      true,
      true,
      true,
    ]);
    expect(runsHere(saved, "file")).toBe(false);
    expect(whyNot(example, [example], "server")).toBe("");
  });

  it("are missed by name: each kind of scene lacks something else", () => {
    const said = [saved, ...lacking].map((one) => whyNot(one, [], "file"));
    expect(new Set(said).size).toBe(5);
    expect(said[0]).toContain("regard look --save page.html --with-model");
    for (const one of said.slice(2)) expect(one).toContain("Knock out edges and heads");
    for (const one of said) expect(one).not.toContain("choose it above");
  });

  it("are said to need the model of a page that holds what was typed into one's own", () => {
    expect(whyNot(scene("model", { text: "a" }, false), [], "file")).toContain("`regard look --model` runs yours");
    expect(whyNot(scene("model", { text: "a" }), [], "server")).toBe("");
  });

  it("are found above only where there are some", () => {
    for (const one of lacking) {
      expect(whyNot(one, [one, example], "server")).toMatch(/The heads of “a example” can be: choose it above\.$/);
      expect(whyNot(one, [one, saved], "file")).not.toContain("choose it above");
    }
  });
});
