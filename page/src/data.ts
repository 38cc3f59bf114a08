/** What the page knows, asked from a source once and kept within bounds. */

import type { EveryHead } from "./numbers/heats";
import type { Pyramid } from "./numbers/levels";
import { Recent } from "./recent";
import type { Numbers, Source } from "./source/source";
import type { State } from "./state";

export interface Layer {
  name: string;
  /** The model's number of the layer, and of each of its heads; everywhere else they are counted from 0. */
  number: number;
  numbers: number[];
  heads: number;
  kv_heads: number;
  n_q: number;
  n_k: number;
  d: number;
  causal: boolean;
  cross: boolean;
  /** The key where query 0 stands, if that is another than key 0: queries are the last of the keys, after a cache. */
  offset?: number;
  /** The rules of its scores, as text. */
  rules: string;
  /** Whether its scores are scale · q · k alone, with no mask or a causal one. */
  plain: boolean;
  scale: number;
  /** Whether a learned sink takes a part of every row. */
  sink?: boolean;
  /** What is said of heads that came as weights alone; empty of others. */
  lacks?: string;
  /** The score of each head's learned sink, null for −∞; where there are any. */
  sinks?: (number | null)[];
}

/** Where the patches of a picture, or the frames of a sound, are among the tokens. */
export interface Grid {
  kind: "picture" | "sound";
  /** Whether its tokens are queries and keys, or keys alone, as in cross-attention. */
  side: "both" | "keys";
  rows: number;
  columns: number;
  /** The token of patch row · columns + column; −1 of a patch without one. */
  tokens: number[];
  /** The path of the picture, of so many pixels, null where it is not known. */
  picture: string | null;
  width: number;
  height: number;
  /** The length of a sound. */
  seconds: number | null;
  /** One of several: a frame of a video, or the whole of a picture and its tiles. */
  name?: string;
}

/** Settings of a run; a model of one's own has a text alone. */
export interface Settings {
  text: string;
  temperature?: number;
  scaled?: boolean;
  causal?: boolean;
}

/** How a text goes on by one token. */
export type More = "likeliest" | "drawn";

/** What the model expects at a position, and what stands there. */
export interface Expected {
  i: number;
  likeliest: { token: string; probability: number }[];
  actual: { token: string; probability: number } | null;
}

export interface Scene {
  id: string;
  name: string;
  kind: string;
  note: string;
  batch: number;
  n_tokens: number;
  has_tokens: boolean;
  /** Whether queries have tokens where keys have none: words over a sound. */
  has_query_tokens?: boolean;
  /** Tokens that make a repeated run. */
  prefix: number;
  layers: Layer[];
  editable: boolean;
  settings: Settings | null;
  /** What the model expects at each query: the next token, or that token itself, masked. */
  predicts?: "next" | "masked" | "";
  /** Whether this is what the page was started with; other scenes were typed. */
  given?: boolean;
  /** What the model expects next. */
  following?: { token: string; probability: number }[];
  /** Pictures and sounds among the tokens. */
  grids?: Grid[];
  /** Where a file holds rows of words instead of heads: their queries, and patches on a side of what has a weight. */
  held?: { tokens: number[]; pool: number };
}

export interface Scenes {
  title: string;
  version: string;
  engine: string;
  scenes: Scene[];
  /** The view to open with, as a link's fragment, where no other is asked for. */
  start?: string;
}

export interface Column {
  name: string;
  label: string;
  help: string;
  low: number;
  /** null: there is no largest score. */
  high: number | null;
}

/** A kind that a head is of; `name` has the distance of "n tokens back". */
export interface NamedKind {
  kind: string;
  name: string;
  score: number;
  tentative: boolean;
}

export interface HeadRow {
  layer: number;
  head: number;
  kv_head: number;
  kind: string | null;
  /** Every notable kind, the one that it is called by first. */
  kinds: NamedKind[];
  scores: Record<string, number | null>;
}

export interface Heads {
  columns: Column[];
  rows: HeadRow[];
}

export type Kind = "mass" | "max";

/** One a level; null where it is not known. */
type Maxima = Record<Kind, (number | null)[]>;

export interface MapInfo extends Pyramid {
  levels: number;
  maximum: Maxima;
  /** The share of queries that the levels made by one pass hold by now; 1: all. */
  done: number;
}

