import { describe, expect, it } from "vitest";

import type { Scene, Stage, TokenRow } from "../src/data";
import { halfValues, toHalf } from "../src/numbers/half";
import { FileSource } from "../src/source/file";
import { arraysOf, tileOf, type StoredHead, type Weights } from "../src/source/weights";
import { fromHash, settingsIn, START, Store, toHash, typedOf } from "../src/state";

const base64 = (numbers: Float32Array | Uint16Array): string =>
  btoa(String.fromCharCode(...new Uint8Array(numbers.buffer as ArrayBuffer)));

/** A head of 7 queries and 9 keys, causal, and its weights by the book. */
function head(): { stored: object; weights: number[][]; v: Float32Array } {
  const [n_q, n_k, d, offset] = [7, 9, 3, 2];
  const q = Float32Array.from({ length: n_q * d }, (_, k) => Math.sin(k * 1.7));
  const k = Float32Array.from({ length: n_k * d }, (_, p) => Math.cos(p * 0.9));
  const v = Float32Array.from({ length: n_k * 2 }, (_, p) => Math.sin(p * p));
  const scores = Array.from({ length: n_q }, (_, i) =>
    Array.from({ length: n_k }, (_, j) => {
      const dot = [0, 1, 2].reduce((sum, a) => sum + q[i * d + a] * k[j * d + a], 0);
      return j <= i + offset ? 0.5 * dot : -Infinity;
    }),
  );
  const lse = scores.map((row) => Math.log(row.reduce((sum, s) => sum + Math.exp(s), 0)));
  const weights = scores.map((row, i) => row.map((s) => (s === -Infinity ? NaN : Math.exp(s - lse[i]))));
  const stored = {
    n_q,
    n_k,
    d,
    dtype: "f32",
    q: base64(q),
    k: base64(k),
    lse: base64(Float32Array.from(lse)),
    scale: 0.5,
    causal: true,
    mask: "causal()",
    score: "",
    offset,
    sink: false,
    no_values: "",
    v: base64(v),
    d_v: 2,
  };
  return { stored, weights, v };
}

