import { describe, expect, it } from "vitest";

import { Data } from "../src/data";
import { toHalf } from "../src/numbers/half";
import { DifferencePicture, HeadPicture, type Look } from "../src/parts/pictures";
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
    const picture = await HeadPicture.of(data, at(0), LOOK);
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
    const picture = await HeadPicture.of(new Data(new Growing()), at(0), { ...LOOK, hide: true });
    expect(picture.top(0)).toBe(0.25);
  });

  it("stripes a difference of which one side is not known", async () => {
    const source = new Growing();
    const data = new Data(source);
    const heads = await Promise.all([0, 1].map((head) => HeadPicture.of(data, at(head), LOOK)));
    const picture = new DifferencePicture(data, at(0), at(1), heads as [HeadPicture, HeadPicture], LOOK);
    const half = await picture.pixels(0, 0, 0);
    expect([half.whole, new Set(half.data.slice(8)).size]).toEqual([false, 2]);
    source.rows = 4;
    expect(await picture.refresh()).toBe(true);
    expect((await picture.pixels(0, 0, 0)).whole).toBe(true);
  });
});
