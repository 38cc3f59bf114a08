import type { Earlier, Heads, Heats, Layer, Profile, Scene, Scenes, Settings, TokenRow, Words } from "../data";
import { fromHalf } from "../numbers/half";
import type { Pyramid } from "../numbers/levels";
import { laid } from "../numbers/grids";
import { sinkShare } from "../numbers/sinks";
import { earlierOf } from "./earlier";
import { heatOf, plain, rolloutOf } from "./heats";
import { matricesOf, scoresOf } from "./matrices";
import { Refused, type Numbers, type Source } from "./source";
import { stagesOf } from "./stages";
import { TypedTexts, type StoredModel } from "./typed";
import { bytesOf } from "../numbers/base64";
import { Kernels } from "./kernels";
import { WordRows, type StoredRows } from "./wordrows";
import {
  arraysOf,
  ComputedWeights,
  KernelWeights,
  numbersOf,
  thumbnail,
  TiledWeights,
  type StoredHead,
  type Weights,
} from "./weights";

export interface StoredData {
  /** The version of this data; none in the first. */
  format?: number;
  answers: Record<string, unknown>;
  exact: Record<string, StoredHead>;
  /** Modules of rules, in base64. */
  modules?: string[];
  /** Rows of words over pictures, in place of heads. */
  rows?: StoredRows;
  /** The example model, for texts that are typed. */
  model?: StoredModel;
}

/** The data as a file has it: the answers may be JSON that is deflated, in base64. */
interface WrittenData extends Omit<StoredData, "answers"> {
  answers: StoredData["answers"] | string;
}

async function inflated(text: string): Promise<unknown> {
  const plain = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(plain).json();
}

const NO_STEPS =
  "The file holds the weights of this head without its queries and keys: its steps and scores are shown by `regard look`.";

/** Keys of one token that are told for each head: three, when lists leave aside the first, itself and its neighbours. */
const LOOKED_AT = 7;

/** Tiles of one head that are held as numbers, 256 KB each: a row of them up to 8,192 keys. */
const DECODED = 32;

type Stored = { f16?: string; f32?: string; bytes?: string } | undefined;

/** A page that was saved: it answers itself, from what it holds and from what can be computed of that. */
export class FileSource implements Source {
  readonly kind = "file";
  readonly note: string;
  progress = (): void => {};
  private readonly heads = new Map<string, Weights>();
  private readonly kernels: Kernels;
  private readonly typed: TypedTexts | null;
  private readonly rows: WordRows | null;

  constructor(private readonly data: StoredData) {
    this.kernels = new Kernels(data.modules ?? []);
    this.typed = typedIn(data);
    const exact = Object.values(data.exact);
    const heads = Object.keys(data.answers).filter((path) => path.includes("/map/")).length;
    const halves = exact.length < heads || exact.some(({ dtype }) => dtype === "f16");
    const codes = exact.some(({ dtype }) => dtype === "u16");
    const [first] = (data.answers["api/scenes"] as Scenes | undefined)?.scenes ?? [];
    this.rows = data.rows && first.held ? new WordRows(data.rows, first.held.tokens) : null;
    if (this.rows) this.note = "saved with the rows of words, in 8 bits a number";
    else if (halves) this.note = "saved in half precision: weights are right to 2 or 3 digits";
    else this.note = codes ? "saved in 16 bits a number: weights are right to 3 digits" : "saved";
  }

  /** A source of what a file holds. */
  static async of(text: string): Promise<FileSource> {
    const data = JSON.parse(text) as WrittenData;
    const answers = typeof data.answers === "string" ? await inflated(data.answers) : data.answers;
    return new FileSource({ ...data, answers: answers as StoredData["answers"] });
  }

  async json(path: string): Promise<unknown> {
    const [place, query = ""] = path.split("?");
    const [, scene, what, layer, head, i, j] = place.split("/");
    if (path === "api/scenes") return this.scenes();
    if (path in this.data.answers) return this.data.answers[path];
    const typed = await this.typed?.json(scene, what, place.split("/").slice(3), new URLSearchParams(query));
    if (typed !== undefined) return typed;
    if (what === "token") return { rows: await this.everyHead(scene, Number(layer)) };
    if (what === "heat" || what === "rollout") return this.onGrid(scene, what, new URLSearchParams(query));
    if (what === "earlier") return this.earlier(scene, Number(layer), Number(head), Number(i), Number(j));
    if (what === "step") {
      const weights = this.steps(`${scene}/${layer}/${head}`);
      const share = weights.head.sink ? this.sinks(`${scene}/sinks/${layer}/${head}`)[Number(i)] : undefined;
      return { stages: await stagesOf(weights, Number(i), Number(j), share) };
    }
    if (what === "matrices") {
      return { matrices: await matricesOf(this.steps(`${scene}/${layer}/${head}`)) };
    }
    if (what === "variance") this.steps(`${scene}/${layer}/${head}`); // refused where queries and keys are not held
    throw absent();
  }