describe("a saved page", () => {
  const { stored, weights, v } = head();
  const map = { n_q: 7, n_k: 9, tile: 4, max_level: 2 };
  const source = new FileSource({ answers: { "api/s/map/0/0": map }, exact: { "s/0/0": stored as never } });
  const floats = async (path: string): Promise<Float32Array> => new Float32Array((await source.numbers(path)).data);

  it("computes rows, columns and any part of the weights", async () => {
    const near = (found: Float32Array, expected: number[]): void => {
      expect(found.length).toBe(expected.length);
      expected.forEach((w, p) => (Number.isNaN(w) ? expect(found[p]).toBeNaN() : expect(found[p]).toBeCloseTo(w, 5)));
    };
    near(await floats("api/s/row/0/0/3"), weights[3]);
    near(
      await floats("api/s/column/0/0/4"),
      weights.map((row) => row[4]),
    );
    near(await floats("api/s/values/0/0?rows=2:4&cols=1:8"), [...weights[2].slice(1, 8), ...weights[3].slice(1, 8)]);
  });

  it("computes tiles of every level", async () => {
    for (const level of [0, 1, 2]) {
      const step = 2 ** (2 - level);
      for (const kind of ["mass", "max"]) {
        const found = new Uint16Array((await source.numbers(`api/s/tile/0/0/${level}/0/0?kind=${kind}`)).data);
        const cols = Math.min(4, Math.ceil(9 / step));
        found.forEach((bits, p) => {
          const [r, c] = [Math.floor(p / cols) * step, (p % cols) * step];
          const rows = weights.slice(r, r + step);
          const cells = rows.map((row) => row.slice(c, c + step).filter((w) => !Number.isNaN(w)));
          if (!cells.flat().length) return expect(halfValues[bits]).toBeNaN();
          const mass = cells.reduce((sum, row) => sum + row.reduce((s, w) => s + w, 0), 0) / rows.length;
          const expected = kind === "mass" ? mass : Math.max(...cells.flat());
          return expect(Math.abs(halfValues[bits] - expected)).toBeLessThan(2 ** -10);
        });
      }
    }
  });

  it("reads weights from exact tiles where rules are more than it knows", async () => {
    const half: Weights = {
      n_q: 7,
      n_k: 9,
      block: async (r0, r1, c0, c1) => Float32Array.from(weights.slice(r0, r1).flatMap((row) => row.slice(c0, c1))),
    };
    const answers: Record<string, unknown> = { "api/s/map/0/0": map };
    for (let y = 0; y < 2; y++) {
      for (let x = 0; x < 3; x++)
        answers[`api/s/tile/0/0/2/${x}/${y}?kind=mass`] = { f16: base64(await tileOf(half, map, 2, x, y, "mass")) };
    }
    answers["api/scenes"] = { scenes: [{ id: "s", layers: [{ heads: 1, n_q: 7, n_k: 9 }] }] };
    const tiled = new FileSource({ answers, exact: {} });
    const pixels = new Uint16Array((await tiled.numbers("api/s/thumbs/0?size=64&kind=max")).data);
    expect([...pixels].map((bits) => halfValues[bits])).toEqual(
      Array.from(
        pixels,
        (_, p) => weights[Math.floor((Math.floor(p / 64) * 7) / 64)][Math.floor(((p % 64) * 9) / 64)],
      ).map((w) => halfValues[toHalf(w)]),
    );
    const row = new Float32Array((await tiled.numbers("api/s/row/0/0/6")).data);
    expect([...row]).toEqual(weights[6].map((w) => halfValues[toHalf(w)]));
    for (const level of [0, 1, 2]) {
      for (const kind of ["mass", "max"]) {
        const path = `api/s/tile/0/0/${level}/0/0?kind=${kind}`;
        const bits = (x: ArrayBuffer): number[] => [...new Uint16Array(x)].map((b) => halfValues[b]);
        const [found, expected] = [bits((await tiled.numbers(path)).data), bits((await source.numbers(path)).data)];
        found.forEach((w, p) =>
          Number.isNaN(expected[p]) ? expect(w).toBeNaN() : expect(Math.abs(w - expected[p])).toBeLessThan(2 ** -10),
        );
      }
    }
  });

  it("shows the steps to a weight and to the output", async () => {
    const stages = async (held: object, i: number, j: number): Promise<Map<string, Stage>> => {
      const file = new FileSource({ answers: {}, exact: { "s/0/0": held as never } });
      const found = (await file.json(`api/s/step/0/0/${i}/${j}`)) as { stages: Stage[] };
      return new Map(found.stages.map((stage) => [stage.name, stage]));
    };
    const seen = await stages(stored, 4, 5);
    expect(seen.get("softmax weight")?.value).toBeCloseTo(weights[4][5], 6);
    const products = seen.get("products")?.values?.reduce<number>((sum, x) => sum + (x ?? 0), 0) ?? NaN;
    expect(seen.get("dot product")?.value).toBeCloseTo(products, 6);
    expect(seen.get("scale")?.value).toBeCloseTo(0.5 * products, 6);
    expect(Math.exp(0.5 * products - (seen.get("log-sum-exp")?.value ?? NaN))).toBeCloseTo(weights[4][5], 6);
    expect(seen.get("log-sum-exp")?.text).toContain("the 7 keys");
    [0, 1].forEach((b) => {
      const out = weights[4].reduce((sum, w, j) => sum + (Number.isNaN(w) ? 0 : w) * v[2 * j + b], 0);
      expect(seen.get("weighted sum")?.values?.[b]).toBeCloseTo(out, 6);
      expect(seen.get("times value")?.values?.[b]).toBeCloseTo(weights[4][5] * v[10 + b], 6);
    });
    const hidden = await stages(stored, 1, 8);
    expect([hidden.get("mask")?.value, hidden.get("softmax weight")?.value]).toEqual([null, 0]);
    expect(hidden.get("mask")?.text).toMatch(/is hidden: .* by the mask causal\(\)$/);
    const without = await stages({ ...stored, v: undefined, no_values: "a capture keeps none" }, 4, 5);
    expect(without.get("weighted sum")).toMatchObject({ text: "not shown: a capture keeps none" });
    expect([without.get("weighted sum")?.values, without.has("value")]).toEqual([undefined, false]);
  });

  it("shows the weight on a learned sink as a step", async () => {
    const sinks = { f32: btoa(String.fromCharCode(...new Uint8Array(new Float32Array([0, 0, 0.25]).buffer))) };
    const held = { ...stored, sink: true } as never;
    const file = new FileSource({ answers: { "api/s/sinks/0/0": sinks }, exact: { "s/0/0": held } });
    const { stages } = (await file.json("api/s/step/0/0/2/1")) as { stages: Stage[] };
    const step = stages.find(({ name }) => name === "sink");
    expect(step).toMatchObject({ value: 0.25, text: "row 2 leaves 25.00% of its attention to the learned sink" });
  });

  it("tells the weight on a learned sink in every head, of layers that have one", async () => {
    const layer = { heads: 1, n_q: 7, n_k: 9 };
    const scenes = { scenes: [{ id: "s", layers: [{ ...layer, sink: true }, layer] }] };
    const lower = arraysOf(stored as StoredHead).lse.map((x) => x + Math.log(2)); // as if the sink had half of each row
    const halved = { ...stored, sink: true, lse: base64(lower) };
    const exact = { "s/0/0": halved, "s/1/0": stored } as unknown as Record<string, StoredHead>;
    const file = new FileSource({ answers: { "api/scenes": scenes }, exact });
    const { rows } = (await file.json("api/s/token/6")) as { rows: TokenRow[] };
    expect(rows[0].sink).toBeCloseTo(0.5, 6);
    expect(rows[0].weights[0]).toBeCloseTo(rows[1].weights[0] / 2, 6);
    expect(rows[1]).not.toHaveProperty("sink");
  });

  it("says that it has no steps where rules are more than it knows", async () => {
    const holding = (lacks: string): FileSource => {
      const scenes = { scenes: [{ id: "s", layers: [{ heads: 1, lacks }] }] };
      return new FileSource({ answers: { "api/scenes": scenes, "api/s/map/0/0": map }, exact: {} });
    };
    const file = holding("");
    await expect(file.json("api/s/step/0/0/1/1")).rejects.toThrow("without its queries and keys");
    for (const what of ["step/0/0/1/1", "matrices/0/0", "variance/0/0"])
      await expect(holding("It came as weights.").json(`api/s/${what}`)).rejects.toThrow("It came as weights.");
    expect(file.note).toContain("half precision");
    expect(source.note).toBe("saved");
  });

  it("computes without WebAssembly where it can, and says where it cannot", async () => {
    const modules = [btoa("no module")];
    const of = (more: object): FileSource =>
      new FileSource({ answers: {}, exact: { "s/0/0": { ...stored, module: 0, ...more } as never }, modules });
    const row = new Float32Array((await of({ ruled: false }).numbers("api/s/row/0/0/3")).data);
    row.forEach((w, j) =>
      Number.isNaN(weights[3][j]) ? expect(w).toBeNaN() : expect(w).toBeCloseTo(weights[3][j], 5),
    );
    await expect(of({ ruled: true }).numbers("api/s/row/0/0/3")).rejects.toThrow("need WebAssembly, for its rules: ");
    await expect(of({ ruled: true }).json("api/s/step/0/0/1/1")).rejects.toThrow("need WebAssembly, for its rules: ");
  });

  it("says what it does not hold", async () => {
    await expect(source.json("api/s/heads")).rejects.toThrow("not in the saved file");
    await expect(source.numbers("api/s/row/1/0/3")).rejects.toThrow("not in the saved file");
  });
});

