/** Weights of one head computed in the page: any block of them, and what is summed over blocks. */

import { fromHalf, toHalf } from "../numbers/half";
import { perPixel, tileBlock, type Pyramid } from "../numbers/levels";

export interface Shape {
  n_q: number;
  n_k: number;
}

export interface Weights extends Shape {
  /** Row-major weights of queries [r0, r1) and keys [c0, c1); NaN where a query does not see a key. */
  block(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array>;
}

export interface StoredHead extends Shape {
  d: number;
  dtype: "f16" | "f32";
  q: string;
  k: string;
  lse: string;
  scale: number;
  causal: boolean;
  offset: number;
  /** Whether lse counts a sink. */
  sink: boolean;
  /** Why there are no values, if there are none. */
  no_values: string;
  v?: string;
  d_v?: number;
}

export function bytesOf(base64: string): ArrayBuffer {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)).buffer;
}

function floats(base64: string, dtype: "f16" | "f32"): Float32Array {
  const bytes = bytesOf(base64);
  return dtype === "f16" ? fromHalf(new Uint16Array(bytes)) : new Float32Array(bytes);
}

/** P[i,j] = exp(scale · q[i]·k[j] − lse[i]), from queries, keys and lse that the file holds. */
export class ComputedWeights implements Weights {
  readonly n_q: number;
  readonly n_k: number;
  readonly d: number;
  readonly scale: number;
  readonly q: Float32Array;
  readonly k: Float32Array;
  readonly lse: Float32Array;

  constructor(readonly head: StoredHead) {
    ({ n_q: this.n_q, n_k: this.n_k, d: this.d, scale: this.scale } = head);
    this.q = floats(head.q, head.dtype);
    this.k = floats(head.k, head.dtype);
    this.lse = floats(head.lse, "f32");
  }

  sees(i: number, j: number): boolean {
    return !this.head.causal || j <= i + this.head.offset;
  }

  dot(i: number, j: number): number {
    const { q, k, d } = this;
    let sum = 0;
    for (let a = 0, p = i * d, r = j * d; a < d; a++) sum += q[p + a] * k[r + a];
    return sum;
  }

  /** q · k of queries [r0, r1) and keys [c0, c1), NaN where a query does not see a key. */
  dots(r0: number, r1: number, c0: number, c1: number): Float32Array {
    const out = new Float32Array((r1 - r0) * (c1 - c0));
    for (let i = r0, at = 0; i < r1; i++)
      for (let j = c0; j < c1; j++) out[at++] = this.sees(i, j) ? this.dot(i, j) : NaN;
    return out;
  }

  weight(i: number, j: number): number {
    return this.sees(i, j) ? Math.exp(this.scale * this.dot(i, j) - this.lse[i]) : NaN;
  }

  values(): { v: Float32Array; d_v: number } | undefined {
    const { v, d_v, dtype } = this.head;
    return v === undefined || d_v === undefined ? undefined : { v: floats(v, dtype), d_v };
  }

  async block(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    const out = new Float32Array((r1 - r0) * (c1 - c0));
    const pause = pauses();
    for (let i = r0, at = 0; i < r1; i++) {
      await pause();
      for (let j = c0; j < c1; j++) out[at++] = this.weight(i, j);
    }
    return out;
  }
}

/** Weights from tiles of the exact level that the file holds, to the precision of half floats. */
export class TiledWeights implements Weights {
  readonly n_q: number;
  readonly n_k: number;

  constructor(
    private readonly pyramid: Pyramid,
    private readonly tile: (x: number, y: number) => Promise<Float32Array>,
  ) {
    ({ n_q: this.n_q, n_k: this.n_k } = pyramid);
  }

  async block(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    const width = c1 - c0;
    const out = new Float32Array((r1 - r0) * width);
    const { tile: size, max_level } = this.pyramid;
    for (let y = Math.floor(r0 / size); y * size < r1; y++) {
      for (let x = Math.floor(c0 / size); x * size < c1; x++) {
        const part = await this.tile(x, y);
        const at = tileBlock(this.pyramid, max_level, x, y);
        for (let i = Math.max(r0, at.r0); i < Math.min(r1, at.r1); i++) {
          const from = Math.max(c0, at.c0);
          const start = (i - at.r0) * at.cols + from - at.c0;
          const piece = part.subarray(start, start + Math.min(c1, at.c1) - from);
          out.set(piece, (i - r0) * width + from - c0);
        }
      }
    }
    return out;
  }
}

/** A tile of any level as half floats: mass is summed over keys and averaged over queries, max is the largest. */
export async function tileOf(
  weights: Weights,
  pyramid: Pyramid,
  level: number,
  x: number,
  y: number,
  kind: string,
): Promise<Uint16Array> {
  const step = perPixel(pyramid, level);
  const { r0, r1, c0, c1, rows, cols } = tileBlock(pyramid, level, x, y);
  const out = new Float32Array(rows * cols).fill(NaN);
  const pause = pauses();
  for (let i = r0; i < r1; i++) {
    await pause();
    const row = await weights.block(i, i + 1, c0, c1);
    const base = Math.floor((i - r0) / step) * cols;
    const share = kind === "mass" ? 1 / Math.min(step, r1 - i + ((i - r0) % step)) : 1;
    for (let j = 0; j < row.length; j++) {
      const value = row[j];
      if (Number.isNaN(value)) continue;
      const at = base + Math.floor(j / step);
      const before = Number.isNaN(out[at]) ? 0 : out[at];
      out[at] = kind === "mass" ? before + value * share : Math.max(before, value);
    }
  }
  return Uint16Array.from(out, toHalf);
}

/** A promise now and then, so that long computing leaves the page alive. */
function pauses(budgetMs = 12): () => Promise<void> | undefined {
  let since = performance.now();
  return () => {
    if (performance.now() - since < budgetMs) return undefined;
    return new Promise((resolve) =>
      setTimeout(() => {
        since = performance.now();
        resolve();
      }),
    );
  };
}
