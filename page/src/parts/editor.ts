import type { Scene, Settings } from "../data";
import { h, tick } from "../dom";
import { figure, printable } from "../numbers/format";

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

  constructor(
    scene: Scene,
    private readonly run: (settings: Settings) => Promise<Scene>,
  ) {
    this.settings = { ...(scene.settings as Settings) };
    this.text.addEventListener("input", () => this.change({ text: this.text.value }));
    this.temperature = h("input", {
      type: "range",
      min: -1,
      max: 1,
      step: 0.05,
      input: () => this.change({ temperature: Number((10 ** Number(this.temperature.value)).toPrecision(2)) }),
    });
    const reset = h(
      "button",
      { type: "button", click: () => this.change({ temperature: 1, scaled: true, causal: true }, true) },
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
          (scaled) => this.change({ scaled }),
          "Without it, scores are plain dot products.",
        ),
        tick(
          "Causal",
          this.settings.causal,
          (causal) => this.change({ causal }),
          "Without it, every token sees those after it too.",
        ),
        reset,
        this.following,
      ),
      this.problem,
    );
    this.show(scene);
  }

  /** Shows another scene's settings, unless they are the ones that were just typed. */
  show(scene: Scene): void {
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

  private change(part: Partial<Settings>, write = false): void {
    Object.assign(this.settings, part);
    this.shown.textContent = figure(this.settings.temperature);
    if (write) this.write();
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.send(), PAUSE_MS);
  }

  private async send(): Promise<void> {
    const asked = { ...this.settings };
    this.element.classList.add("busy");
    try {
      const scene = await this.run(asked);
      this.problem.textContent = "";
      if (JSON.stringify(asked) === JSON.stringify(this.settings)) this.show(scene);
    } catch (error) {
      this.problem.textContent = (error as Error).message;
    } finally {
      this.element.classList.remove("busy");
    }
  }
}