/** Half floats; infinite ones are not computed yet, which no weight is. */
export interface Halves {
  bits: Uint16Array;
  /** Whether all are there and none is an estimate. */
  exact: boolean;
}

export interface Profile {
  start: number;
  step: number;
  values: (number | null)[];
  label: string;
  /** Of bins that are not alike: value k is the mean over [edges[k], edges[k + 1]). */
  edges?: number[];
  /** The pairs that each mean is of. */
  pairs?: number[];
}

export interface Stage {
  name: string;
  formula: string;
  text: string;
  value?: number | null;
  values?: (number | null)[];
  labels?: string[];
}

/** What a scene is opened on: a head, a query or −1 for the last, and how sure that is. */
export interface Finding {
  layer: number;
  head: number;
  i: number;
  how: string;
  /** The key to mark and the reason, where the scene names them. */
  j?: number;
  why?: string;
}

/** What is said of a shape in a head's map: a pattern of `Words`, and what fills it in. */
export interface Told {
  name: keyof Words["claims"];
  parts: Record<string, string>;
}

export interface TourStep {
  title: string;
  text: string;
  state: Partial<State>;
  /** How the example model is run for this step, if not as it was. */
  settings: Settings | null;
}

/** Where one token looks in a head: keys and weights, the largest first. */
export interface TokenRow {
  layer: number;
  head: number;
  keys: number[];
  weights: number[];
  /** The weight on the learned sink, if there is one. */
  sink?: number;
}

/** The earlier heads that wrote what a head reads at a key, by falling product along that path. */
export interface Earlier {
  /** The head's own weight on the key. */
  weight: number;
  /** Whether products have the lengths of values. */
  values: boolean;
  heads: { layer: number; head: number; key: number; weight: number; norm: number | null; product: number }[];
  /** The reason why none is known; empty if any is. */
  why: string;
}

/** Everything that is said, the same in the terminal and in pictures. */
export interface Words {
  views: Record<string, string>;
  /** The words for {more}: on a scale from light to dark, and from dark to light. */
  more: [string, string];
  /** The words for {sum}: without a learned sink, and with one. */
  sums: [string, string];
  patterns: Record<"last" | "other" | "aside" | "resting" | "repeats" | "expects" | "unseen", string>;
  /** What is said of the shapes in a head's map. */
  claims: Record<
    | ("sink" | "learned" | "column" | "previous" | "current" | "next" | "back")
    | ("induction" | "duplicate" | "even" | "heaviest" | "hidden"),
    string
  >;
  /** The same in a few letters, of shapes that are no kind. */
  short: Partial<Record<keyof Words["claims"], string>>;
  /** The words for {shade}: on a scale from light to dark, and from dark to light. */
  shades: [string, string];
  /** The words for {a}: of the first column or line, and of another. */
  articles: [string, string];
  /** The words for {its}: with no other claim before it, and with one. */
  heaviest: [string, string];
  /** The words for {others}: with a causal mask, without one, and in cross-attention. */
  others: [string, string, string];
  glossary: { name: string; meaning: string; plain: string }[];
  kinds: { name: string; meaning: string; definition: string }[];
  tentative: string;
  beginning: string;
  caveat: string;
  /** The limits of a product of weights along a path. */
  no_proof: string;
  /** Why no earlier head is known to have written at a key. */
  unwritten: Record<"two_texts" | "first" | "cached", string>;
}

/** A step of one head, as `regard.steps` gives it, its rows first; null is −∞. */
export interface Matrix {
  name: string;
  symbol: string;
  tensor: string;
  formula: string;
  values: (number | null)[][];
  /** Features of a row that are rotated next, each with one half of them on. */
  rotary?: number;
}

/** Nats a byte of a text: with all heads, and without each. */
export interface Ablations {
  loss: number;
  rows: { layer: number; head: number; loss: number }[];
  /** The share of heads that is known by now; 1: all. */
  done: number;
}

/** A model without one head: the odds of the token after token i, and the nats of each token after the first. */
export interface Ablation {
  i: number;
  predicts: "next" | "masked" | "";
  /** The position of the first of the losses; null where no token follows. */
  first: number;
  odds: { token: string; before: number; after: number; actual: boolean }[];
  losses: { before: (number | null)[]; after: (number | null)[] };
}

/** A head of a scene; the scene is named by its id, or by `id:b` for a batch element other than the first. */
export interface HeadAt {
  scene: string;
  layer: number;
  head: number;
}

