/** Weights of one head computed in the page: any block of them, and what is summed over blocks. */

import type { ScoresResult, WeightsCall } from "../../../src/regard/engines/cpu/wasm/loader.js";
import { bytesOf } from "../numbers/base64";
import { fromHalf, toHalf } from "../numbers/half";
import { maxLevel, perPixel, tileBlock, type Pyramid } from "../numbers/levels";
import type { Computed, Kernels } from "./kernels";
import { Refused } from "./source";

export interface Shape {
  n_q: number;
  n_k: number;
}

export interface Weights extends Shape {
  /** Row-major weights of queries [r0, r1) and keys [c0, c1); NaN where a query does not see a key. */
  block(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array>;
}

/** What is known of a head besides its arrays. */
export interface HeadAbout extends Shape {
  d: number;
  scale: number;
  /** Whether it is causal, without other rules. */
  causal: boolean;
  /** Its rules as text; empty where there are none. */
  mask: string;
  score: string;
  offset: number;
  /** Whether lse counts a sink. */
  sink: boolean;
  /** Why there are no values, if there are none. */
  no_values: string;
  d_v?: number;
  /** The module of its rules among those of the file, if there is one, and the indices that rules read. */
  module?: number;
  b?: number;
  h?: number;
  /** Whether its rules are more than a causal mask, so that only the module knows them. */
  ruled?: boolean;
}

/** Queries (n_q, d), keys (n_k, d) and values (n_k, d_v), if they are known. */
export interface HeadArrays {
  q: Float32Array;
  k: Float32Array;
  lse: Float32Array;
  v?: Float32Array;
}

/** A head as a file holds it, its arrays in base64. */
export interface StoredHead extends HeadAbout {
  /** Of queries, keys and values: numbers, or codes on a scale of each feature. */
  dtype: "f16" | "f32" | "u16";
  q: string;
  lse: string;
  /** Absent where they are those of another head. */
  k?: string;
  v?: string;
  /** The low and the step of each feature, for codes. */
  scales?: Partial<Record<"q" | "k" | "v", string>>;
  /** The head that holds the keys and values. */
  keys_of?: string;
}

/** value = low + code · step, by feature. */
function decoded(codes: Uint16Array, scale: Float32Array): Float32Array {
  const d = scale.length / 2;
  return Float32Array.from(codes, (code, at) => scale[at % d] + code * scale[d + (at % d)]);
}

function floats(head: StoredHead, name: "q" | "k" | "v"): Float32Array {
  const bytes = bytesOf(head[name] ?? "");
  if (head.dtype === "f32") return new Float32Array(bytes);
  const halves = new Uint16Array(bytes);
  return head.dtype === "f16"
    ? fromHalf(halves)
    : decoded(halves, new Float32Array(bytesOf(head.scales?.[name] ?? "")));
}

/** keys: the head that holds its keys and values. */
export function arraysOf(head: StoredHead, keys: StoredHead = head): HeadArrays {
  const value = keys.v === undefined ? {} : { v: floats(keys, "v") };
  return { q: floats(head, "q"), k: floats(keys, "k"), lse: new Float32Array(bytesOf(head.lse)), ...value };
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

  constructor(
    readonly head: HeadAbout,
    private readonly arrays: HeadArrays,
  ) {
    ({ n_q: this.n_q, n_k: this.n_k, d: this.d, scale: this.scale } = head);
    ({ q: this.q, k: this.k, lse: this.lse } = arrays);
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
  async dots(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    const out = new Float32Array((r1 - r0) * (c1 - c0));
    for (let i = r0, at = 0; i < r1; i++)
      for (let j = c0; j < c1; j++) out[at++] = this.sees(i, j) ? this.dot(i, j) : NaN;
    return out;
  }

  /** Scores of queries [r0, r1) and keys [c0, c1), before and after the mask. */
  async scores(r0: number, r1: number, c0: number, c1: number): Promise<ScoresResult> {
    const unmasked = new Float32Array((r1 - r0) * (c1 - c0));
    const masked = new Float32Array(unmasked.length);
    for (let i = r0, at = 0; i < r1; i++)
      for (let j = c0; j < c1; j++, at++) {
        unmasked[at] = this.scale * this.dot(i, j);
        masked[at] = this.sees(i, j) ? unmasked[at] : -Infinity;
      }
    return { unmasked, masked };
  }

  weight(i: number, j: number): number {
    return this.sees(i, j) ? Math.exp(this.scale * this.dot(i, j) - this.lse[i]) : NaN;
  }

  values(): { v: Float32Array; d_v: number } | undefined {
    const { v } = this.arrays;
    const { d_v } = this.head;
    return v === undefined || d_v === undefined ? undefined : { v, d_v };
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

/** Bins of queries and keys: sums over keys as means over queries, and the largest weight; NaN where none is seen. */
export type Pooled = Record<"mass" | "max", Float32Array>;

/** Weights by a kernel that the file holds; of a plain head without it where there is no WebAssembly. */
export class KernelWeights extends ComputedWeights {
  constructor(
    head: HeadAbout,
    arrays: HeadArrays,
    private readonly name: string,
    private readonly kernels: Kernels,
  ) {
    super(head, arrays);
  }

  /** Null where no kernel can tell, and the head is plain. Throws Refused where it is not. */
  async pooled(rows: number[], cols: number[]): Promise<Pooled | null> {
    const found = await this.asked("maps", rows, cols);
    if (!found) return null;
    const { mass, max, seen } = found;
    seen.forEach((one, n) => one || (mass[n] = max[n] = NaN));
    return { mass, max };
  }

  private async asked<What extends keyof Computed>(
    what: What,
    rows: number[],
    cols: number[],
  ): Promise<Computed[What] | null> {
    const { q, k, lse, d, scale } = this;
    const { offset, b, h, module } = this.head;
    const call = (): WeightsCall => ({ q, k, lse, d, scale, offset, b, h });
    const found = await this.kernels.ask(what, this.name, module as number, call, rows, cols);
    if (found || this.plain) return found;
    throw new Refused(`The weights of this head need WebAssembly, for its rules: ${this.kernels.missing}.`, 501);
  }

  /** Whether scores follow from queries and keys without its module. */
  private get plain(): boolean {
    return !this.head.ruled;
  }

  override async scores(r0: number, r1: number, c0: number, c1: number): Promise<ScoresResult> {
    const found = this.plain ? null : await this.asked("scores", [r0, r1], [c0, c1]);
    return found ?? super.scores(r0, r1, c0, c1);
  }

  override async block(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    return (await this.pooled(edges(r0, r1, 1), edges(c0, c1, 1)))?.mass ?? super.block(r0, r1, c0, c1);
  }

  override async dots(r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    if (this.plain) return super.dots(r0, r1, c0, c1);
    const { masked } = await this.scores(r0, r1, c0, c1);
    const width = c1 - c0;
    return masked.map((s, n) => (s === -Infinity ? NaN : this.dot(r0 + Math.floor(n / width), c0 + (n % width))));
  }
}

/** Edges of bins of `step` positions from `from` to `to`; the last bin may be smaller. */
function edges(from: number, to: number, step: number): number[] {
  const found = [];
  for (let at = from; at < to; at += step) found.push(at);
  return [...found, to];
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

/** Queries and keys on a side of a tile. */
const TILE = 256;

/** The levels of a map of weights. */
export function pyramidOf({ n_q, n_k }: Shape): Pyramid {
  return { n_q, n_k, tile: TILE, max_level: maxLevel(n_q, n_k, TILE) };
}

/** Raw numbers of a head by the server's names; undefined of those that do not follow from its weights. */
export async function numbersOf(
  weights: Weights,
  what: string,
  at: readonly number[],
  options: URLSearchParams,
  pyramid: Pyramid = pyramidOf(weights),
): Promise<ArrayBuffer | undefined> {
  const { n_q, n_k } = weights;
  const range = (name: string): [number, number] => {
    const [from, to] = (options.get(name) ?? "").split(":").map(Number);
    return [from, to];
  };
  const [first, second, third] = at;
  let found: Float32Array | Uint16Array | undefined;
  if (what === "row") found = await weights.block(first, first + 1, 0, n_k);
  if (what === "column") found = await weights.block(0, n_q, first, first + 1);
  if (what === "values") found = await weights.block(...range("rows"), ...range("cols"));
  if (what === "dots" && weights instanceof ComputedWeights)
    found = await weights.dots(...range("rows"), ...range("cols"));
  if (what === "tile") found = await tileOf(weights, pyramid, first, second, third, options.get("kind") ?? "mass");
  return found?.buffer as ArrayBuffer | undefined;
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
  const made = weights instanceof KernelWeights ? await weights.pooled(edges(r0, r1, step), edges(c0, c1, step)) : null;
  if (made) return Uint16Array.from(made[kind === "mass" ? "mass" : "max"], toHalf);
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

/** The whole map in size × size pixels: of more pairs the mean over queries of sums over keys, or the largest. */
export async function thumbnail(weights: Weights, size: number, kind: string): Promise<Uint16Array> {
  const { n_q, n_k } = weights;
  const block = await weights.block(0, n_q, 0, n_k);
  const ends = (n: number, k: number): [number, number] => {
    const from = Math.floor((k * n) / size);
    return [from, Math.max(from + 1, n <= size ? 0 : Math.floor(((k + 1) * n) / size))];
  };
  const made = new Uint16Array(size * size);
  for (let r = 0; r < size; r++) {
    const [i0, i1] = ends(n_q, r);
    for (let c = 0; c < size; c++) {
      const [j0, j1] = ends(n_k, c);
      let [value, seen] = [0, false];
      for (let i = i0; i < i1; i++) {
        for (let j = j0; j < j1; j++) {
          const weight = block[i * n_k + j];
          if (Number.isNaN(weight)) continue;
          seen = true;
          value = kind === "max" ? Math.max(value, weight) : value + weight;
        }
      }
      made[r * size + c] = toHalf(seen ? (kind === "max" ? value : value / (i1 - i0)) : NaN);
    }
  }
  return made;
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
