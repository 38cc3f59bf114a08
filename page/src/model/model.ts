/** The example model that a saved file may hold: a small byte-level decoder, as `regard.examplemodel` runs it. */

import { attended, fileOf, normalized, sideBySide, softmax, written, type LayerTrace, type Named } from "./blocks";
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
  readonly of: Named;

  /** bytes: of a safetensors file in float16. */
  constructor(
    bytes: ArrayBuffer,
    readonly product: Product,
  ) {
    ({ config: this.config, of: this.of } = fileOf<Config>(bytes));
  }

  get d(): number {
    return this.config.width / this.config.heads;
  }

  /** Runs a text; of `whole`, a run of the same without ablation, the layers before the ablated one are taken. */
  run(ids: Uint8Array, options: Options, ablated?: Ablated, whole?: Trace): Trace {
    const { config, d, product } = this;
    const { width } = config;
    const { causal } = options;
    const scale = (options.scaled ? d ** -0.5 : 1) / options.temperature;
    const first = whole && ablated ? ablated.layer : 0;
    const layers = whole ? whole.layers.slice(0, first) : [];
    const x = whole?.layers[first].x.slice() ?? this.embedded(ids);
    for (let layer = first; layer < config.layers; layer++) {
      const w = (name: string): Float32Array => this.of(`${layer}.${name}`);
      const scores = { scale, causal, rotated: (z: Float32Array) => this.rotated(z) };
      const known = layer === first ? whole?.layers[layer] : undefined;
      layers.push(known ?? attended(product, x, config, w, scores));
      written(product, x, this.joined(layers[layer], ablated?.layer === layer ? ablated : undefined), config, w);
    }
    const logits = product(normalized(x, width, this.of("norm")), width, this.of("unembedding"), VOCABULARY);
    return { ids, layers, logits, scale, causal };
  }

  /** The normalized input of a layer, (n, width). */
  input(trace: Trace, layer: number): Float32Array {
    return normalized(trace.layers[layer].x, this.config.width, this.of(`${layer}.norm1`));
  }

  /** The outputs of a layer's heads side by side, (n, width). */
  joined({ heads }: LayerTrace, ablated?: Ablated): Float32Array {
    const outs = heads.map(({ out }, head) => (ablated?.head === head ? this.replaced(out, ablated.how) : out));
    return sideBySide(outs, this.config.width);
  }

  /** What stands in the place of the output of a head that is switched off. */
  private replaced(out: Float32Array, how: string): Float32Array {
    const { d } = this;
    const n = out.length / d;
    const made = new Float32Array(out.length);
    if (how !== "mean") return made;
    for (let a = 0; a < d; a++) {
      let sum = 0;
      for (let i = 0; i < n; i++) sum += out[i * d + a];
      for (let i = 0; i < n; i++) made[i * d + a] = sum / n;
    }
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
  return softmax(logits.subarray(i * VOCABULARY, (i + 1) * VOCABULARY));
}
