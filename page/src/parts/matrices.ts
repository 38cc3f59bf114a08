/** Every matrix of one small head, linked: touch a number, and what made it is marked. */

import type { Matrix } from "../data";
import { h, reveal } from "../dom";
import { css, ramp, SIGNED } from "../numbers/colour";
import { flowOf, type Part } from "../numbers/flow";
import { printable } from "../numbers/format";
import { HeadMatrices, pairOf, type Spot } from "../numbers/headmatrices";
import { scaleName, tokensOf, type Context } from "../views/view";
import { scaleBar } from "./legend";
import { cellSizes, matrixFigure, type MatrixActions, type MatrixFigure } from "./matrix";
import { toldOf } from "./matrixwords";

/** Queries, and keys, of a head whose matrices are shown. */
export const MOST = 128;

export interface MatricesPanel {
  readonly element: HTMLElement;
  /** Shows the matrices of a head, query i and key j marked. */
  show(matrices: readonly Matrix[], i: number, j: number): void;
  mark(i: number, j: number): void;
}

/** What colours of numbers mean: each matrix has the scale of its own largest number. */
function signedKey(): HTMLElement {
  const stops = Array.from({ length: 9 }, (_, k) => css(ramp(SIGNED, k / 8)));
  const said = "Numbers: each matrix by its own largest; weights from 0 to 1; striped: hidden by the mask";
  return h("p", { class: "help shade-key" }, "below 0", scaleBar(stops), "above 0", h("span", {}, said));
}

/** The panel's state: a head, its figures by the number of their matrix, and the number that was chosen. */
class Panel implements MatricesPanel {
  private readonly readout = h("p", { class: "readout made", role: "status" });
  private readonly place = h("div", { class: "equations" });
  readonly element = h(
    "section",
    { class: "all-matrices", "aria-label": "Matrices" },
    h("h2", {}, "The whole head as matrices: touch a number to see what made it"),
    this.readout,
    this.place,
  );
  private head = new HeadMatrices([], 0);
  private figures: MatrixFigure[] = [];
  private pinned: Spot = { at: 0, row: 0, col: 0 };

  constructor(private readonly context: Context) {}

  show(matrices: readonly Matrix[], i: number, j: number): void {
    const { state } = this.context.store;
    const head = new HeadMatrices(matrices, state.head);
    const sizes = cellSizes(head);
    this.head = head;
    const colours = scaleName(state);
    this.figures = matrices.map((_, at) =>
      matrixFigure(head, at, sizes[at], colours, this.actions(at), (axis, t) => this.tokenAt(axis, t)),
    );
    this.place.replaceChildren(
      signedKey(),
      ...flowOf(head).map(({ heading, parts }) =>
        h(
          "section",
          { class: "equation" },
          h("h3", {}, heading),
          h("div", { class: "matrices" }, ...parts.map((part) => this.part(part))),
        ),
      ),
    );
    this.chooseWeight(i, j);
  }

  private part(part: Part): HTMLElement {
    if ("sign" in part) return h("b", { class: "sign" }, part.sign);
    if ("at" in part) return this.figures[part.at].element;
    const name = this.head.all[part.again].name;
    const go = (): void => reveal(this.element.parentElement as HTMLElement, this.figures[part.again].element);
    return h("button", { type: "button", class: "again", title: `${name}: shown above`, click: go }, part.symbol);
  }

  private tokenAt(axis: "query" | "key", t: number): string | undefined {
    const token = tokensOf(this.context)[axis]?.at(t);
    return token === undefined ? undefined : printable(token);
  }

  /** Marks a pair; another number that was chosen stays chosen. */
  mark(i: number, j: number): void {
    const name = this.head.all[this.pinned.at]?.name;
    if (name === undefined || name === "softmax") this.chooseWeight(i, j);
    else this.tell(this.pinned);
  }

  private actions(at: number): MatrixActions {
    return {
      point: (spot) => this.tell(spot ?? this.pinned),
      choose: (spot) => this.pin(spot),
      enter: () => {
        if (this.pinned.at === at) return;
        this.pinned = this.head.within(this.pinned, at);
        this.tell(this.pinned, true);
      },
      step: (rows, cols) => {
        const { row, col } = this.head.within(this.pinned, at);
        this.pin(this.head.within({ row: row + rows, col: col + cols }, at));
      },
    };
  }

  private chooseWeight(i: number, j: number): void {
    this.pinned = { at: this.head.indexOf("softmax"), row: i, col: j };
    this.tell(this.pinned);
  }

  /** A number that was chosen chooses its query and key too. */
  private pin(spot: Spot): void {
    this.pinned = spot;
    this.tell(spot, true);
    this.context.store.set(pairOf(this.head.all[spot.at], spot));
  }

  /** Says how a number came about, and marks what it was made of. */
  private tell(spot: Spot, aloud = false): void {
    for (const figure of this.figures) figure.clear();
    if (!this.head.has(spot)) return;
    const tokens = tokensOf(this.context);
    const { value, name, number, about, from } = toldOf(this.head, spot, (axis, index) => tokens[axis]?.at(index));
    for (const mark of from) this.figures[mark.at].outline(mark, "from");
    this.figures[spot.at].outline(spot, "spot");
    this.readout.dataset.value = String(value);
    this.readout.dataset.matrix = name;
    this.readout.replaceChildren(h("b", {}, number), about);
    if (aloud) this.context.say(this.readout.textContent ?? "");
  }
}

export const matricesPanel = (context: Context): MatricesPanel => new Panel(context);
