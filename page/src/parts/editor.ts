import type { More, Scene, Settings } from "../data";
import { h, tick } from "../dom";
import { figure, printable } from "../numbers/format";
import { powerSlider } from "./powerslider";
import { Refused } from "../source/source";

/** A pause in typing after which the text is run, at most. */
const PAUSE_MS = 250;

/** The answer to a run whose place a later one took. */
const SUPERSEDED = 409;

/** A run that the editor asks for. */
export interface Typing {
  settings: Settings;
  /** What is typed in one go: its last run is the one that stays. */
  stage: string;
  /** Whether an earlier run of this stage was shown. */
  refines: boolean;
  /** The text goes on by a token. */
  more?: More;
  isLatest: () => boolean;
}

/** Type a text of one's own for a model that runs here, and turn what its attention does. */
export class Editor {
  readonly element: HTMLElement;
  private readonly text = h("textarea", { rows: 2, spellcheck: "false", "aria-label": "Your text" });
  private readonly problem = h("p", { class: "problem", role: "alert" });
  private readonly following = h("p", { class: "following" });
  private readonly more = h("span", { class: "more", role: "group", "aria-label": "Continue the text" });
  private readonly turns: Turns | null;
  private settings: Settings;
  private timer = 0;
  private pause: number;
  /** Whether a change is still to be run: no other scene's settings take its place. */
  private changed = false;
  private stage = newStage();
  private refines = false;
  /** Runs that were asked for, and those that are not answered yet. */
  private asked = 0;
  private running = 0;

  constructor(
    scene: Scene,
    private readonly run: (typing: Typing) => Promise<Scene>,
    /** The pause at least; where the last run took longer, so much. */
    private readonly least: number = PAUSE_MS,
  ) {
    this.pause = least;
    this.settings = { ...(scene.settings as Settings) };
    this.text.addEventListener("input", () => this.change({ text: this.text.value }));
    this.text.addEventListener("change", () => this.settle());
    const { temperature } = this.settings; // a model of one's own runs as it is
    this.turns = temperature === undefined ? null : new Turns(this.settings, (part, whole) => this.turn(part, whole));
    const controls = h("div", { class: "controls" }, ...(this.turns?.elements ?? []), this.more, this.following);
    this.element = h("section", { class: "editor", "aria-label": "Your text" }, this.text, controls, this.problem);
    this.show(scene);
  }

  /** Show a scene's settings, unless a change is still to be run. */
  show(scene: Scene): void {
    if (this.changed) return;
    this.settings = { ...(scene.settings as Settings) };
    if (document.activeElement !== this.text) this.text.value = this.settings.text;
    this.turns?.show(this.settings);
    const following = scene.following ?? [];
    const likely = following
      .slice(0, 4)
      .map(({ token, probability }) => `${printable(token)} ${Math.round(100 * probability)} %`);
    this.following.textContent = likely.length ? `Expected next: ${likely.join(", ")}` : "";
    const ways: [More, string][] = following.length
      ? [
          ["likeliest", "Add the likeliest token"],
          ["drawn", "Draw a token"],
        ]
      : [];
    if (this.more.childElementCount !== ways.length)
      this.more.replaceChildren(...ways.map(([more, said]) => this.goOn(more, said)));
  }

  private goOn(more: More, said: string): HTMLElement {
    return h("button", { type: "button", click: () => void this.send(more) }, said);
  }

  private change(part: Partial<Settings>): void {
    this.changed = true;
    Object.assign(this.settings, part);
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.send(), this.pause);
  }

  /** Turns settings; a `whole` change is run at once, and what was there before stays. */
  private turn(part: Partial<Settings>, whole: boolean): void {
    if (whole) this.newStage();
    this.change(part);
    this.turns?.show(this.settings);
    if (whole) this.settle();
  }

  /** What was typed is to stay: it is run now, and what comes next does not take its place. */
  private settle(): void {
    window.clearTimeout(this.timer);
    if (this.changed) void this.send();
    this.newStage();
  }

  private newStage(): void {
    this.stage = newStage();
    this.refines = false;
  }

  private async send(more?: More): Promise<void> {
    const number = ++this.asked;
    const { stage, refines } = this;
    const isLatest = (): boolean => number === this.asked;
    this.refines = true;
    this.running++;
    this.element.classList.add("busy");
    const begun = performance.now();
    try {
      const scene = await this.run({ settings: { ...this.settings }, stage, refines, more, isLatest });
      if (!isLatest()) return;
      this.problem.textContent = "";
      this.changed = false;
      this.show(scene);
      if (more) this.text.value = this.settings.text;
    } catch (error) {
      if (!isLatest() || (error instanceof Refused && error.status === SUPERSEDED)) return;
      this.changed = false;
      this.problem.textContent = (error as Error).message;
      this.following.textContent = ""; // it was of another text
    } finally {
      this.pause = Math.min(PAUSE_MS, Math.max(this.least, performance.now() - begun));
      if (--this.running === 0) this.element.classList.remove("busy");
    }
  }
}

const newStage = (): string => `typing-${Math.random().toString(36).slice(2)}`;

/** Settings of the attention of every layer. */
class Turns {
  readonly elements: HTMLElement[];
  private readonly temperature: HTMLElement;
  private readonly ticks: HTMLElement[];

  constructor(settings: Settings, turn: (part: Partial<Settings>, whole: boolean) => void) {
    this.temperature = powerSlider("Temperature", [-1, 1, 0.05], settings.temperature ?? 1, (temperature) =>
      turn({ temperature }, false),
    );
    this.temperature.addEventListener("change", () => turn({}, true));
    const back = { temperature: 1, scaled: true, causal: true };
    this.ticks = [
      tick(
        "Scale by 1/√d",
        settings.scaled === true,
        (scaled) => turn({ scaled }, true),
        "Without it, scores are plain dot products.",
      ),
      tick(
        "Causal",
        settings.causal === true,
        (causal) => turn({ causal }, true),
        "Without it, every token sees those after it too.",
      ),
    ];
    this.elements = [
      this.temperature,
      ...this.ticks,
      h("button", { type: "button", click: () => turn(back, true) }, "As trained"),
    ];
  }

  show({ temperature = 1, scaled = true, causal = true }: Settings): void {
    (this.temperature.querySelector("input") as HTMLInputElement).value = String(Math.log10(temperature));
    (this.temperature.querySelector("output") as HTMLElement).textContent = figure(temperature);
    const boxes = this.ticks.map((one) => one.querySelector("input") as HTMLInputElement);
    [boxes[0].checked, boxes[1].checked] = [scaled, causal];
  }
}
