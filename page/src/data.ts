/** What the page knows, asked from a source once and kept within bounds. */

import type { Pyramid } from "./numbers/levels";
import { Recent } from "./recent";
import type { Source } from "./source/source";

export interface Layer {
  name: string;
  heads: number;
  kv_heads: number;
  n_q: number;
  n_k: number;
  d: number;
  causal: boolean;
  cross: boolean;
}

export interface Settings {
  text: string;
  temperature: number;
  scaled: boolean;
  causal: boolean;
}

export interface Scene {
  id: string;
  name: string;
  kind: string;
  note: string;
  n_tokens: number;
  has_tokens: boolean;
  layers: Layer[];
  editable: boolean;
  settings: Settings | null;
}

export interface Scenes {
  title: string;
  version: string;
  engine: string;
  scenes: Scene[];
}

export interface Column {
  name: string;
  label: string;
  help: string;
  low: number;
  high: number;
}

export interface HeadRow {
  layer: number;
  head: number;
  kv_head: number;
  kind: string | null;
  scores: Record<string, number | null>;
}

export interface Heads {
  columns: Column[];
  rows: HeadRow[];
}

export type Kind = "mass" | "max";

type Maxima = Record<Kind, number[]>;

export interface MapInfo extends Pyramid {
  levels: number;
  maximum: Maxima;
  /** The same without the first column of pixels. */
  maximum_rest?: Maxima;
}

export interface Profile {
  start: number;
  step: number;
  values: (number | null)[];
  label: string;
}

export interface Stage {
  name: string;
  formula: string;
  text: string;
  value?: number | null;
  values?: (number | null)[];
  labels?: string[];
}

export interface HeadAt {
  scene: string;
  layer: number;
  head: number;
}

const PAGE = 4096;
const CELL = 64;
const TILES_KEPT = 384;

/** The tokens along one axis, fetched by pages. */
export class Tokens {
  total = 0;
  private readonly pages = new Map<number, string[]>();
  private readonly asked = new Map<number, Promise<void>>();

  constructor(private readonly ask: (start: number) => Promise<{ total: number; tokens: string[] }>) {}

  /** The token, or undefined while it is not here. */
  at(index: number): string | undefined {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  /** Brings tokens [start, stop); resolves to whether any were missing. */
  async load(start: number, stop: number): Promise<boolean> {
    const missing: Promise<void>[] = [];
    for (let page = Math.max(0, Math.floor(start / PAGE)); page * PAGE < stop; page++) {
      if (this.pages.has(page)) continue;
      let asked = this.asked.get(page);
      if (!asked) {
        asked = this.ask(page * PAGE).then(({ total, tokens }) => {
          this.total = total;
          this.pages.set(page, tokens);
        });
        asked.catch(() => this.asked.delete(page));
        this.asked.set(page, asked);
      }
      missing.push(asked);
    }
    await Promise.all(missing);
    return missing.length > 0;
  }
}

export class Data {
  private readonly answers = new Recent<Promise<unknown>>(256);
  private readonly tiles = new Recent<Promise<Uint16Array>>(TILES_KEPT);
  private readonly cells = new Recent<Promise<Float32Array>>(64);
  private readonly tokenLists = new Recent<Tokens>(8);

  constructor(readonly source: Source) {}

  scenes(): Promise<Scenes> {
    return this.source.json("api/scenes") as Promise<Scenes>;
  }

  heads(scene: string): Promise<Heads> {
    return this.json(`api/${scene}/heads`);
  }

  map({ scene, layer, head }: HeadAt): Promise<MapInfo> {
    return this.json(`api/${scene}/map/${layer}/${head}`);
  }

  profiles({ scene, layer, head }: HeadAt): Promise<Record<string, Profile>> {
    return this.json(`api/${scene}/profiles/${layer}/${head}`);
  }

  async stages({ scene, layer, head }: HeadAt, i: number, j: number): Promise<Stage[]> {
    return (await this.json<{ stages: Stage[] }>(`api/${scene}/step/${layer}/${head}/${i}/${j}`)).stages;
  }

  /** Thumbnails of a layer, heads × size × size half floats. */
  thumbs(scene: string, layer: number, size: number, kind: Kind): Promise<Uint16Array> {
    return this.halves(`api/${scene}/thumbs/${layer}?size=${size}&kind=${kind}`);
  }

  tile({ scene, layer, head }: HeadAt, level: number, x: number, y: number, kind: Kind): Promise<Uint16Array> {
    return this.halves(`api/${scene}/tile/${layer}/${head}/${level}/${x}/${y}?kind=${kind}`);
  }

  row({ scene, layer, head }: HeadAt, i: number): Promise<Float32Array> {
    return this.floats(`api/${scene}/row/${layer}/${head}/${i}`);
  }

  column({ scene, layer, head }: HeadAt, j: number): Promise<Float32Array> {
    return this.floats(`api/${scene}/column/${layer}/${head}/${j}`);
  }

  values({ scene, layer, head }: HeadAt, r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    return this.floats(`api/${scene}/values/${layer}/${head}?rows=${r0}:${r1}&cols=${c0}:${c1}`);
  }

  /** One exact weight, fetched with its neighbours. */
  async weight(at: HeadAt, info: Pyramid, i: number, j: number): Promise<number> {
    const [r0, c0] = [i - (i % CELL), j - (j % CELL)];
    const c1 = Math.min(info.n_k, c0 + CELL);
    const block = await this.values(at, r0, Math.min(info.n_q, r0 + CELL), c0, c1);
    return block[(i - r0) * (c1 - c0) + j - c0];
  }

  tokens(scene: string, axis: "query" | "key"): Tokens {
    const name = `${scene}/${axis}`;
    let known = this.tokenLists.get(name);
    if (!known) {
      known = new Tokens(async (start) => {
        const path = `api/${scene}/tokens?axis=${axis}&start=${start}&stop=${start + PAGE}`;
        return (await this.source.json(path)) as { total: number; tokens: string[] };
      });
      this.tokenLists.set(name, known);
    }
    return known;
  }

  async run(scene: string, settings: Settings): Promise<Scene> {
    return ((await this.source.post(`api/${scene}/run`, settings)) as { scene: Scene }).scene;
  }

  private json<T>(path: string): Promise<T> {
    return this.once(this.answers, path, () => this.source.json(path)) as Promise<T>;
  }

  private halves(path: string): Promise<Uint16Array> {
    return this.once(this.tiles, path, async () => new Uint16Array(await this.source.numbers(path)));
  }

  private floats(path: string): Promise<Float32Array> {
    return this.once(this.cells, path, async () => new Float32Array(await this.source.numbers(path)));
  }

  /** Answers that fail are not kept. */
  private once<V>(kept: Recent<Promise<V>>, path: string, ask: () => Promise<V>): Promise<V> {
    const known = kept.get(path);
    if (known) return known;
    const asked = ask();
    asked.catch(() => kept.delete(path));
    kept.set(path, asked);
    return asked;
  }
}