  async numbers(path: string): Promise<Numbers> {
    return { data: await this.found(path), exact: true };
  }

  private async found(path: string): Promise<ArrayBuffer> {
    const stored = this.data.answers[path] as Stored;
    const text = stored?.f16 ?? stored?.f32 ?? stored?.bytes;
    if (text !== undefined) return bytesOf(text);
    const [place, query = ""] = path.split("?");
    const [, scene, what, layer, head, ...rest] = place.split("/");
    const options = new URLSearchParams(query);
    if (what === "thumbs") {
      const { heads } = this.layersOf(scene)[Number(layer)] ?? { heads: 0 };
      const size = Number(options.get("size"));
      const made = new Uint16Array(heads * size * size);
      for (let k = 0; k < heads; k++) {
        const one = await thumbnail(this.weights(`${scene}/${layer}/${k}`), size, options.get("kind") ?? "mass");
        made.set(one, k * size * size);
      }
      return made.buffer;
    }
    if (what === "heat") {
      const { layers: all, means = [] } = (await this.json(path)) as Heats;
      return Float32Array.from([...all.flat(), ...means].flat(), (weight) => weight ?? NaN).buffer;
    }
    const name = `${scene}/${layer}/${head}`;
    const weights = this.weights(name);
    if (what === "dots") this.steps(name); // refused where queries and keys are not held
    if (what === "scores") return (await scoresOf(this.steps(name), Number(rest[0]))).buffer as ArrayBuffer;
    if (what === "norms") return normsOf(weights);
    const map = what === "tile" ? ((await this.json(`api/${scene}/map/${layer}/${head}`)) as Pyramid) : undefined;
    const made = await numbersOf(weights, what, rest.map(Number), options, map);
    if (made) return made;
    throw absent();
  }

  async post(path: string, body: unknown): Promise<unknown> {
    if (!this.typed) throw new Refused("A saved page has no model: start `regard look` to type a text.", 405);
    return { scene: this.typed.run(path.split("/")[1], body as Partial<Settings>) };
  }

  /** What the file was saved with, and what was typed. */
  private scenes(): Scenes {
    const stored = this.data.answers["api/scenes"] as Scenes;
    return { ...stored, scenes: [...stored.scenes, ...(this.typed?.scenes ?? [])] };
  }

  /** The weight of each query on the learned sink. */
  private sinks(path: string): Float32Array {
    const text = (this.data.answers[`api/${path}`] as Stored)?.f32;
    if (text === undefined) throw absent();
    return new Float32Array(bytesOf(text));
  }

  private sceneOf(scene: string): Pick<Scene, "layers" | "grids"> {
    return this.scenes().scenes.find(({ id }) => id === scene) ?? { layers: [] };
  }

  private layersOf(scene: string): Layer[] {
    return this.sceneOf(scene).layers;
  }

  /** Where one query looks in every head. */
  private async everyHead(scene: string, i: number): Promise<TokenRow[]> {
    const rows: TokenRow[] = [];
    for (const [layer, of] of this.layersOf(scene).entries()) {
      const { heads, n_k } = of;
      for (let head = 0; head < heads; head++) {
        const row = await this.weights(`${scene}/${layer}/${head}`).block(i, i + 1, 0, n_k);
        const keys = Array.from(row.keys())
          .filter((j) => row[j] > 0)
          .sort((a, b) => row[b] - row[a])
          .slice(0, LOOKED_AT);
        const share = sinkShare(of, row);
        const sink = share === null ? {} : { sink: share };
        rows.push({ layer, head, keys, weights: keys.map((j) => row[j]), ...sink });
      }
    }
    return rows;
  }

