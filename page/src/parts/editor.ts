import type { Scene, Settings } from "../data";
import { h, tick } from "../dom";
import { figure, printable } from "../numbers/format";

/** A pause in typing after which the text is run, at most. */
const PAUSE_MS = 250;

/** Type a text of one's own for the shipped model, and turn what its attention does. */
export class Editor {
  readonly element: HTMLElement;
  private readonly text = h("textarea", { rows: 2, spellcheck: "false", "aria-label": "Your text" });
  private readonly problem = h("p", { class: "problem", role: "alert" });
  private readonly following = h("p", { class: "following" });
  private readonly temperature: HTMLInputElement;
  private readonly shown = h("output", {});
  private settings: Settings;
  private timer = 0;
  private pause: number;
  /** Whether a change is still to be run: no other scene's settings take its place. */
  private changed = false;
  /** The scene of what is still being typed or turned: the next one takes its place. */
  private draft = "";
  /** One run after the other, in the order of what was typed. */
  private runs: Promise<void> = Promise.resolve();

  constructor(
    scene: Scene,
    private readonly run: (settings: Settings, refines: string) => Promise<Scene>,
    /** The pause at least; where the last run took longer, so much. */
    private readonly least: number = PAUSE_MS,
  ) {
    this.pause = least;
    this.settings = { ...(scene.settings as Settings) };
    this.text.addEventListener("input", () => this.change({ text: this.text.value }));
    this.text.addEventListener("change", () => this.settle());
    this.temperature = h("input", {
      type: "range",
      min: -1,
      max: 1,
      step: 0.05,
      input: () => this.change({ temperature: Number((10 ** Number(this.temperature.value)).toPrecision(2)) }),
      change: () => this.settle(),
    });
    const reset = h(
      "button",
      { type: "button", click: () => this.turn({ temperature: 1, scaled: true, causal: true }) },
      "As trained",
    );
    this.element = h(
      "section",
      { class: "editor", "aria-label": "Your text" },
      this.text,
      h(
        "div",
        { class: "controls" },
        h("label", { class: "field" }, h("span", {}, "Temperature"), this.temperature, this.shown),
        tick(
          "Scale by 1/√d",
          this.settings.scaled,
          (scaled) => this.turn({ scaled }),
          "Without it, scores are plain dot products.",
        ),
        tick(
          "Causal",
          this.settings.causal,
          (causal) => this.turn({ causal }),
          "Without it, every token sees those after it too.",
        ),
        reset,
        this.following,
      ),
      this.problem,
    );
    this.show(scene);
  }

  /** Show a scene's settings, unless a change is still to be run. */
  show(scene: Scene): void {
    if (this.changed) return;
    this.settings = { ...(scene.settings as Settings) };
    if (document.activeElement !== this.text) this.text.value = this.settings.text;
    this.write();
    const likely = (scene.following ?? [])
      .slice(0, 4)
      .map(({ token, probability }) => `${printable(token)} ${Math.round(100 * probability)} %`);
    this.following.textContent = likely.length ? `Expected next: ${likely.join(", ")}` : "";
  }

  private write(): void {
    this.temperature.value = String(Math.log10(this.settings.temperature));
    this.shown.textContent = figure(this.settings.temperature);
    const [scaled, causal] = this.element.querySelectorAll<HTMLInputElement>("input[type=checkbox]");
    [scaled.checked, causal.checked] = [this.settings.scaled, this.settings.causal];
  }

  private change(part: Partial<Settings>): void {
    this.changed = true;
    Object.assign(this.settings, part);
    this.shown.textContent = figure(this.settings.temperature);
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => (this.runs = this.runs.then(() => this.send())), this.pause);
  }

  /** A change that is whole at once: what was there before stays. */
  private turn(part: Partial<Settings>): void {
    this.draft = "";
    this.change(part);
    this.write();
    this.settle();
  }

  /** What was typed is to stay: it is run now, and what comes next does not take its place. */
  private settle(): void {
    window.clearTimeout(this.timer);
    this.runs = this.runs.then(() => this.send()).then(() => void (this.draft = ""));
  }

  private async send(): Promise<void> {
    const asked = JSON.stringify(this.settings);
    const isLatest = (): boolean => asked === JSON.stringify(this.settings);
    this.element.classList.add("busy");
    const begun = performance.now();
    try {
      const scene = await this.run(JSON.parse(asked) as Settings, this.draft);
      this.draft = scene.given ? "" : scene.id;
      this.problem.textContent = "";
      this.changed = !isLatest();
      this.show(scene);
    } catch (error) {
      this.changed = !isLatest();
      this.problem.textContent = (error as Error).message;
      this.following.textContent = ""; // it was of another text
    } finally {
      this.pause = Math.min(PAUSE_MS, Math.max(this.least, performance.now() - begun));
      this.element.classList.remove("busy");
    }
  }
}
