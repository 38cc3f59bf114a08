/** What is said while an answer takes its time. */

import { h } from "../dom";
import type { Working } from "../source/source";

/** What is done, and how far it is. */
export function saying({ share, stage }: Working): string {
  if (share === null) return "Waiting for the kernel …";
  if (!stage) return `Computing: ${Math.round(100 * share)} %`;
  return `${stage[0].toUpperCase()}${stage.slice(1)} …`;
}

/** A line in the corner; in the middle of the page where there is nothing else yet, with a bar of its steps. */
export class WorkingLine {
  private readonly text = h("span", {});
  private readonly bar = h("progress", { "aria-label": "Steps done", max: "1" });
  readonly element = h("p", { class: "working", role: "status", hidden: true }, this.text, this.bar);

  show(working: Working): void {
    const { share, stage, total } = working;
    this.element.hidden = share !== null && share >= 1 && !stage;
    this.element.classList.toggle("first", Boolean(stage));
    this.text.textContent = saying(working);
    this.bar.hidden = !stage;
    if (total) this.bar.setAttribute("value", String(share));
    else this.bar.removeAttribute("value");
  }
}
