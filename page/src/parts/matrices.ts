/** Every matrix of one small head, linked: touch a number, and what made it is marked. */

import type { Matrix } from "../data";
import { h } from "../dom";
import { HeadMatrices, pairOf, type Spot } from "../numbers/headmatrices";
import { scaleName, tokensOf, type Context } from "../views/view";
import { cellSizes, matrixFigure, type MatrixActions, type MatrixFigure } from "./matrix";
import { groupsOf, toldOf } from "./matrixwords";

/** Queries, and keys, of a head whose matrices are shown. */
export const MOST = 128;

export interface MatricesPanel {
  readonly element: HTMLElement;
  /** Shows the matrices of a head, query i and key j marked. */
  show(matrices: readonly Matrix[], i: number, j: number): void;
  mark(i: number, j: number): void;
}

/** The panel's state: a head, its figures by the number of their matrix, and the number that was chosen. */
class Panel implements MatricesPanel {
  private readonly readout = h("p", { class: "readout made", role: "status" });
  private readonly place = h("div", {});
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
    this.figures = matrices.map((_, at) => matrixFigure(head, at, sizes[at], scaleName(state), this.actions(at)));
    this.place.replaceChildren(
      ...groupsOf(head).flatMap(({ heading, members }) => [
        ...(heading ? [h("h3", {}, heading)] : []),
        h("div", { class: "matrices" }, ...members.map((at) => this.figures[at].element)),
      ]),
    );
    this.chooseWeight(i, j);
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
