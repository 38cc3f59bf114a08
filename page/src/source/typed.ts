/** Texts that are typed into a saved file which holds the example model: scenes, as the server answers about them. */

import type {
  Ablation,
  Ablations,
  Expected,
  Heads,
  HeadRow,
  Layer,
  Matrix,
  More,
  Scene,
  Settings,
  Told,
  Words,
} from "../data";
import { dots } from "../model/blocks";
import { byChance, findingOf, headRow, summaryOf, type Summary } from "../model/heads";
import { encoded, losses, Model, shares, type Options, type Trace } from "../model/model";
import { outlineOf, told } from "../model/outlines";
import { productBy, type Product } from "../model/product";
import { bytesOf } from "../numbers/base64";
import { scoreText } from "../numbers/format";
import { halfValues } from "../numbers/half";
import { perPixel } from "../numbers/levels";
import { filled } from "../parts/terms";
import { matricesOf, six } from "./matrices";
import { Refused } from "./source";
import { ComputedWeights, pyramidOf, tileOf } from "./weights";

/** The model that a file holds, and what is said of its scenes. */
export interface StoredModel {
  weights: string;
  /** The module of its products, in base64, if a compiler made one. */
  product?: string;
  note: string;
  /** A warning of texts whose induction score says little, and the score by chance from which it is due. */
  caution: { text: string; least: number };
}

/** Tokens of a text at most: every head's weights are looked at whole. */
const LONGEST = 1024;
/** Next tokens that are told of, and the probability that is worth it. */
const LIKELIEST = 5;
const LEAST_SHARE = 0.005;
/** Scenes made by typing that are kept. */
const RUNS = 8;
/** Pairs that a variance is taken over, and orders of features that it is averaged over. */
const PAIRS = 2048;

/** One text as the model reads it. */
interface Run {
  scene: Scene;
  trace: Trace;
  weights: ComputedWeights[][];
  summaries: Summary[][] | null;
}

/** What a run may be asked for: other settings, or the same and one more token. */
type Asked = Partial<Settings> & { replaces?: string; keeps?: string; continue?: More };

/** What the file that holds the model says of its own scene. */
export interface Given {
  /** The scene that the file was saved with. */
  scene: Scene;
  heads: Heads;
  words: Words;
  /** Labels of profiles. */
  labels: Record<string, string>;
}

export class TypedTexts {
  private loaded: Model | null = null;
  private readonly runs = new Map<string, Run>();
  /** The last scene of each stage of typing. */
  private readonly stages = new Map<string, string>();
  private number = 1;

  constructor(
    private readonly stored: StoredModel,
    private readonly given: Given,
  ) {}

  get scenes(): Scene[] {
    return [...this.runs.values()].map(({ scene }) => scene).filter(({ id }) => id !== this.given.scene.id);
  }