  /** The weights of a token on a picture. */
  private async onGrid(scene: string, what: string, options: URLSearchParams): Promise<unknown> {
    const { layers, grids = [] } = this.sceneOf(scene);
    const grid = grids[Number(options.get("grid"))];
    if (!grid) throw absent();
    const of = (layer: number, head: number): Weights => this.weights(`${scene}/${layer}/${head}`);
    const token = Number(options.get("token"));
    if (what === "rollout") return rolloutOf(layers, of, grid, token);
    const heat: Heats = await heatOf(layers, of, grid, token, options.get("side") ?? "row");
    if (!this.rows) return heat;
    const means = await Promise.all(layers.map((_, layer) => this.rows!.row(layer, "mean", 0, token)));
    return { ...heat, means: means.map((row) => plain(laid(grid, row))) };
  }

  /** The earlier heads that wrote what a head reads at key j. */
  private earlier(scene: string, layer: number, head: number, i: number, j: number): Promise<Earlier> {
    const layers = this.layersOf(scene);
    const of = (number: number, k: number): Weights => this.weights(`${scene}/${number}/${k}`);
    const heads = {
      row: (number: number, k: number, q: number) => of(number, k).block(q, q + 1, 0, layers[number].n_k),
      norms: (number: number, k: number) => new Float32Array(normsOf(of(number, k))),
    };
    return earlierOf(heads, layers, { layer, head, i, j }, this.data.answers["api/words"] as Words);
  }

  private weights(name: string): Weights {
    const [scene, layer, head] = name.split("/");
    const known =
      this.heads.get(name) ?? (this.data.exact[name] ? undefined : this.typed?.weights(scene, +layer, +head));
    if (known) return known;
    const stored = this.data.exact[name];
    if (this.rows) {
      const { n_q, n_k } = this.layersOf(scene)[+layer];
      return this.rows.head(+layer, +head, n_q, n_k);
    }
    const made = stored ? this.computed(name, stored) : this.tiled(name);
    this.heads.set(name, made);
    return made;
  }

  /** The weights of a head whose queries and keys are here. Throws Refused for another. */
  private steps(name: string): ComputedWeights {
    const weights = this.weights(name);
    if (weights instanceof ComputedWeights) return weights;
    const [scene, layer] = name.split("/");
    throw new Refused(this.layersOf(scene)[Number(layer)]?.lacks || NO_STEPS, 404);
  }

  private computed(name: string, stored: StoredHead): Weights {
    const arrays = arraysOf(stored, this.data.exact[stored.keys_of ?? name]);
    if (stored.module === undefined) return new ComputedWeights(stored, arrays);
    return new KernelWeights(stored, arrays, name, this.kernels);
  }

  private tiled(name: string): Weights {
    const [scene, head] = [name.split("/")[0], name.split("/").slice(1).join("/")];
    const pyramid = this.data.answers[`api/${scene}/map/${head}`] as Pyramid | undefined;
    if (!pyramid) throw absent();
    const decoded = new Map<string, Float32Array>(); // rows are asked for one after the other
    return new TiledWeights(pyramid, async (x, y) => {
      const known = decoded.get(`${x}/${y}`);
      if (known) return known;
      const stored = this.data.answers[`api/${scene}/tile/${head}/${pyramid.max_level}/${x}/${y}?kind=mass`] as Stored;
      if (!stored?.f16) throw absent();
      const made = fromHalf(new Uint16Array(bytesOf(stored.f16)));
      decoded.set(`${x}/${y}`, made);
      if (decoded.size > DECODED) decoded.delete(decoded.keys().next().value as string);
      return made;
    });
  }
}

/** Who answers about typed texts, if the file holds the model. */
function typedIn({ answers, model }: StoredData): TypedTexts | null {
  if (!model) return null;
  const [scene] = (answers["api/scenes"] as Scenes).scenes;
  const of = (what: string): unknown => answers[`api/${scene.id}/${what}`];
  const profiles = Object.entries(of("profiles/0/0") as Record<string, Profile>);
  const labels = Object.fromEntries(profiles.map(([name, { label }]) => [name, label]));
  const given = { scene, heads: of("heads") as Heads, words: answers["api/words"] as Words, labels };
  return new TypedTexts(model, given);
}

function absent(): Refused {
  return new Refused("This part is not in the saved file: it holds as much as its size limit allowed.", 404);
}

/** The length of each value of a head; none where values are not known. */
function normsOf(weights: Weights): ArrayBuffer {
  const held = weights instanceof ComputedWeights ? weights.values() : undefined;
  const { v, d_v } = held ?? { v: new Float32Array(0), d_v: 1 };
  return Float32Array.from({ length: v.length / d_v }, (_, j) => Math.hypot(...v.subarray(j * d_v, (j + 1) * d_v)))
    .buffer;
}