/** Weights on patches by layer and head, and the mean of each layer where a source has it beside. */
export interface Heats {
  layers: (number | null)[][][];
  means?: (number | null)[][];
}

/** A token that looks at the patches of a grid, or that they look at. */
export interface HeatAt {
  token: number;
  side: "row" | "column";
  grid: number;
}

/** What a path of the server looks like. */
function path(scene: string, rest: string, query: string[] = []): string {
  const [id, b] = scene.split(":");
  const options = b ? [...query, `b=${b}`] : query;
  return `api/${id}/${rest}${options.length ? "?" : ""}${options.join("&")}`;
}

const ofHead = ({ scene, layer, head }: HeadAt, what: string, rest = "", query: string[] = []): string =>
  path(scene, `${what}/${layer}/${head}${rest}`, query);

const peakName = ({ scene, layer, head }: HeadAt, i: number): string => `${scene}/${layer}/${head}/${i}`;

/** Weights of all heads on patches that are asked for as text: of more, numbers are. */
const MOST_PLAIN = 2 ** 17;

const weightsOf = (weights: readonly (number | null)[]): Float32Array =>
  Float32Array.from(weights, (weight) => weight ?? NaN);

const PAGE = 4096;
const CELL = 64;
const TILES_KEPT = 384;

/** Frames without a question after which a view has what it asked for. */
const CALM_FRAMES = 3;
const LONGEST_WAIT_MS = 2000;
/** So long a view waits for what is measured of all heads, which takes longer than its map. */
const MEASURED_WAIT_MS = 200;
/** Answers about all heads. */
const OF_ALL_HEADS = /^api\/[^/]+\/(heads|finding|claims|thumbs)\b/;

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

  /** The place of a token that is nearest to `at` within a page's length, of `size` places; −1 if there is none. */
  async nearest(token: string, at: number, size: number): Promise<number> {
    await this.load(at - PAGE, Math.min(size, at + PAGE));
    for (let distance = 0; distance <= PAGE; distance++)
      for (const place of [at - distance, at + distance]) if (place >= 0 && this.at(place) === token) return place;
    return -1;
  }
}

/** The place of a chosen token in the next text: where it is again, else the same place; −1 if there is no such place. */
export async function placeIn(next: Tokens, size: number, before: Tokens, at: number): Promise<number> {
  const token = before.at(at);
  const again = token === undefined ? -1 : await next.nearest(token, at, size);
  return again >= 0 ? again : at < size ? at : -1;
}

/** The tokens along both axes, null where there are none. */
export interface BothTokens {
  query: Tokens | null;
  key: Tokens | null;
}

export class Data {
  private readonly answers = new Recent<Promise<unknown>>(256);
  private readonly tiles = new Recent<Promise<Halves>>(TILES_KEPT);
  private readonly cells = new Recent<Promise<Float32Array>>(64);
  private readonly files = new Recent<Promise<Numbers>>(8);
  private readonly peaks = new Recent<number>(1024);
  private readonly tokenLists = new Recent<Tokens>(8);
  /** How many answers are on their way, and how many of them are about all heads. */
  private pending = 0;
  private measuring = 0;
  /** Scenes whose heads were to be measured although that takes long. */
  readonly measured = new Set<string>();

  constructor(readonly source: Source) {}

  scenes(): Promise<Scenes> {
    return this.source.json("api/scenes") as Promise<Scenes>;
  }

  heads(scene: string): Promise<Heads> {
    return this.json(path(scene, "heads"));
  }

  words(): Promise<Words> {
    return this.json("api/words");
  }

  finding(scene: string): Promise<Finding> {
    return this.json(path(scene, "finding"));
  }

  /** What is said of the map of each head in a layer. */
  async claims(scene: string, layer: number): Promise<Told[][]> {
    return (await this.json<{ heads: Told[][] }>(path(scene, `claims/${layer}`))).heads;
  }

  async tour(scene: string): Promise<TourStep[]> {
    return (await this.json<{ steps: TourStep[] }>(path(scene, "tour"))).steps;
  }

  /** Where one query looks in every head. */
  async token(scene: string, i: number): Promise<TokenRow[]> {
    return (await this.json<{ rows: TokenRow[] }>(path(scene, `token/${i}`))).rows;
  }

