/** From one view to the next of the same kind without a jump: the last one stays in sight, greyed, until the next is whole. */

import type { View } from "../views/view";

export class Handover {
  /** The view that is seen although it is not of the current text any more. */
  private last: View | null = null;
  private turns = 0;

  constructor(
    private readonly main: HTMLElement,
    /** Resolves once what was asked for is there. */
    private readonly settled: () => Promise<void>,
  ) {}

  /** Puts a view in the place of another at once. */
  replace(before: View | null, next: View, line: HTMLElement): void {
    this.turns++;
    before?.destroy?.();
    this.drop();
    this.main.replaceChildren(line, next.element);
  }

  /** Puts a view in the place of another when it has all that it asked for. */
  keep(before: View, next: View): void {
    if (this.last) {
      before.destroy?.(); // it was never seen
      before.element.replaceWith(next.element);
    } else {
      this.pin(before.element);
      before.element.before(next.element);
      this.last = before;
    }
    next.element.classList.add("coming");
    const turn = ++this.turns;
    void this.settled().then(() => {
      if (turn !== this.turns) return;
      next.element.classList.remove("coming");
      this.drop();
    });
  }

  /** Leaves a view where it is, over the one that takes its place. */
  private pin(element: HTMLElement): void {
    const { offsetTop, offsetHeight } = element;
    element.style.top = `${offsetTop}px`;
    element.style.height = `${offsetHeight}px`;
    element.classList.add("stale");
    element.inert = true;
  }

  private drop(): void {
    this.last?.destroy?.();
    this.last?.element.remove();
    this.last = null;
  }
}
