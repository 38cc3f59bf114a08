/** Tokens beside the rows and above the columns of a matrix. */

import type { Matrix } from "../data";
import { h } from "../dom";
import { pairOf } from "../numbers/headmatrices";
import { shortened } from "../numbers/format";
import type { TokenAt } from "./matrixwords";

/** Pixels that a line of letters takes, and of a column in which they stand upright. */
const LINE = 11;
const UPRIGHT = 40;
const LETTERS = { row: 9, column: 5, turned: 8 };

/** The axis that rows, or columns, are of; null for features. */
export function axisOf(matrix: Matrix, side: "row" | "column"): "query" | "key" | null {
  const { i, j } = pairOf(matrix, { at: 0, row: 0, col: 0 });
  if (side === "column") return i !== undefined && j !== undefined ? "key" : null;
  return i !== undefined ? "query" : j !== undefined ? "key" : null;
}

/** Labels along one side, none where its cells are too small for letters. */
export function labelsOf(matrix: Matrix, side: "row" | "column", size: number, tokenAt: TokenAt): HTMLElement | null {
  const axis = axisOf(matrix, side);
  if (!axis || size < LINE) return null;
  const n = side === "row" ? matrix.values.length : matrix.values[0].length;
  const turned = side === "column" && size < UPRIGHT;
  const letters = turned ? LETTERS.turned : LETTERS[side];
  const spans = Array.from({ length: n }, (_, t) => {
    const span = h("span", {}, shortened(tokenAt(axis, t) ?? String(t), letters));
    span.style[side === "row" ? "height" : "width"] = `${size}px`;
    return span;
  });
  return h(
    "div",
    { class: `labels ${side === "row" ? "down" : "across"}${turned ? " turned" : ""}`, "aria-hidden": "true" },
    ...spans,
  );
}
