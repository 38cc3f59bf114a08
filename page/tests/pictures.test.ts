import { describe, expect, it } from "vitest";

import { Data, type Scene } from "../src/data";
import { toHalf } from "../src/numbers/half";
import { ramp, SCALES } from "../src/numbers/colour";
import { columnOf, pooledSinks, sinkShare } from "../src/numbers/sinks";
import { DifferencePicture, HeadPicture, type Look } from "../src/parts/pictures";
import { thumbPixels } from "../src/parts/thumb";
import type { Numbers, Source } from "../src/source/source";

const LOOK: Look = { kind: "max", tone: "linear", scale: "viridis", hide: false };
const at = (head: number): { scene: string; layer: number; head: number } => ({ scene: "s", layer: 0, head });

/** Two heads of 4 × 4 pairs, of which `rows` are known so far. */
class Growing implements Source {
  readonly kind = "server";
  progress = (): void => {};
  rows = 2;
  asked = 0;

  async json(): Promise<unknown> {
    this.asked++;
    const top = this.rows < 4 ? 0.5 : 1;
    return { n_q: 4, n_k: 4, tile: 4, max_level: 0, maximum: { mass: [top], max: [top] }, done: this.rows / 4 };
  }

  async numbers(path: string): Promise<Numbers> {
    this.asked++;
    const first = path.includes("/0/0/0/0/0") ? 0.25 : 0.125;
    const values = Array.from({ length: 16 }, (_, p) => (p >= 4 * this.rows ? Infinity : p === 15 ? 1 : first));
    return { data: Uint16Array.from(values, toHalf).buffer, exact: this.rows === 4 };
  }

  post(): Promise<unknown> {
    return Promise.reject(new Error("nothing to run"));
  }
}

describe("a picture whose levels are being computed", () => {
  it("stripes what is not known, and asks for it again", async () => {
    const source = new Growing();
    const data = new Data(source);
    const picture = await HeadPicture.of({ data, scenes: [] }, at(0), LOOK);
    expect(picture.done).toBe(0.5);
    const half = await picture.pixels(0, 0, 0);
    expect(half.whole).toBe(false);
    const stripes = new Set(half.data.slice(8));
    expect(new Set(half.data.slice(0, 8)).size).toBe(1);
    expect(stripes.has(half.data[0])).toBe(false);
    expect(stripes.size).toBe(2);

    source.rows = 4;
    expect(await picture.refresh()).toBe(true); // the largest weight is among the rest
    expect([picture.done, picture.top(0)]).toEqual([1, 1]);
    const all = await picture.pixels(0, 0, 0);
    expect(all.whole).toBe(true);
    expect([...all.data].some((pixel) => stripes.has(pixel))).toBe(false);
    expect(all.data[15]).not.toBe(all.data[14]);

    const { asked } = source;
    await picture.pixels(0, 0, 0);
    expect(await picture.refresh()).toBe(false);
    expect(source.asked).toBe(asked); // what is whole is kept
  });

  it("leaves what is not known out of the scale without the first key", async () => {
    const picture = await HeadPicture.of({ data: new Data(new Growing()), scenes: [] }, at(0), { ...LOOK, hide: true });
    expect(picture.top(0)).toBe(0.25);
  });

  it("stripes a difference of which one side is not known", async () => {
    const source = new Growing();
    const data = new Data(source);
    const heads = await Promise.all([0, 1].map((head) => HeadPicture.of({ data, scenes: [] }, at(head), LOOK)));
    const picture = new DifferencePicture(data, at(0), at(1), heads as [HeadPicture, HeadPicture], LOOK);
    const half = await picture.pixels(0, 0, 0);
    expect([half.whole, new Set(half.data.slice(8)).size]).toEqual([false, 2]);
    source.rows = 4;
    expect(await picture.refresh()).toBe(true);
    expect((await picture.pixels(0, 0, 0)).whole).toBe(true);
  });
});

/** Heads with a learned sink, known from the start: the first gives it [0.75, 0.5, 0, 0.25], the second half of that. */
class Sunk extends Growing {
  override rows = 4;