  /** Runs the model. `replaces`: a stage of typing, whose last scene goes; `keeps`: a scene that stays. */
  run(of: string, body: Asked): Scene {
    const { replaces = "", keeps = "", continue: more, ...asked } = body;
    const own = this.given.scene;
    const before = this.runOf(of).scene.settings as Settings;
    const settings = { ...before, ...asked, ...(more ? { text: before.text + this.next(of, more) } : {}) };
    const same = (scene: Scene): boolean => JSON.stringify(scene.settings) === JSON.stringify(settings);
    const known = [own, ...this.scenes].find(same);
    const replaced = this.stages.get(replaces) ?? replaces;
    if (![known?.id, own.id, keeps].includes(replaced)) this.runs.delete(replaced);
    const scene = known ?? this.made(`example-${++this.number}`, settings).scene;
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

  /** What the server answers about a typed scene; undefined of what follows from its weights. */
  async json(id: string, what: string, rest: readonly string[], options: URLSearchParams): Promise<unknown> {
    const [layer, head] = rest.map(Number);
    if (what === "ablations") return this.ablations(id, options.get("how") ?? "zero");
    if (what === "ablation")
      return this.ablation(id, layer, head, options.get("how") ?? "zero", Number(options.get("i")));
    if (what === "expected") return this.expected(id, Number(options.get("i")));
    if (what === "matrices") return { matrices: await this.matrices(this.runOf(id), layer, head) };
    const run = this.runs.get(id);
    if (!run || id === this.given.scene.id) return undefined;
    if (what === "tokens") {
      const tokens = tokensOf(run);
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

  /** The run of a scene; the file's own is run when it is first asked for. */
  private runOf(id: string): Run {
    const run = this.runs.get(id);
    const { scene } = this.given;
    if (run) return run;
    if (id !== scene.id) throw new Refused(`there is no scene ${id}: it was given up for later ones`, 404);
    return this.made(id, scene.settings as Settings, scene);
  }

  private made(id: string, settings: Settings, given?: Scene): Run {
    const trace = this.traceOf(settings);
    const { causal, scale, layers, ids } = trace;
    const n = ids.length;
    const { d } = this.model;
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

  private summariesOf(run: Run): Summary[][] {
    const { ids, causal } = run.trace;
    return (run.summaries ??= run.weights.map((heads) =>
      heads.map((weights) => {
        const row = rowsOf(this.model.product, weights);
        return summaryOf(row, weights.lse, ids, this.given.scene.prefix, causal, this.given.labels);
      }),
    ));
  }

  private claims(run: Run, weights: ComputedWeights): Told[] {
    const { ids, causal } = run.trace;
    const n = ids.length;
    const row = rowsOf(this.model.product, weights);
    const whole = new Float32Array(n * n);
    for (let i = 0; i < n; i++) whole.set(row(i), i * n);
    const claims = outlineOf({ weights: whole, ids, prefix: this.given.scene.prefix, causal });
    return told(claims, tokensOf(run), causal, this.given.words);
  }

  private rowsOf(run: Run): HeadRow[] {
    return this.summariesOf(run).flatMap((heads, layer) => heads.map((one, head) => headRow(layer, head, one)));
  }

  private headsOf(run: Run): Heads {
    const rows = this.rowsOf(run);
    const high = Math.max(...rows.map(({ scores }) => scores.entropy ?? 0)) || 1;
    return { columns: this.given.heads.columns.map((one) => (one.name === "entropy" ? { ...one, high } : one)), rows };
  }

  /** The character that goes on with a scene's text: the likeliest that can be printed, or a drawn one. */
  private next(id: string, more: More): string {
    const { trace } = this.runOf(id);
    const all = shares(trace, trace.ids.length - 1).map((share, byte) => (printed(byte) ? share : 0));
    if (more === "likeliest") return String.fromCharCode(likeliest(all)[0]);
    let left = Math.random() * all.reduce((sum, share) => sum + share, 0);
    const drawn = all.findIndex((share) => (left -= share) < 0);
    return String.fromCharCode(drawn < 0 ? likeliest(all)[0] : drawn);
  }

  private expected(id: string, i: number): Expected {
    const { trace } = this.runOf(id);
    const all = shares(trace, i);
    const actual: number | undefined = trace.ids[i + 1];
    const of = (byte: number): Expected["likeliest"][0] => ({ token: byteLabel(byte), probability: all[byte] });
    return { i, likeliest: followingOf(all), actual: actual === undefined ? null : of(actual) };
  }

  private get model(): Model {
    const { weights, product } = this.stored;
    return (this.loaded ??= new Model(
      bytesOf(weights),
      productBy(product === undefined ? undefined : bytesOf(product)),
    ));
  }

  /** Runs the model. Throws Refused for what it cannot read. */
  private traceOf(settings: Settings): Trace {
    const { text } = settings;
    if (!text) throw new Refused("text is empty: give at least one character", 422);
    const half = text.search(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/);
    if (half >= 0) throw new Refused(`text must be Unicode: character ${half} is half of a surrogate pair`, 422);
    const ids = encoded(text);
    const most = `a saved page reads at most ${LONGEST.toLocaleString("en")}`;
    if (ids.length > LONGEST) throw new Refused(`text is too long: ${ids.length} tokens, ${most}`, 422);
    return this.model.run(ids, settings as Options);
  }

  /** What the scene of a run has of its own. */
  private about(settings: Settings, trace: Trace): Partial<Scene> {
    const n = trace.ids.length;
    const start = Array.from(settings.text.split(/\s+/).filter(Boolean).join(" "));
    const { text, least } = this.stored.caution;
    const chance = byChance(trace.ids, this.given.scene.prefix);
    const cautioned = chance >= least ? [filled(text, { score: scoreText(chance) })] : [];
    return {
      name: start.length <= 40 ? start.join("") : `${start.slice(0, 39).join("")}…`,
      note: [this.stored.note, ...cautioned].join("; "),
      following: followingOf(shares(trace, n - 1)),
    };
  }

  private async matrices(run: Run, layer: number, head: number): Promise<Matrix[]> {
    const { model } = this;
    const { width, rotary } = model.config;
    const { d } = model;
    const n = run.trace.ids.length;
    const x = model.input(run.trace, layer);
    const w = (name: string): Float32Array => model.of(`${layer}.${name}`);
    const table = (values: Float32Array, columns: number, from = 0, count = columns): (number | null)[][] =>
      Array.from({ length: values.length / columns }, (_, r) =>
        Array.from({ length: count }, (__, c) => six(values[r * columns + from + c])),
      );
    const projected = (letter: string, index: string, what: string, plural: string, name: string): Matrix[] => {
      const weight = `W_${letter}[c,a]`;
      const bare = model.product(x, width, w(name), width);
      const bias = w(`${name}_bias`);
      for (let p = 0; p < bare.length; p++) bare[p] += bias[p % width];
      const formula = `${letter}′[${index},a] = ${letter === "Q" ? "X[i,c]" : "X[j,c]"} ${weight} + b_${letter}[a]`;
      return [
        {
          name: `${what} projection`,
          symbol: `W_${letter}`,
          tensor: weight,
          formula: "",
          values: table(w(name), width, head * d, d),
        },
        {
          ...{ name: plural, symbol: `${letter}′`, tensor: `${letter}′[${index},a]`, formula },
          ...{ values: table(bare, width, head * d, d), rotary },
        },
      ];
    };
    const joined = model.joined(run.trace.layers[layer]);
    const written = model.product(joined, width, w("o"), width);
    return [
      { name: "input", symbol: "X", tensor: "X[i,c]", formula: "", values: table(x, width) },
      ...projected("Q", "i", "query", "projected queries", "q"),
      ...projected("K", "j", "key", "projected keys", "k"),
      {
        name: "value projection",
        symbol: "W_V",
        tensor: "W_V[c,b]",
        formula: "",
        values: table(w("v"), width, head * d, d),
      },
      ...(await matricesOf(run.weights[layer][head])),
      {
        ...{ name: "heads side by side", symbol: "C", tensor: "C[i,e]", formula: "C = [O of head 0, O of head 1, …]" },
        values: table(joined, width),
      },
      { name: "output projection", symbol: "W_O", tensor: "W_O[e,c]", formula: "", values: table(w("o"), width) },
      {
        ...{ name: "written", symbol: "Y", tensor: "Y[i,c]", formula: "Y[i,c] = C[i,e] W_O[e,c]" },
        values: table(written, n ? width : 1),
      },
    ];
  }

  private async ablations(id: string, how: string): Promise<Ablations> {
    const { trace, scene, weights } = this.runOf(id);
    const rows: Ablations["rows"] = [];
    for (const [layer, heads] of weights.entries()) {
      for (let head = 0; head < heads.length; head++) {
        await new Promise((resolve) => setTimeout(resolve)); // so that the page stays alive
        const without = this.model.run(trace.ids, scene.settings as Options, { layer, head, how }, trace);
        rows.push({ layer, head, loss: mean(losses(without)) });
      }
    }
    return { loss: mean(losses(trace)), rows, done: 1 };
  }

  private ablation(id: string, layer: number, head: number, how: string, i: number): Ablation {
    const { trace, scene } = this.runOf(id);
    const after = this.model.run(trace.ids, scene.settings as Options, { layer, head, how }, trace);
    const [one, other] = [shares(trace, i), shares(after, i)];
    const actual: number | undefined = trace.ids[i + 1];
    const listed = new Set([one, other].flatMap((all) => likeliest(all)));
    if (actual !== undefined) listed.add(actual);
    const odds = [...listed]
      .sort((a, b) => one[b] - one[a])
      .map((byte) => ({ token: byteLabel(byte), before: one[byte], after: other[byte], actual: byte === actual }));
    return { i, predicts: "next", odds, first: 0, losses: { before: [...losses(trace)], after: [...losses(after)] } };
  }
}

const mean = (x: Float64Array): number => x.reduce((sum, y) => sum + y, 0) / x.length;

const likeliest = (all: Float64Array): number[] =>
  Array.from(all.keys())
    .sort((a, b) => all[b] - all[a])
    .slice(0, LIKELIEST);

function followingOf(all: Float64Array): { token: string; probability: number }[] {
  return likeliest(all)
    .filter((byte) => all[byte] >= LEAST_SHARE)
    .map((byte) => ({ token: byteLabel(byte), probability: all[byte] }));
}

/** Whether a byte is a character that can be printed, or a line end. */
const printed = (byte: number): boolean => byte === 10 || (byte >= 32 && byte < 127);

const byteLabel = (byte: number): string =>
  byte < 128 ? String.fromCharCode(byte) : `\\x${byte.toString(16).padStart(2, "0")}`;

/** A start mark, then each character on its first byte, and the numbers of the bytes that continue it. */
function tokensOf({ trace, scene }: Run): string[] {
  const tokens = ["⊢"];
  for (const c of (scene.settings as Settings).text) tokens.push(c, ..."₂₃₄".slice(0, encoded(c).length - 2));
  if (tokens.length !== trace.ids.length) throw new Error("a token for each byte");
  return tokens;
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
