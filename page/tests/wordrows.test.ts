import { describe, expect, it } from "vitest";

import { Data, type Grid, type Layer, type Scene } from "../src/data";
import { FileSource, type StoredData } from "../src/source/file";
import { NO_ROW } from "../src/source/wordrows";

const text = (x: ArrayBuffer): string => btoa(String.fromCharCode(...new Uint8Array(x)));
const floats = (...x: number[]): string => text(Float32Array.from(x).buffer);

async function deflated(x: Uint8Array<ArrayBuffer> | Int32Array<ArrayBuffer>): Promise<string> {
  const stream = new Blob([x]).stream().pipeThrough(new CompressionStream("deflate"));
  return text(await new Response(stream).arrayBuffer());
}

/** Token 0 is a word, 1 to 4 are patches in two rows, 5 is a word. */
const grid: Grid = {
  ...{ kind: "picture", side: "both", rows: 2, columns: 2, tokens: [1, 2, 3, 4] },
  ...{ picture: null, width: 0, height: 0, seconds: null },
};
const layer = { heads: 2, n_q: 6, n_k: 6, cross: false } as Layer;
const scene = { id: "s", layers: [layer], grids: [grid], held: { tokens: [0, 5], pool: 2 } } as unknown as Scene;
const data: StoredData = {
  answers: { "api/scenes": { scenes: [scene] } },
  exact: {},
  rows: {
    cells: {
      heads: { of_key: await deflated(Int32Array.of(1, 0, 0, 0, 0, 2)), parts: [0, 1] },
      mean: { of_key: await deflated(Int32Array.of(4, 0, 1, 2, 3, 5)), parts: [0, 4] },
    },
    layers: [
      {
        heads: {
          codes: await deflated(Uint8Array.of(128, 128, 0, 128, 64, 128, 64, 128, 32, 0, 0, 128)),
          scales: floats(1, 2, 3, 4, 5, 6, 7, 8),
        },
        mean: {
          codes: await deflated(Uint8Array.of(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)),
          scales: floats(1, 2, 3, 4),
        },
      },
    ],
  },
};

describe("a file with rows of words", () => {
  const source = new FileSource(data);
  it("tells the weights of a word in every head, and the means of layers", async () => {
    const { heads, means } = await new Data(source).heat(scene, "s", { token: 5, side: "row", grid: 0 });
    expect(heads[0].map((of) => [...of])).toEqual([Array(4).fill(128 * 3), Array(4).fill(0)]);
    expect([...means![0]]).toEqual([21, 24, 27, 30]);
  });
  it("tells them as numbers too", async () => {
    const { data: numbers } = await source.numbers("api/s/heat?token=0&side=row&grid=0&numbers=f32");
    expect([...new Float32Array(numbers)]).toEqual([...Array(4).fill(128), ...Array(4).fill(64 * 5), 1, 2, 3, 4]);
  });
  it("has rows with words, and columns of the words alone", async () => {
    const numbers = async (path: string): Promise<number[]> => [
      ...new Float32Array((await source.numbers(`api/s/${path}`)).data),
    ];
    expect(await numbers("row/0/1/5")).toEqual([0, 0, 0, 0, 0, 128 * 8]);
    expect(await numbers("column/0/0/5")).toEqual([0, NaN, NaN, NaN, NaN, 128 * 4]);
  });
  it("refuses the row of a patch with a sentence", async () => {
    await expect(source.json("api/s/heat?token=2&side=row&grid=0")).rejects.toThrow(NO_ROW);
  });
});
