/** Texts that are typed into a saved file which holds the example model: scenes, as the server answers about them. */

import type { Ablation, Ablations, Expected, Matrix, More, Scene, Settings } from "../data";
import { byChance } from "../model/heads";
import { encoded, losses, Model, shares, type Options, type Trace } from "../model/model";
import { productBy, type Product } from "../model/product";
import { bytesOf } from "../numbers/base64";
import { scoreText } from "../numbers/format";
import { filled } from "../parts/terms";
import { matricesOf, six } from "./matrices";
import { ModelRuns, type Given, type Run } from "./runs";
import { Refused } from "./source";

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

export class TypedTexts extends ModelRuns<Trace> {
  private loaded: Model | null = null;

  constructor(
    private readonly stored: StoredModel,
    given: Given,
  ) {
    super(given);
  }

  protected get product(): Product {
    return this.model.product;
  }

  protected settingsOf(before: Scene, given: Partial<Settings>, more?: More): Settings {
    const settings = { ...(before.settings as Settings), ...given };
    return more ? { ...settings, text: settings.text + this.next(before.id, more) } : settings;
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

  async json(id: string, what: string, rest: readonly string[], options: URLSearchParams): Promise<unknown> {
    const [layer, head] = rest.map(Number);
    if (what === "ablations") return this.ablations(id, options.get("how") ?? "zero");
    if (what === "ablation")
      return this.ablation(id, layer, head, options.get("how") ?? "zero", Number(options.get("i")));
    if (what === "expected") return this.expected(id, Number(options.get("i")));
    if (what === "matrices") return { matrices: await this.matrices(this.runOf(id), layer, head) };
    return super.json(id, what, rest, options);
  }

  private get model(): Model {
    const { weights, product } = this.stored;
    return (this.loaded ??= new Model(
      bytesOf(weights),
      productBy(product === undefined ? undefined : bytesOf(product)),
    ));
  }

  protected traceOf(settings: Settings): Trace {
    const { text } = settings;
    if (!text) throw new Refused("text is empty: give at least one character", 422);
    const half = text.search(/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/);
    if (half >= 0) throw new Refused(`text must be Unicode: character ${half} is half of a surrogate pair`, 422);
    const ids = encoded(text);
    const most = `a saved page reads at most ${LONGEST.toLocaleString("en")}`;
    if (ids.length > LONGEST) throw new Refused(`text is too long: ${ids.length} tokens, ${most}`, 422);
    return this.model.run(ids, settings as Options);
  }

  protected tokensOf({ trace, scene }: Run<Trace>): string[] {
    return tokensOf(trace.ids, (scene.settings as Settings).text);
  }

  protected about(settings: Settings, trace: Trace): Partial<Scene> {
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

  private async matrices(run: Run<Trace>, layer: number, head: number): Promise<Matrix[]> {
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
function tokensOf(ids: Uint8Array, text: string): string[] {
  const tokens = ["⊢"];
  for (const c of text) tokens.push(c, ..."₂₃₄".slice(0, encoded(c).length - 2));
  if (tokens.length !== ids.length) throw new Error("a token for each byte");
  return tokens;
}
