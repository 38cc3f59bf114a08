/** Pictures that are drawn in a saved file which holds the example vision transformer, as the server answers about them. */

import type { Scene, Settings } from "../data";
import { productBy, type Product } from "../model/product";
import { ViT, type PictureTrace } from "../model/vit";
import { bytesOf } from "../numbers/base64";
import { bmpOf } from "../numbers/bitmap";
import { ModelRuns, type Given, type Run } from "./runs";
import { Refused } from "./source";

/** The model that a file holds, and the pictures that came with it: (count, side, side) bytes. */
export interface StoredViT {
  vit: string;
  /** The module of its products, in base64, if a compiler made one. */
  product?: string;
  pictures: string;
}

export class TypedPictures extends ModelRuns<PictureTrace> {
  private loaded: ViT | null = null;

  constructor(
    private readonly stored: StoredViT,
    given: Given,
  ) {
    super(given);
  }

  private get model(): ViT {
    const { vit, product } = this.stored;
    return (this.loaded ??= new ViT(bytesOf(vit), productBy(product === undefined ? undefined : bytesOf(product))));
  }

  protected get product(): Product {
    return this.model.product;
  }

  file(id: string, path: string): ArrayBuffer | undefined {
    const run = this.known(id);
    if (!run || id === this.given.scene.id || path !== "picture/0") return undefined;
    return bmpOf(this.bytes((run.scene.settings as Settings).picture ?? ""), this.model.config.side);
  }

  protected settingsOf(before: Scene, given: Partial<Settings>): Settings {
    return { ...(before.settings as Settings), ...given };
  }

  protected traceOf({ picture = "" }: Settings): PictureTrace {
    return this.model.run(Float32Array.from(this.bytes(picture), (byte) => byte / 255));
  }

  protected tokensOf({ trace }: Run<PictureTrace>): string[] {
    const { side, patch } = this.model.config;
    const cells = side / patch;
    const name = (k: number): string => `r${Math.floor(k / cells) + 1}c${(k % cells) + 1} `;
    return ["[CLS] ", ...Array.from({ length: trace.ids.length - 1 }, (_, k) => name(k))];
  }

  protected about(settings: Settings, { odds }: PictureTrace): Partial<Scene> {
    const likeliest = Array.from(odds, (probability, digit) => ({ token: String(digit), probability }));
    const own = /^\d+$/.test(settings.picture ?? "") ? `picture ${settings.picture}` : "a drawn picture";
    return {
      name: `Which digit? (${own})`,
      odds: likeliest.sort((a, b) => b.probability - a.probability),
    };
  }

  /** The pixels of a picture: one that came with the model, by its number, or base64. */
  private bytes(picture: string): Uint8Array {
    const size = this.model.config.side ** 2;
    if (/^\d{1,3}$/.test(picture)) {
      const all = new Uint8Array(bytesOf(this.stored.pictures));
      const one = all.subarray(Number(picture) * size, (Number(picture) + 1) * size);
      if (one.length === size) return one;
    } else if (picture.length === 4 * Math.ceil(size / 3)) return new Uint8Array(bytesOf(picture));
    throw new Refused(`picture must be ${size} bytes in base64, or the number of a stored picture`, 422);
  }
}
