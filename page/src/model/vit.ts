/** The example vision transformer, as `regard.interpret.examplemodel.vit` runs it: which digit is on a photograph? */

import {
  added,
  attended,
  fileOf,
  normalized,
  sideBySide,
  softmax,
  written,
  type LayerTrace,
  type Named,
} from "./blocks";
import type { Product } from "./product";

export interface ViTConfig {
  layers: number;
  heads: number;
  width: number;
  hidden: number;
  /** Pixels of a side of a picture, and of a patch. */
  side: number;
  patch: number;
  classes: number;
}

export interface PictureTrace {
  /** The numbers of the tokens: no two are alike. */
  ids: Uint8Array;
  layers: LayerTrace[];
  /** The probability of each class. */
  odds: Float64Array;
  scale: number;
  causal: boolean;
}

export class ViT {
  readonly config: ViTConfig;
  private readonly of: Named;

  /** bytes: of a safetensors file in float16. */
  constructor(
    bytes: ArrayBuffer,
    readonly product: Product,
  ) {
    ({ config: this.config, of: this.of } = fileOf<ViTConfig>(bytes));
  }

  /** Runs a picture in grey, (side, side) from 0 to 1. */
  run(pixels: Float32Array): PictureTrace {
    const { config, product } = this;
    const { width } = config;
    const scale = (width / config.heads) ** -0.5;
    const x = this.embedded(pixels);
    const layers: LayerTrace[] = [];
    for (let layer = 0; layer < config.layers; layer++) {
      const w = (name: string): Float32Array => this.of(`${layer}.${name}`);
      const made = attended(product, x, config, w, { scale, causal: false, rotated: (z) => z });
      layers.push(made);
      const outs = made.heads.map(({ out }) => out);
      written(product, x, sideBySide(outs, width), config, w);
    }
    const cls = normalized(x.slice(0, width), width, this.of("norm"));
    const ids = Uint8Array.from({ length: x.length / width }, (_, token) => token);
    return { ids, layers, odds: softmax(this.classes(cls)), scale, causal: false };
  }

  /** The class token, then the patches row by row, each with its position: (tokens, width). */
  private embedded(pixels: Float32Array): Float32Array {
    const { side, patch, width } = this.config;
    const cells = side / patch;
    const patches = new Float32Array(cells * cells * patch * patch);
    pixels.forEach((value, p) => {
      const [row, column] = [Math.floor(p / side), p % side];
      const cell = Math.floor(row / patch) * cells + Math.floor(column / patch);
      patches[(cell * patch + (row % patch)) * patch + (column % patch)] = value - 0.5;
    });
    const x = new Float32Array((cells * cells + 1) * width);
    x.set(this.of("cls"));
    const embedded = this.product(patches, patch * patch, this.of("patches"), width);
    added(embedded, this.of("patches_bias"));
    x.set(embedded, width);
    added(x, this.of("positions"));
    return x;
  }

  /** The logits of the classes; their number is no multiple of what `product` computes together. */
  private classes(cls: Float32Array): Float32Array {
    const { classes, width } = this.config;
    const w = this.of("classes");
    return Float32Array.from({ length: classes }, (_, c) => {
      let sum = 0;
      for (let a = 0; a < width; a++) sum += cls[a] * w[a * classes + c];
      return sum;
    });
  }
}