  override async numbers(path: string): Promise<Numbers> {
    if (!path.includes("sinks")) return super.numbers(path);
    const by = path.endsWith("/0/0") ? 1 : 2;
    return { data: Float32Array.from([0.75, 0.5, 0, 0.25], (x) => x / by).buffer, exact: true };
  }
}

describe("a picture of a head with a learned sink", () => {
  const scenes = [{ id: "s", layers: [{ sink: true }] }] as unknown as Scene[];
  const rgb = (pixel: number): number[] => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
  const pictureOf = (look: Look, head = 0): Promise<HeadPicture> =>
    HeadPicture.of({ data: new Data(new Sunk()), scenes }, at(head), look);

  it("colours the sink on the scale of the map, which reaches to the larger of both", async () => {
    const picture = await pictureOf(LOOK);
    expect([...picture.sinks]).toEqual([0.75, 0.5, 0, 0.25]);
    const colours = [0.5, 0].map((weight) => [...ramp(SCALES.viridis, weight)]);
    expect([...picture.sinkPixels(0, 1, 3)].map(rgb)).toEqual(colours);
    const few = Object.assign(await pictureOf(LOOK), {
      info: { ...picture.info, maximum: { mass: [0.5], max: [0.5] } },
    });
    expect(few.top(0)).toBe(0.75);
  });

  it("leaves it out where the sink is hidden", async () => {
    const picture = await pictureOf({ ...LOOK, hide: true });
    expect([...picture.sinkPixels(0, 0, 4)]).toEqual([0, 0, 0, 0]);
    expect(picture.top(0)).toBe(1);
  });

  it("is given what a row is short of 1, in a layer that has one", () => {
    expect(sinkShare({ sink: true }, Float32Array.from([0.125, NaN, 0.0625]))).toBe(0.8125);
    expect(sinkShare({ sink: true }, Float32Array.from([0.5, 0.4999999]))).toBe(0);
    expect(sinkShare({ sink: false }, Float32Array.from([0.5, 0.25]))).toBe(null);
  });

  it("pools it as rows are pooled, the last one too", () => {
    const sinks = Float32Array.from([0.75, 0.25, 0, 0.5, 0.125]);
    expect([...pooledSinks(sinks, 2, "mass", 0, 3)]).toEqual([0.5, 0.25, 0.125]);
    expect([...pooledSinks(sinks, 2, "max", 1, 3)]).toEqual([0.5, 0.125]);
    expect([...columnOf(sinks, 2)]).toEqual([0.75, 0.5]);
    expect([...columnOf(sinks.subarray(0, 2), 4)]).toEqual([0.75, 0.75, 0.25, 0.25]);
  });

  it("tells how two heads differ in it", async () => {
    const heads = (await Promise.all([0, 1].map((head) => pictureOf(LOOK, head)))) as [HeadPicture, HeadPicture];
    const picture = new DifferencePicture(new Data(new Sunk()), at(0), at(1), heads, LOOK);
    expect([...picture.sinks]).toEqual([0.375, 0.25, 0, 0.125]);
    const [first, , none] = [...picture.sinkPixels(0, 0, 4)].map(rgb);
    expect(first[2]).toBeGreaterThan(first[0]); // the first has more: blue
    expect(none).toEqual([244, 244, 244]);
  });

  it("is as large as ever without one", () => {
    const table = Uint32Array.from({ length: 2 ** 16 }, (_, bits) => bits);
    const map = Uint16Array.from({ length: 64 * 64 }, (_, p) => p);
    const none = thumbPixels(map, new Float32Array(0), table);
    expect([none.rows, none.cols, [...none.data]]).toEqual([64, 64, [...map]]);
    const { cols, data } = thumbPixels(map, new Float32Array(64).fill(0.5), table);
    expect([cols, data[0], data[5], data[7], data[cols + 7]]).toEqual([71, toHalf(0.5), 0, 0, 64]);
  });
});
