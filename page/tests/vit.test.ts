import { expect, it } from "vitest";

import { looped } from "../src/model/product";
import { ViT } from "../src/model/vit";
import { bytesOf } from "../src/numbers/base64";
import weights from "../../src/regard/interpret/examplemodel/vit.safetensors?inline";
import cases from "./vit.json";

const model = new ViT(bytesOf(weights.slice(weights.indexOf(",") + 1)), looped);

it("has the sizes that its file says", () => {
  expect(model.config).toMatchObject({ layers: 4, heads: 4, side: 48, patch: 8, classes: 10 });
});

// `tests/interpret/test_vit.py` holds the model in Python to the same numbers.
it.each(cases)("reads a $digit as Python does", ({ picture, digit, odds, cls }) => {
  const trace = model.run(Float32Array.from(new Uint8Array(bytesOf(picture)), (byte) => byte / 255));
  odds.forEach((x, n) => expect(trace.odds[n]).toBeCloseTo(x, 5));
  expect(trace.odds.indexOf(Math.max(...trace.odds))).toBe(digit);
  const d = model.config.width / model.config.heads;
  trace.layers.forEach(({ heads }, layer) =>
    heads.forEach(({ q, k, lse }, head) => {
      const score = (j: number): number => {
        let sum = 0;
        for (let a = 0; a < d; a++) sum += q[a] * k[j * d + a];
        return Math.exp(trace.scale * sum - lse[0]);
      };
      cls[layer][head].forEach((weight, j) => expect(score(j)).toBeCloseTo(weight, 5));
    }),
  );
});
