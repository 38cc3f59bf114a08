/** Runs of a model in a saved file that holds it: scenes, as the server answers about them. */

import type { Heads, HeadRow, Layer, More, Scene, Settings, Told, Words } from "../data";
import { dots, type LayerTrace } from "../model/blocks";
import { findingOf, headRow, summaryOf, type Summary } from "../model/heads";
import { outlineOf, told } from "../model/outlines";
import type { Product } from "../model/product";
import { halfValues } from "../numbers/half";
import { perPixel } from "../numbers/levels";
import { Refused } from "./source";
import { ComputedWeights, pyramidOf, tileOf } from "./weights";

/** Scenes of runs that are kept. */
const RUNS = 8;
/** Pairs that a variance is taken over, and orders of features that it is averaged over. */
const PAIRS = 2048;

/** What a model made of its input: of each layer its arrays, and how it scored. */
export interface Traced {
  ids: Uint8Array;
  layers: LayerTrace[];
  scale: number;
  causal: boolean;
}

/** One input as the model reads it. */
export interface Run<Trace> {
  scene: Scene;
  trace: Trace;
  weights: ComputedWeights[][];
  summaries: Summary[][] | null;
}

/** What a run may be asked for: other settings, or the same and one more token. */
export type Asked = Partial<Settings> & { replaces?: string; keeps?: string; continue?: More };

/** What the file that holds the model says of its own scene. */
export interface Given {
  /** The scene that the file was saved with. */
  scene: Scene;
  heads: Heads;
  words: Words;
  /** Labels of profiles. */
  labels: Record<string, string>;
}

export abstract class ModelRuns<Trace extends Traced> {
  private readonly runs = new Map<string, Run<Trace>>();
  /** The last scene of each stage of typing. */
  private readonly stages = new Map<string, string>();
  private number = 1;

  constructor(protected readonly given: Given) {}

  protected abstract readonly product: Product;
  /** Runs the model. Throws Refused for what it cannot read. */
  protected abstract traceOf(settings: Settings): Trace;
  protected abstract tokensOf(run: Run<Trace>): string[];
  /** What the scene of a run has of its own. */
  protected abstract about(settings: Settings, trace: Trace): Partial<Scene>;
  /** The settings of a run that is asked for. */
  protected abstract settingsOf(before: Scene, given: Partial<Settings>, more?: More): Settings;

  get scenes(): Scene[] {
    return [...this.runs.values()].map(({ scene }) => scene).filter(({ id }) => id !== this.given.scene.id);
  }

  /** Runs the model. `replaces`: a stage of typing, whose last scene goes; `keeps`: a scene that stays. */
  run(of: string, body: Asked): Scene {
    const { replaces = "", keeps = "", continue: more, ...asked } = body;
    const own = this.given.scene;
    const settings = this.settingsOf(this.runOf(of).scene, asked, more);
    const same = (scene: Scene): boolean => JSON.stringify(scene.settings) === JSON.stringify(settings);
    const known = [own, ...this.scenes].find(same);
    const replaced = this.stages.get(replaces) ?? replaces;
    if (![known?.id, own.id, keeps].includes(replaced)) this.runs.delete(replaced);
    const scene = known ?? this.made(`${own.kind}-${++this.number}`, settings).scene;
    if (replaces) this.stages.set(replaces, scene.id);
    if (known) return known;
    for (const id of this.scenes.map((one) => one.id)) {
      if (this.runs.size <= RUNS) break;
      if (id !== keeps && id !== scene.id) this.runs.delete(id);
    }
    return scene;
  }

  weights(id: string, layer: number, head: number): ComputedWeights | undefined {
    return this.runs.get(id)?.weights[layer]?.[head];
  }

  /** What the server answers about the scene of a run; undefined of what follows from its weights. */
  async json(id: string, what: string, rest: readonly string[], options: URLSearchParams): Promise<unknown> {
    const [layer, head] = rest.map(Number);
    const run = this.runs.get(id);
    if (!run || id === this.given.scene.id) return undefined;
    if (what === "tokens") {
      const tokens = this.tokensOf(run);
      const start = Number(options.get("start"));
      return { start, total: tokens.length, tokens: tokens.slice(start, Number(options.get("stop"))) };
    }
    if (what === "heads") return this.headsOf(run);
    if (what === "finding") return findingOf(this.rowsOf(run));
    if (what === "claims") return { heads: run.weights[layer].map((weights) => this.claims(run, weights)) };
    if (what === "map") return mapOf(run.weights[layer][head]);
    if (what === "profiles") return this.summariesOf(run)[layer][head].profiles;
    if (what === "variance") return varianceOf(run.weights[layer][head]);
    return undefined;
  }

  /** A file that the server answers with about the scene of a run; undefined where there is none. */
  file(_id: string, _path: string): ArrayBuffer | undefined {
    return undefined;
  }

  protected known(id: string): Run<Trace> | undefined {
    return this.runs.get(id);
  }

  /** The run of a scene; the file's own is run when it is first asked for. */
  protected runOf(id: string): Run<Trace> {
    const run = this.runs.get(id);
    const { scene } = this.given;
    if (run) return run;
    if (id !== scene.id) throw new Refused(`there is no scene ${id}: it was given up for later ones`, 404);
    return this.made(id, scene.settings as Settings, scene);
  }

