/** Transformer blocks of the example model, and the file of its weights. */

import { fromHalf } from "../numbers/half";
import type { Product } from "./product";

/** One head of one layer: q, k, v and out are (n, d), q and k after RoPE; lse is (n). */
export interface HeadTrace {
  q: Float32Array;
  k: Float32Array;
  v: Float32Array;
  lse: Float32Array;
  out: Float32Array;
}

/** A layer: its input (n, width) before the norm, and its heads. */
export interface LayerTrace {
  x: Float32Array;
  heads: HeadTrace[];
}

/** The sizes of a block. */
export interface Sizes {
  width: number;
  hidden: number;
  heads: number;
}

/** The weights of a model by their names. */
export type Named = (name: string) => Float32Array;

/** How the scores of a layer are made: their factor, whether keys after a query are hidden, and what rotates rows. */
export interface Scores {
  scale: number;
  causal: boolean;
  rotated: (x: Float32Array) => Float32Array;
}

/** The configuration and the weights in a safetensors file of float16. */
export function fileOf<Config>(bytes: ArrayBuffer): { config: Config; of: Named } {
  const size = Number(new DataView(bytes).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, size))) as Record<string, never>;
  const { __metadata__, ...tensors } = header as Record<string, { config: string; data_offsets: [number, number] }>;
  const weights = new Map<string, Float32Array>();
  for (const [name, { data_offsets }] of Object.entries(tensors)) {
    const [from, to] = data_offsets;
    weights.set(name, fromHalf(new Uint16Array(bytes.slice(8 + size + from, 8 + size + to))));
  }
  return { config: JSON.parse(__metadata__.config) as Config, of: (name) => weights.get(name)! };
}

/** The attention of a block on its input x (n, width). */
export function attended(
  product: Product,
  x: Float32Array,
  { width, heads }: Sizes,
  w: Named,
  { scale, causal, rotated }: Scores,
): LayerTrace {
  const d = width / heads;
  const y = normalized(x, width, w("norm1"));
  const [q, k, v] = ["q", "k", "v"].map((name) => product(y, width, w(name), width));
  added(q, w("q_bias"));
  added(k, w("k_bias"));
  const all = Array.from({ length: heads }, (_, head) => {
    const part = (z: Float32Array): Float32Array => columns(z, width, head * d, d);
    return attention(product, { q: rotated(part(q)), k: rotated(part(k)), v: part(v) }, d, scale, causal);
  });
  return { x: x.slice(), heads: all };
}

/** Adds to the input x of a block what it writes, given the outputs of its heads side by side. */
export function written(product: Product, x: Float32Array, joined: Float32Array, sizes: Sizes, w: Named): void {
  const { width, hidden } = sizes;
  added(x, product(joined, width, w("o"), width));
  const inner = product(normalized(x, width, w("norm2")), width, w("up"), hidden);
  for (let p = 0; p < inner.length; p++) inner[p] = gelu(inner[p]);
  added(x, product(inner, hidden, w("down"), width));
}

/** The outputs of heads (n, d) side by side, (n, width). */
export function sideBySide(outs: readonly Float32Array[], width: number): Float32Array {
  const d = width / outs.length;
  const n = outs[0].length / d;
  const made = new Float32Array(n * width);
  outs.forEach((out, head) => {
    for (let i = 0; i < n; i++) made.set(out.subarray(i * d, (i + 1) * d), i * width + head * d);
  });
  return made;
}

/** The probabilities of logits. */
export function softmax(logits: Float32Array): Float64Array {
  const row = Float64Array.from(logits);
  const top = row.reduce((most, x) => Math.max(most, x), -Infinity);
  const powers = row.map((x) => Math.exp(x - top));
  const sum = powers.reduce((total, x) => total + x, 0);
  return powers.map((x) => x / sum);
}

/** q · k of queries and keys (n, d), row by row, `width` keys each: a multiple of 8, those beyond n are 0. */
export function dots(
  product: Product,
  q: Float32Array,
  k: Float32Array,
  d: number,
): { rows: Float32Array; width: number } {
  const width = Math.ceil(k.length / d / 8) * 8;
  const turned = new Float32Array(d * width);
  for (let j = 0; j * d < k.length; j++) for (let a = 0; a < d; a++) turned[a * width + j] = k[j * d + a];
  return { rows: product(q, d, turned, width), width };
}

/** Attention of one head. */
export function attention(
  product: Product,
  { q, k, v }: Record<"q" | "k" | "v", Float32Array>,
  d: number,
  scale: number,
  causal: boolean,
): HeadTrace {
  const n = q.length / d;
  const { rows: p, width } = dots(product, q, k, d);
  const lse = new Float32Array(n);
  const sums = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    const row = p.subarray(i * width, (i + 1) * width);
    const stop = causal ? i + 1 : n;
    let top = -Infinity;
    for (let j = 0; j < stop; j++) top = Math.max(top, scale * row[j]);
    for (let j = 0; j < stop; j++) sums[i] += row[j] = Math.exp(scale * row[j] - top);
    lse[i] = top + Math.log(sums[i]);
    row.fill(0, stop);
  }
  const values = new Float32Array(width * d);
  values.set(v);
  const out = product(p, width, values, d);
  for (let at = 0; at < out.length; at++) out[at] /= sums[Math.floor(at / d)];
  return { q, k, v, lse, out };
}

export function columns(x: Float32Array, width: number, from: number, count: number): Float32Array {
  const n = x.length / width;
  const made = new Float32Array(n * count);
  for (let i = 0; i < n; i++) made.set(x.subarray(i * width + from, i * width + from + count), i * count);
  return made;
}

/** x += y, whose rows repeat where it is shorter. */
export function added(x: Float32Array, y: Float32Array): void {
  for (let p = 0; p < x.length; p += y.length) for (let a = 0; a < y.length; a++) x[p + a] += y[a];
}

export function normalized(x: Float32Array, width: number, gain: Float32Array): Float32Array {
  const y = new Float32Array(x.length);
  for (let p = 0; p < x.length; p += width) {
    let squares = 0;
    for (let a = 0; a < width; a++) squares += x[p + a] * x[p + a];
    const factor = 1 / Math.sqrt(squares / width + 1e-6);
    for (let a = 0; a < width; a++) y[p + a] = x[p + a] * factor * gain[a];
  }
  return y;
}

export const gelu = (x: number): number =>
  0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