describe("the address", () => {
  it("holds the whole state", () => {
    const state = { ...START, view: "map", scene: "a:2", layer: 3, i: 17, hide: true, tone: "log" as const };
    expect(fromHash(toHash(state))).toEqual(state);
    expect(fromHash("#layer=x&hide=perhaps&unknown=1")).toEqual(START);
  });
  it("takes no value that a view cannot show", () => {
    for (const wrong of ["kind=foo", "tone=__proto__", "scale=constructor", "i=2.5", "j=1e999", "head=", "head=1e300"])
      expect(fromHash(`#${wrong}`)).toEqual(START);
    expect(fromHash("#by=x&causal=perhaps&scaled=false")).toEqual({ ...START, scaled: false });
    expect(fromHash("#i=7&least=0.25&scale=ink")).toEqual({ ...START, i: 7, least: 0.25, scale: "ink" });
  });
  it("holds the text of a scene that was typed, and of no other", () => {
    const settings = { text: "né\n\ud83d\ude00", temperature: 0.5, scaled: false, causal: true };
    const scene = { id: "example-2", settings } as unknown as Scene;
    const state = { ...START, scene: "example-2", ...typedOf(scene) };
    expect(settingsIn(fromHash(toHash(state)))).toEqual(settings);
    expect(typedOf({ ...scene, given: true })).toEqual(typedOf(undefined));
    expect(settingsIn(START)).toBeNull();
  });
  it("does not hold the reader's theme, and does not change it", () => {
    const store = new Store(START);
    store.set({ dark: true });
    expect(toHash(store.state)).toBe(toHash(START));
    store.set(fromHash(toHash(store.state)), "link");
    expect(store.state.dark).toBe(true);
  });
  it("tells what a change is", () => {
    const store = new Store(START);
    const seen: string[] = [];
    store.listen((_, __, way) => seen.push(way));
    store.set({ head: 1 });
    store.set({ head: 2 }, "refine");
    expect(seen).toEqual(["step", "refine"]);
  });
  it("tells what changed, and only that", () => {
    const store = new Store(START);
    const seen: string[][] = [];
    store.listen((_, changed) => seen.push([...changed]));
    store.set({ head: 2, layer: -1 });
    store.set({ head: 2 });
    expect(seen).toEqual([["head"]]);
  });
});

