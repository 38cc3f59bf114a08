/** Rows of words over pictures, as codes: what a file holds of heads that are too large. */

import { bytesOf } from "../numbers/base64";
import { Refused } from "./source";
import type { Weights } from "./weights";

/** Codes (heads, tokens, cells) and scales (heads, tokens, parts): weight = code · scale of the cell's part. */
interface StoredCodes {
  codes: string;
  scales: string;
}

/** The cell of each key, and the first cell of each part of a row. */
interface StoredCells {
  of_key: string;
  parts: number[];
}

type Which = "heads" | "mean";

export interface StoredRows {
  cells: Record<Which, StoredCells>;
  layers: Record<Which, StoredCodes>[];
}

interface Cells {
  ofKey: Int32Array;
  /** The part of each cell. */
  part: Uint8Array;
  parts: number;
}

interface Codes {
  codes: Uint8Array;
  scales: Float32Array;
}

export const NO_ROW = "This file holds where words look, and no patches: choose one of the words.";

async function inflated(text: string): Promise<ArrayBuffer> {
  const plain = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(plain).arrayBuffer();
}

/** The rows that a file holds, of these tokens. */
export class WordRows {
  private readonly cells = new Map<Which, Promise<Cells>>();
  private readonly codes = new Map<string, Promise<Codes>>();

  constructor(
    private readonly stored: StoredRows,
    private readonly tokens: readonly number[],
  ) {}

  /** The weights of a token on every key, in a head or as the mean over a layer. Throws Refused for another token. */
  async row(layer: number, which: Which, head: number, token: number): Promise<Float32Array> {
    const at = this.tokens.indexOf(token);
    if (at < 0) throw new Refused(NO_ROW, 404);
    const [{ ofKey, part, parts }, { codes, scales }] = await Promise.all([
      this.once(this.cells, which, () => this.cellsOf(which)),
      this.once(this.codes, `${layer}/${which}`, () => this.codesOf(layer, which)),
    ]);
    const row = head * this.tokens.length + at;
    const [first, scale] = [row * part.length, row * parts];
    return Float32Array.from(ofKey, (cell) => codes[first + cell] * scales[scale + part[cell]]);
  }

  /** Weights of a head as of any other: NaN where a query's row is not here, refused where none is. */
  head(layer: number, head: number, n_q: number, n_k: number): Weights {
    const block = async (r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> => {
      const held = this.tokens.filter((token) => token >= r0 && token < r1);
      if (!held.length) throw new Refused(NO_ROW, 404);
      const weights = new Float32Array((r1 - r0) * (c1 - c0)).fill(NaN);
      for (const token of held)
        weights.set((await this.row(layer, "heads", head, token)).subarray(c0, c1), (token - r0) * (c1 - c0));
      return weights;
    };
    return { n_q, n_k, block };
  }

  private once<V>(known: Map<string, Promise<V>>, name: string, read: () => Promise<V>): Promise<V> {
    const asked = known.get(name) ?? read();
    known.set(name, asked);
    return asked;
  }

  private async cellsOf(which: Which): Promise<Cells> {
    const { of_key, parts } = this.stored.cells[which];
    const ofKey = new Int32Array(await inflated(of_key));
    const count = ofKey.reduce((most, cell) => Math.max(most, cell), 0) + 1;
    const part = Uint8Array.from({ length: count }, (_, cell) => parts.findLastIndex((first) => first <= cell));
    return { ofKey, part, parts: parts.length };
  }

  private async codesOf(layer: number, which: Which): Promise<Codes> {
    const { codes, scales } = this.stored.layers[layer][which];
    return { codes: new Uint8Array(await inflated(codes)), scales: new Float32Array(bytesOf(scales)) };
  }
}