  /** Dot products of queries and keys before their scale, NaN where a pair is hidden. */
  dots(at: HeadAt, r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    return this.floats(ofHead(at, "dots", "", [`rows=${r0}:${r1}`, `cols=${c0}:${c1}`]));
  }

  /** Var(q · k) of 1, 2, …, d features. */
  async variance(at: HeadAt): Promise<number[]> {
    return (await this.json<{ variance: number[] }>(ofHead(at, "variance"))).variance;
  }

  /** The key that a query looks at most, −1 if it sees none. */
  async peak(at: HeadAt, i: number): Promise<number> {
    const row = await this.row(at, i);
    let best = -1;
    for (let j = 0; j < row.length; j++) if (row[j] > (best < 0 ? 0 : row[best])) best = j;
    this.peaks.set(peakName(at, i), best);
    return best;
  }

  /** The same where it is known. */
  knownPeak(at: HeadAt, i: number): number | undefined {
    return this.peaks.get(peakName(at, i));
  }

  map(at: HeadAt): Promise<MapInfo> {
    return this.json<MapInfo>(ofHead(at, "map"), (info) => info.done === 1);
  }

  profiles(at: HeadAt): Promise<Record<string, Profile>> {
    return this.json(ofHead(at, "profiles"));
  }

  async stages(at: HeadAt, i: number, j: number): Promise<Stage[]> {
    return (await this.json<{ stages: Stage[] }>(ofHead(at, "step", `/${i}/${j}`))).stages;
  }

  /** Thumbnails of a layer, heads × size × size half floats. */
  thumbs(scene: string, layer: number, size: number, kind: Kind): Promise<Halves> {
    return this.halves(path(scene, `thumbs/${layer}`, [`size=${size}`, `kind=${kind}`]));
  }

  tile(at: HeadAt, level: number, x: number, y: number, kind: Kind): Promise<Halves> {
    return this.halves(ofHead(at, "tile", `/${level}/${x}/${y}`, [`kind=${kind}`]));
  }

  row(at: HeadAt, i: number): Promise<Float32Array> {
    return this.floats(ofHead(at, "row", `/${i}`));
  }

  column(at: HeadAt, j: number): Promise<Float32Array> {
    return this.floats(ofHead(at, "column", `/${j}`));
  }