describe("a saved page of 16-bit codes", () => {
  const { stored, weights } = head();
  const given = stored as Record<"q" | "k" | "v", string>;

  /** The codes of features, and the low and the step of each. */
  function coded(text: string, d: number): { codes: string; scale: string } {
    const x = new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
    const of = (a: number): number[] => [...x].filter((_, at) => at % d === a);
    const lows = Array.from({ length: d }, (_, a) => Math.min(...of(a)));
    const steps = lows.map((low, a) => (Math.max(...of(a)) - low) / 65535);
    const codes = Uint16Array.from(x, (y, at) => Math.round((y - lows[at % d]) / steps[at % d]));
    return { codes: base64(codes), scale: base64(Float32Array.from([...lows, ...steps])) };
  }

  it("computes the weights of heads that share keys", async () => {
    const [q, k, v] = [coded(given.q, 3), coded(given.k, 3), coded(given.v, 2)];
    const scales = { q: q.scale, k: k.scale, v: v.scale };
    const first = { ...stored, dtype: "u16", q: q.codes, k: k.codes, v: v.codes, scales };
    const second = { ...first, k: undefined, v: undefined, scales: { q: q.scale }, keys_of: "s/0/0" };
    const map = { n_q: 7, n_k: 9, tile: 4, max_level: 2 };
    const source = new FileSource({
      format: 2,
      answers: { "api/s/map/0/0": map, "api/s/map/0/1": map },
      exact: { "s/0/0": first as never, "s/0/1": second as never },
    });
    for (const number of [0, 1]) {
      const row = new Float32Array((await source.numbers(`api/s/row/0/${number}/3`)).data);
      weights[3].forEach((w, j) => (Number.isNaN(w) ? expect(row[j]).toBeNaN() : expect(row[j]).toBeCloseTo(w, 4)));
      const step = (await source.json(`api/s/step/0/${number}/3/2`)) as { stages: Stage[] };
      expect(step.stages.at(-1)!.values).toHaveLength(2);
    }
    expect(source.note).toBe("saved in 16 bits a number: weights are right to 3 digits");
  });
});