  private made(id: string, settings: Settings, given?: Scene): Run<Trace> {
    const trace = this.traceOf(settings);
    const { causal, scale, layers, ids } = trace;
    const n = ids.length;
    const d = layers[0].heads[0].q.length / n;
    const about = { n_q: n, n_k: n, d, d_v: d, scale, causal, offset: 0 };
    const rules = { mask: causal ? "causal()" : "", score: "" };
    const weights = layers.map(({ heads }) =>
      heads.map((arrays) => new ComputedWeights({ ...about, ...rules, sink: false, no_values: "" }, arrays)),
    );
    const run = { scene: given ?? this.described(id, settings, trace), trace, weights, summaries: null };
    this.runs.set(id, run);
    return run;
  }

  private described(id: string, settings: Settings, trace: Trace): Scene {
    const { causal, scale, ids } = trace;
    const n = ids.length;
    const layer = (one: Layer): Layer => ({ ...one, n_q: n, n_k: n, causal, scale, rules: causal ? "causal()" : "" });
    const { scene } = this.given;
    const same = { ...scene, id, n_tokens: n, layers: scene.layers.map(layer), settings, given: false };
    return { ...same, ...this.about(settings, trace) };
  }

  private summariesOf(run: Run<Trace>): Summary[][] {
    const { ids, causal } = run.trace;
    return (run.summaries ??= run.weights.map((heads) =>
      heads.map((weights) => {
        const row = rowsOf(this.product, weights);
        return summaryOf(row, weights.lse, ids, this.given.scene.prefix, causal, this.given.labels);
      }),
    ));
  }

  private claims(run: Run<Trace>, weights: ComputedWeights): Told[] {
    const { ids, causal } = run.trace;
    const n = ids.length;
    const row = rowsOf(this.product, weights);
    const whole = new Float32Array(n * n);
    for (let i = 0; i < n; i++) whole.set(row(i), i * n);
    const claims = outlineOf({ weights: whole, ids, prefix: this.given.scene.prefix, causal });
    return told(claims, this.tokensOf(run), causal, this.given.words);
  }

  private rowsOf(run: Run<Trace>): HeadRow[] {
    return this.summariesOf(run).flatMap((heads, layer) => heads.map((one, head) => headRow(layer, head, one)));
  }

  private headsOf(run: Run<Trace>): Heads {
    const rows = this.rowsOf(run);
    const high = Math.max(...rows.map(({ scores }) => scores.entropy ?? 0)) || 1;
    return { columns: this.given.heads.columns.map((one) => (one.name === "entropy" ? { ...one, high } : one)), rows };
  }
}

/** The levels of a map, and the largest pixel of each. */
async function mapOf(weights: ComputedWeights): Promise<object> {
  const pyramid = pyramidOf(weights);
  const { n_q, n_k, tile } = pyramid;
  const largest = (bits: Uint16Array): number => bits.reduce((most, x) => Math.max(most, halfValues[x] || 0), 0);
  const highest = async (level: number, kind: string): Promise<number> => {
    const across = 2 ** level; // tiles at most
    let most = 0;
    for (let y = 0; y < across; y++) {
      for (let x = 0; x < across; x++) {
        const step = tile * perPixel(pyramid, level);
        if (x * step < n_k && y * step < n_q)
          most = Math.max(most, largest(await tileOf(weights, pyramid, level, x, y, kind)));
      }
    }
    return most;
  };
  const levels = pyramid.max_level + 1;
  const mass = await Promise.all(Array.from({ length: levels }, (_, level) => highest(level, "mass")));
  const top = mass[levels - 1];
  return { ...pyramid, levels, maximum: { mass, max: Array<number>(levels).fill(top) }, done: 1 };
}

/** Rows of weights, 0 where a key is hidden; each is asked for once. */
function rowsOf(product: Product, weights: ComputedWeights): (i: number) => Float32Array {
  const { n_k, d, q, k, lse, scale } = weights;
  const { rows, width } = dots(product, q, k, d);
  return (i) => {
    const row = rows.subarray(i * width, i * width + n_k);
    for (let j = 0; j < n_k; j++) row[j] = weights.sees(i, j) ? Math.exp(scale * row[j] - lse[i]) : 0;
    return row;
  };
}

/** Var(q · k) over random pairs, of 1, 2, …, d of their features. */
function varianceOf({ n_q, n_k, d, q, k }: ComputedWeights): { d: number; variance: number[] } {
  let state = 1;
  const below = (n: number): number => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * n);
  };
  const products = Array.from({ length: PAIRS }, () => {
    const [i, j] = [below(n_q), below(n_k)];
    return Array.from({ length: d }, (_, a) => q[i * d + a] * k[j * d + a]);
  });
  return { d, variance: meanVariances(products) };
}

const variance = (x: number[]): number => {
  const mean = x.reduce((sum, y) => sum + y, 0) / x.length;
  return x.reduce((sum, y) => sum + (y - mean) ** 2, 0) / x.length;
};

/**
 * The mean variance of the sums of m features, m = 1, …, d, over all orders of the features: m/d · T + m (m − 1) /
 * (d (d − 1)) · (V − T). T sums the features' variances, V is the variance of their sum.
 */
export function meanVariances(products: number[][]): number[] {
  const d = products[0].length;
  const features = Array.from({ length: d }, (_, a) => variance(products.map((x) => x[a])));
  const T = features.reduce((sum, y) => sum + y, 0);
  const V = variance(products.map((x) => x.reduce((sum, y) => sum + y, 0)));
  return features.map((_, at) => ((at + 1) / d) * T + (((at + 1) * at) / Math.max(1, d * (d - 1))) * (V - T));
}
