/** The example model that a saved file may hold: a small byte-level decoder, as `regard.examplemodel` runs it. */

import { fromHalf } from "../numbers/half";
import type { Product } from "./product";

export interface Config {
  layers: number;
  heads: number;
  width: number;
  hidden: number;
  rotary: number;
  base: number;
}

export interface Options {
  temperature: number;
  scaled: boolean;
  causal: boolean;
}

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

export interface Trace {
  ids: Uint8Array;
  layers: LayerTrace[];
  /** (n, 256) */
  logits: Float32Array;
  scale: number;
  causal: boolean;
}

/** A head whose output is replaced: by zeros, or by its mean over the text. */
export interface Ablated {
  layer: number;
  head: number;
  how: string;
}

const VOCABULARY = 256;

export class Model {
  readonly config: Config;
  private readonly weights = new Map<string, Float32Array>();

  /** bytes: of a safetensors file in float16. */
  constructor(
    bytes: ArrayBuffer,
    readonly product: Product,
  ) {
    const size = Number(new DataView(bytes).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, size))) as Record<string, never>;
    const { __metadata__, ...tensors } = header as Record<string, { config: string; data_offsets: [number, number] }>;
    this.config = JSON.parse(__metadata__.config) as Config;
    for (const [name, { data_offsets }] of Object.entries(tensors)) {
      const [from, to] = data_offsets;
      this.weights.set(name, fromHalf(new Uint16Array(bytes.slice(8 + size + from, 8 + size + to))));
    }
  }

  get d(): number {
    return this.config.width / this.config.heads;
  }

  of(name: string): Float32Array {
    return this.weights.get(name)!;
  }

  /** Runs a text; of `whole`, a run of the same without ablation, the layers before the ablated one are taken. */
  run(ids: Uint8Array, options: Options, ablated?: Ablated, whole?: Trace): Trace {
    const { config, d, product } = this;
    const { width, hidden, heads } = config;
    const scale = (options.scaled ? d ** -0.5 : 1) / options.temperature;
    const first = whole && ablated ? ablated.layer : 0;
    const layers = whole ? whole.layers.slice(0, first) : [];
    const x = whole?.layers[first].x.slice() ?? this.embedded(ids);
    for (let layer = first; layer < config.layers; layer++) {
      const w = (name: string): Float32Array => this.of(`${layer}.${name}`);
      let made = layer === first ? whole?.layers[layer] : undefined;
      if (!made) {
        const y = normalized(x, width, w("norm1"));
        const [q, k, v] = ["q", "k", "v"].map((name) => product(y, width, w(name), width));
        added(q, w("q_bias"));
        added(k, w("k_bias"));
        const all = Array.from({ length: heads }, (_, head) => {
          const part = (z: Float32Array): Float32Array => columns(z, width, head * d, d);
          const own = { q: this.rotated(part(q)), k: this.rotated(part(k)), v: part(v) };
          return attention(product, own, d, scale, options.causal);
        });
        made = { x: x.slice(), heads: all };
      }
      layers.push(made);
      const joined = this.joined(made, ablated?.layer === layer ? ablated : undefined);
      added(x, product(joined, width, w("o"), width));
      const inner = product(normalized(x, width, w("norm2")), width, w("up"), hidden);
      for (let p = 0; p < inner.length; p++) inner[p] = gelu(inner[p]);
      added(x, product(inner, hidden, w("down"), width));
    }
    const logits = product(normalized(x, width, this.of("norm")), width, this.of("unembedding"), VOCABULARY);
    return { ids, layers, logits, scale, causal: options.causal };
  }

  /** The normalized input of a layer, (n, width). */
  input(trace: Trace, layer: number): Float32Array {
    return normalized(trace.layers[layer].x, this.config.width, this.of(`${layer}.norm1`));
  }

  /** The outputs of a layer's heads side by side, (n, width). */
  joined({ heads }: LayerTrace, ablated?: Ablated): Float32Array {
    const { d } = this;
    const { width } = this.config;
    const n = heads[0].lse.length;
    const made = new Float32Array(n * width);
    heads.forEach(({ out }, head) => {
      let own = out;
      if (ablated?.head === head) {
        own = new Float32Array(out.length);
        if (ablated.how === "mean") {
          for (let a = 0; a < d; a++) {
            let sum = 0;
            for (let i = 0; i < n; i++) sum += out[i * d + a];
            for (let i = 0; i < n; i++) own[i * d + a] = sum / n;
          }
        }
      }
      for (let i = 0; i < n; i++) made.set(own.subarray(i * d, (i + 1) * d), i * width + head * d);
    });
    return made;
  }

  private embedded(ids: Uint8Array): Float32Array {
    const { width } = this.config;
    const embedding = this.of("embedding");
    const x = new Float32Array(ids.length * width);
    ids.forEach((id, i) => x.set(embedding.subarray(id * width, (id + 1) * width), i * width));
    return x;
  }

  /** RoPE on the first features of each row: a with a + rotary / 2. */
  private rotated(x: Float32Array): Float32Array {
    const { d } = this;
    const { rotary, base } = this.config;
    const half = rotary / 2;
    for (let a = 0; a < half; a++) {
      const frequency = base ** ((-2 * a) / rotary);
      for (let i = 0; i * d < x.length; i++) {
        const [sine, cosine] = [Math.sin(i * frequency), Math.cos(i * frequency)];
        const [one, other] = [x[i * d + a], x[i * d + a + half]];
        x[i * d + a] = one * cosine - other * sine;
        x[i * d + a + half] = other * cosine + one * sine;
      }
    }
    return x;
  }
}

/** A beginning-of-sequence token, then the text's bytes. */
export function encoded(text: string): Uint8Array {
  const bytes = new TextEncoder().encode(text);
  const ids = new Uint8Array(bytes.length + 1);
  ids.set(bytes, 1);
  return ids;
}

/** The nats of each byte after the first. */
export function losses({ ids, logits }: Trace): Float64Array {
  return Float64Array.from({ length: ids.length - 1 }, (_, i) => {
    const row = logits.subarray(i * VOCABULARY, (i + 1) * VOCABULARY);
    const top = row.reduce((most, x) => Math.max(most, x), -Infinity);
    return top + Math.log(row.reduce((sum, x) => sum + Math.exp(x - top), 0)) - row[ids[i + 1]];
  });
}

/** The probabilities of the byte after position i. */
export function shares({ logits }: Trace, i: number): Float64Array {
  const row = Float64Array.from(logits.subarray(i * VOCABULARY, (i + 1) * VOCABULARY));
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
function attention(
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

function columns(x: Float32Array, width: number, from: number, count: number): Float32Array {
  const n = x.length / width;
  const made = new Float32Array(n * count);
  for (let i = 0; i < n; i++) made.set(x.subarray(i * width + from, i * width + from + count), i * count);
  return made;
}

/** x += y, whose rows repeat where it is shorter. */
function added(x: Float32Array, y: Float32Array): void {
  for (let p = 0; p < x.length; p += y.length) for (let a = 0; a < y.length; a++) x[p + a] += y[a];
}

function normalized(x: Float32Array, width: number, gain: Float32Array): Float32Array {
  const y = new Float32Array(x.length);
  for (let p = 0; p < x.length; p += width) {
    let squares = 0;
    for (let a = 0; a < width; a++) squares += x[p + a] * x[p + a];
    const factor = 1 / Math.sqrt(squares / width + 1e-6);
    for (let a = 0; a < width; a++) y[p + a] = x[p + a] * factor * gain[a];
  }
  return y;
}

const gelu = (x: number): number => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