  values(at: HeadAt, r0: number, r1: number, c0: number, c1: number): Promise<Float32Array> {
    return this.floats(ofHead(at, "values", "", [`rows=${r0}:${r1}`, `cols=${c0}:${c1}`]));
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
        const query = [`axis=${axis}`, `start=${start}`, `stop=${start + PAGE}`];
        const page = await this.counted(this.source.json(path(scene, "tokens", query)));
        return page as { total: number; tokens: string[] };
      });
      this.tokenLists.set(name, known);
    }
    return known;
  }

  /** The file of a picture. */
  async picture(scene: string, name: string): Promise<ArrayBuffer> {
    return (await this.once(this.files, path(scene, name), () => this.source.numbers(path(scene, name)))).data;
  }

  /** The weights of a token on the patches of a grid, or of the patches on it, by layer and head. */
  async heat({ layers, grids = [] }: Scene, scene: string, at: HeatAt): Promise<EveryHead> {
    const patches = grids[at.grid].tokens.length;
    const query = Object.entries(at).map(([name, value]) => `${name}=${value}`);
    const heads = layers.reduce((sum, layer) => sum + layer.heads, 0);
    if (heads * patches <= MOST_PLAIN) {
      const answer = await this.json<Heats>(path(scene, "heat", query));
      return { heads: answer.layers.map((of) => of.map(weightsOf)), means: answer.means?.map(weightsOf) };
    }
    const weights = await this.floats(path(scene, "heat", [...query, "numbers=f32"]));
    let row = 0;
    const next = (): Float32Array => weights.slice(row++ * patches, row * patches);
    const of = layers.map((layer) => Array.from({ length: layer.heads }, next));
    return { heads: of, ...(row * patches < weights.length && { means: layers.map(next) }) };
  }

  /** The weights of a token on the patches of a grid through all layers: attention rollout. */
  async rollout(scene: string, token: number, grid: number): Promise<Float32Array> {
    const answer = await this.json<{ weights: (number | null)[] }>(
      path(scene, "rollout", [`token=${token}`, `grid=${grid}`]),
    );
    return weightsOf(answer.weights);
  }

  /** Every matrix of a head of few tokens. */
  async matrices(at: HeadAt): Promise<Matrix[]> {
    return (await this.json<{ matrices: Matrix[] }>(ofHead(at, "matrices"))).matrices;
  }

  /** Scores of query i before and after the mask, and its weights: three rows, −∞ where a key is hidden. */
  scores(at: HeadAt, i: number): Promise<Float32Array> {
    return this.floats(ofHead(at, "scores", `/${i}`));
  }

  /** The loss of the text as it is, and without each head. */
  ablations(scene: string, how: string): Promise<Ablations> {
    return this.json(path(scene, "ablations", [`how=${how}`]), (answer) => (answer as Ablations).done === 1);
  }

  ablation(at: HeadAt, how: string, i: number): Promise<Ablation> {
    return this.json(ofHead(at, "ablation", "", [`how=${how}`, `i=${i}`]));
  }

  /** The length of each value; none where values are not known. */
  norms(at: HeadAt): Promise<Float32Array> {
    return this.floats(ofHead(at, "norms"));
  }

  /** The earlier heads on the path to query i of a head through key j. */
  earlier(at: HeadAt, i: number, j: number): Promise<Earlier> {
    return this.json(ofHead(at, "earlier", `/${i}/${j}`));
  }

  /** The weight of each query on the learned sink. */
  sinks(at: HeadAt): Promise<Float32Array> {
    return this.floats(ofHead(at, "sinks"));
  }

  /** A scene with its page as the text of one file. */
  page(scene: string): Promise<{ html: string }> {
    return this.source.json(path(scene, "page")) as Promise<{ html: string }>;
  }

  expected(scene: string, i: number): Promise<Expected> {
    return this.json(path(scene, "expected", [`i=${i}`]));
  }

  /**
   * Runs a scene's model on a text. `replaces`: the name of a stage of typing, whose last scene goes; `keeps`: a scene
   * that must not go; `more`: the scene's text goes on by a token.
   */
  async run(scene: string, settings: Settings, replaces = "", keeps = "", more?: More): Promise<Scene> {
    const body = { ...(more ? { continue: more } : settings), replaces, keeps };
    return ((await this.source.post(path(scene, "run"), body)) as { scene: Scene }).scene;
  }

  /** Resolves once nothing has been asked for during some frames, or it takes too long to wait for that. */
  settled(): Promise<void> {
    return new Promise((done) => {
      const begun = performance.now();
      let calm = 0;
      const look = (): void => {
        const waited = performance.now() - begun;
        const left = this.pending - (waited > MEASURED_WAIT_MS ? this.measuring : 0);
        calm = left ? 0 : calm + 1;
        if (calm >= CALM_FRAMES || waited > LONGEST_WAIT_MS) done();
        else requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
    });
  }

  private json<T>(from: string, last: (answer: T) => boolean = () => true): Promise<T> {
    return this.once(this.answers as Recent<Promise<T>>, from, () => this.source.json(from) as Promise<T>, last);
  }

  private halves(from: string): Promise<Halves> {
    const ask = async (): Promise<Halves> => {
      const { data, exact } = await this.source.numbers(from);
      return { bits: new Uint16Array(data), exact };
    };
    return this.once(this.tiles, from, ask, ({ exact }) => exact);
  }

  private floats(from: string): Promise<Float32Array> {
    return this.once(this.cells, from, async () => new Float32Array((await this.source.numbers(from)).data));
  }

  private counted<V>(asked: Promise<V>, measuring = false): Promise<V> {
    this.pending++;
    this.measuring += Number(measuring);
    const arrived = (): void => {
      this.pending--;
      this.measuring -= Number(measuring);
    };
    asked.then(arrived, arrived);
    return asked;
  }

  /** Answers that fail are not kept, nor those that are not the last word. */
  private once<V>(
    kept: Recent<Promise<V>>,
    from: string,
    ask: () => Promise<V>,
    last: (answer: V) => boolean = () => true,
  ): Promise<V> {
    const known = kept.get(from);
    if (known) return known;
    const asked = this.counted(ask(), OF_ALL_HEADS.test(from));
    const forget = (): void => kept.forget((name) => name === from);
    asked.then((answer) => last(answer) || forget(), forget);
    kept.set(from, asked);
    return asked;
  }
}
