import type { Grid, Scene } from "../data";
import { choice, h, redraw } from "../dom";
import { figure } from "../numbers/format";
import { heatSaid, largestOf, placeName, wordsOf } from "../numbers/grids";
import { pickedOn, rollsOut, type Chosen } from "../numbers/heats";
import { tokenChooser } from "../parts/chooser";
import { heatGrid } from "../parts/heatgrid";
import { HeatPicture } from "../parts/heatpicture";
import { heatWords } from "../parts/heatwords";
import { shadeKey } from "../parts/legend";
import { toneChoice } from "../parts/mapcontrols";
import { orRefused, Refused } from "../source/source";
import type { State } from "../state";
import { chosenOn, gridOf, heatLook, heatName, heatOf, heatsOf, imageOf, numberOf, onWords, titleOf } from "./pictured";
import { chosen, latest, layerOf, sameTokens, touches, type Context, type MakeView, type View } from "./view";

export const onPictureView: MakeView = (context) => new OnPicture(context);

const NO_GRID = "No picture and no sound is known among these tokens.";

const ROLLOUT =
  "Rollout (Abnar and Zuidema, 2020) multiplies the mean maps of all layers, each halfway to the identity. It knows no " +
  "values and no feed-forward blocks: it is a guess of where the token's content is from, and no proof.";
const MEAN = "A mean of heads is a map that no head has.";
const ONE = "Tokens that look at it are shaded for one head alone: choose one.";

/** What is said of rounded numbers. */
function roundedIn({ held }: Scene, heat: State["heat"]): string[] {
  if (!held) return [];
  const pooled = held.pool > 1 && heat === "head" ? `, and is a mean over ${held.pool} × ${held.pool} patches` : "";
  return [`In this file a weight is rounded to 1/255 of the largest on the picture${pooled}.`];
}

/** An answer, null where there is none. */
const known = <T>(answer: T | Refused): T | null => (answer instanceof Refused ? null : answer);

const HEATS = [
  ["head", "one head"],
  ["layer", "mean of the layer"],
  ["all", "mean of all layers"],
] as const;

/** The weights of tokens on a picture, or along a sound: large in one head, and small in every head. */
class OnPicture implements View {
  private readonly controls = h("div", { class: "controls" });
  private readonly heading = h("h2", {});
  private readonly readout = h("p", { class: "heat-readout" }, h("output", {}));
  private readonly key = h("div", {});
  private readonly words = h("div", { class: "overlay-text", tabindex: 0, role: "region", "aria-label": "The text" });
  private readonly note = h("p", { class: "note" });
  private readonly every = h("p", { class: "help" });
  private readonly empty = h("p", { class: "empty", role: "status" });
  private readonly stage = new HeatPicture({
    pick: (patch, other) => this.pick(patch, other),
    point: (patch) => this.tell(patch),
  });
  private readonly heads;
  private readonly small: HTMLElement;
  private readonly body: HTMLElement;
  readonly element: HTMLElement;
  private readonly load;
  private grid: Grid | undefined;
  private weights: Float32Array | null = null;
  private image: { of: string; bitmap: ImageBitmap | null } | null = null;

  constructor(private readonly context: Context) {
    this.load = latest(context.fail);
    this.heads = heatGrid(context);
    const large = h("div", { class: "heat-large" }, this.heading, this.stage.element, this.readout, this.key);
    this.small = h(
      "aside",
      { "aria-label": "Every head" },
      h("h2", {}, "In every head"),
      this.heads.element,
      this.every,
    );
    large.append(this.words, this.note);
    this.body = h("div", { class: "heat-main" }, large, this.small);
    const parts = [this.controls, this.empty, this.body];
    this.element = h("section", { class: "view on-picture", "aria-label": "On the picture" }, ...parts);
  }

  update(_: State, changed: ReadonlySet<keyof State>): void {
    this.grid = gridOf(this.context);
    this.empty.textContent = this.grid ? "" : NO_GRID;
    this.body.hidden = !this.grid;
    if (!this.grid) return;
    this.drawControls(this.grid);
    this.heads.mark();
    if (touches(changed, "scene", "layer", "head", "i", "j", "span", "by", "tone", "scale", "heat", "grid"))
      this.show(this.grid);
  }

  destroy(): void {
    this.stage.destroy();
    this.heads.destroy();
  }

  private pick(patch: number, other: number): void {
    const { store } = this.context;
    if (this.grid) store.set(pickedOn(this.grid, store.state.by, patch, other));
  }

  /** Says what is on a patch, or on the one that has most. */
  private tell(patch: number): void {
    const { grid, weights } = this;
    if (!grid) return;
    const weight = patch < 0 ? NaN : (weights?.[patch] ?? NaN);
    const { held } = this.context.scene;
    const told = held ? `about ${figure(weight, 2)}` : figure(weight);
    const pointed = `${placeName(grid, patch)}: ${Number.isNaN(weight) ? "no weight" : told}`;
    const said = patch >= 0 ? pointed : weights ? heatSaid(grid, weights) : "";
    (this.readout.firstElementChild as HTMLElement).textContent = said;
  }

