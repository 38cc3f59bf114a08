/** A value beside the pointer, over a stage. */

import { h } from "../dom";

/** Pixels from the pointer. */
const AWAY = 14;

export class PointerTag {
  readonly element = h("span", { class: "pointer-tag", hidden: true, "aria-hidden": "true" });
  private at: { x: number; y: number } | null = null;

  /** Goes to a place of the stage, in pixels; away where there is none. */
  move(at: { x: number; y: number } | null): void {
    this.at = at;
    if (!at) this.element.hidden = true;
    if (!at || this.element.hidden) return;
    const { clientWidth, clientHeight } = this.element.parentElement as HTMLElement;
    const [wide, high] = [this.element.offsetWidth + AWAY, this.element.offsetHeight + AWAY];
    const x = at.x + wide > clientWidth ? at.x - wide : at.x + AWAY;
    const y = at.y + high > clientHeight ? at.y - high : at.y + AWAY;
    this.element.style.transform = `translate(${x}px, ${y}px)`;
  }

  /** Shows a value where the pointer is. */
  show(value: string): void {
    this.element.textContent = value;
    this.element.hidden = !this.at;
    this.move(this.at);
  }
}
