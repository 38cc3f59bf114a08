/** A guided tour: a step's title and text above the view it is about, each step with a link. */

import type { TourStep, Words } from "../data";
import { h } from "../dom";
import { withTerms } from "./terms";

/** What a step points at, by its view. */
const TARGETS: Record<string, string> = {
  overview: ".middle",
  map: ".deepmap",
  token: ".earlier",
  scale: ".pair",
};

export class Tour {
  readonly element = h("section", { class: "tour", "aria-label": "Tour" });
  private shown = 0;

  constructor(
    private readonly words: Words,
    /** Goes to a step; 0 ends the tour. */
    private readonly go: (step: number) => void,
  ) {
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.element.querySelector(":popover-open")) return; // which closes a meaning
      event.preventDefault();
      event.stopPropagation();
      this.go(0);
    });
  }

  /** Shows a step, counted from 1. */
  show(steps: readonly TourStep[], number: number): void {
    const step = steps[number - 1];
    const last = number === steps.length;
    const button = (text: string, to: number, kind = ""): HTMLElement =>
      h("button", { type: "button", class: kind, click: () => this.go(to) }, text);
    const next = button(last ? "Done" : "Next", last ? 0 : number + 1, "main");
    const move = number !== this.shown;
    this.shown = number;
    this.element.replaceChildren(
      h(
        "ol",
        { class: "dots" },
        ...steps.map(({ title }, k) =>
          h(
            "li",
            {},
            h(
              "a",
              {
                href: `#tour=${k + 1}`,
                title,
                "aria-label": `Step ${k + 1}: ${title}`,
                "aria-current": k + 1 === number ? "step" : undefined,
              },
              String(k + 1),
            ),
          ),
        ),
      ),
      h(
        "div",
        { class: "told", "aria-live": "polite" },
        h("h2", {}, step.title),
        h("p", {}, ...withTerms(step.text, this.words)),
      ),
      h(
        "div",
        { class: "buttons" },
        number > 1 && button("Back", number - 1),
        next,
        !last && button("Skip the tour", 0),
      ),
    );
    if (move) next.focus({ preventScroll: true });
  }

  /** Marks what the step is about. */
  point(view: HTMLElement, state: { view: string; type: boolean }): void {
    const target = state.type ? ".editor" : TARGETS[state.view];
    for (const element of view.querySelectorAll(".pointed")) element.classList.remove("pointed");
    if (target) view.querySelector(target)?.classList.add("pointed");
  }

  end(): void {
    this.shown = 0;
    this.element.remove();
  }
}