  private drawControls(grid: Grid): void {
    const { store, scene } = this.context;
    const { state } = store;
    const { n_q, n_k } = layerOf(this.context);
    const { i, j } = chosen(this.context);
    const grids = scene.grids ?? [];
    const sides = [
      ["row", "where a token looks"],
      ["column", "what looks at it"],
    ] as const;
    const heats =
      rollsOut(scene.layers) && !state.by && !scene.held ? [...HEATS, ["rollout", "rollout"] as const] : HEATS;
    const turn = (side: string): void => {
      const same = grid.side === "both" && side === "column" && grid.tokens.includes(i);
      store.set({ by: side === "column", ...(same ? { j: i } : {}) });
    };
    redraw(
      this.controls,
      choice("Show", sides, state.by ? "column" : "row", turn),
      state.by
        ? tokenChooser(this.context, "Key", "key", j, n_k, (to) => store.set({ j: to }))
        : tokenChooser(this.context, "Token", "query", i, n_q, (to) => store.set({ i: to })),
      choice("Heat of", heats, state.heat, (heat) => store.set({ heat })),
      grids.length > 1 &&
        choice(
          "Picture",
          grids.map(({ name }, k) => [String(k), name || String(k + 1)] as const),
          String(numberOf(this.context)),
          (to) => store.set({ grid: Number(to) }),
        ),
      toneChoice(store),
    );
  }

  private async bitmap(grid: Grid): Promise<ImageBitmap | null> {
    const of = `${this.context.store.state.scene}/${grid.picture}`;
    if (this.image?.of !== of) this.image = { of, bitmap: await imageOf(this.context, grid) };
    return this.image.bitmap;
  }

  private show(grid: Grid): void {
    this.load(async (current) => {
      const { context } = this;
      const at = chosenOn(context, grid);
      const [image, heads, weights, words, title] = await Promise.all([
        this.bitmap(grid),
        orRefused(heatsOf(context, grid, at)),
        orRefused(heatOf(context, grid, at)),
        orRefused(onWords(context, at)),
        titleOf(context, grid, at),
      ]);
      if (!current()) return;
      this.draw(grid, at, { image, weights: known(weights), title });
      if (weights instanceof Refused) this.note.textContent = weights.message;
      const look = heatLook(context.store.state);
      const every = known(heads);
      this.small.hidden = !every;
      const top = every ? this.heads.show(grid, image, every.heads, look) : null;
      this.every.textContent = top === null ? "" : `All are up to ${figure(top, 2)}, the largest weight of any head.`;
      await this.drawWords(grid, at, known(words), current);
    });
  }

  private draw(
    grid: Grid,
    at: Chosen,
    { image, weights, title }: { image: ImageBitmap | null; weights: Float32Array | null; title: string },
  ): void {
    const { state } = this.context.store;
    const look = heatLook(state);
    this.weights = weights;
    const top = weights ? largestOf(weights) : 1;
    const name = heatName(this.context, state);
    this.heading.textContent = `${title}: ${name}`;
    const { rows, columns } = grid;
    const what = grid.kind === "sound" ? `Sound, ${columns} frames.` : `Picture, ${rows} × ${columns} patches.`;
    this.stage.show({ grid, image, weights, top, look }, at.patches, `${what} ${title}.`);
    this.tell(-1);
    this.context.say(weights ? `${title}, ${name}: ${heatSaid(grid, weights)}` : title);
    this.key.replaceChildren(...(weights ? [shadeKey({ ...state, ...look }, top, ", the largest on it")] : []));
    const about =
      state.heat === "rollout" ? [ROLLOUT] : state.heat === "head" ? [] : [at.by && grid.side === "keys" ? ONE : MEAN];
    this.note.textContent = [...about, ...roundedIn(this.context.scene, state.heat)].join(" ");
  }

  private async drawWords(grid: Grid, at: Chosen, weights: Float32Array | null, current: () => boolean): Promise<void> {
    const { context } = this;
    const { store, scene } = context;
    const layer = layerOf(context);
    const both = grid.side === "both";
    const axis = at.by && both ? "key" : "query";
    const places = scene.held?.tokens ?? wordsOf(both ? (scene.grids ?? []) : [], layer.n_q);
    // Where a query looks, words of another text have no weight of it.
    const shaded = both || at.by || (scene.held && sameTokens(layer)) ? weights : null;
    const top = shaded ? places.reduce((most, token) => Math.max(most, shaded[token] || 0), 0) : 1;
    const pick = (token: number): void => store.set(at.by && both ? { j: token } : { i: token, by: false });
    const chosenToken = at.by && !both ? -1 : at.tokens[0];
    const look = heatLook(store.state);
    const text = await heatWords(context, { axis, places, chosen: chosenToken, weights: shaded, top, look, pick });
    if (!current()) return;
    this.words.hidden = !places.length;
    this.words.replaceChildren(
      h("h3", {}, both ? "Tokens beside the picture" : "Tokens that look at it"),
      text,
      ...(shaded ? [shadeKey({ ...store.state, ...look }, top, ", the largest of them")] : []),
    );
  }
}
