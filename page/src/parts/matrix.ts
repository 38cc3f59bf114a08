/** One matrix as a figure: its numbers as colours, touched by pointer and keys, cells of it outlined. */

import type { Matrix } from "../data";
import { h, s } from "../dom";
import { css, ramp, readableOn, SCALES, SIGNED, toned, type ScaleName } from "../numbers/colour";
import { short } from "../numbers/format";
import type { HeadMatrices, Mark, Spot } from "../numbers/headmatrices";
import { labelsOf } from "./matrixlabels";
import { questionOf, type TokenAt } from "./matrixwords";

/** Width and height of a cell, in pixels. */
export type CellSize = readonly [width: number, height: number];

/** A head whose matrices have at most so many rows and columns is printed as numbers. */
const IN_NUMBERS = 12;
const NUMBER: CellSize = [46, 22];
const WIDEST = 216;
const [LEAST, MOST, COLUMN] = [2, 16, 8];

/** The size of the cells of each matrix. Those of the head have one size, that their rows compare. */
export function cellSizes(head: HeadMatrices): CellSize[] {
  const { all } = head;
  const longest = all.map(({ values }) => Math.max(values.length, values[0].length));
  if (Math.max(...longest) <= IN_NUMBERS) return all.map(() => NUMBER);
  const sizeFor = (n: number): number => Math.max(LEAST, Math.min(MOST, Math.floor(WIDEST / n)));
  const own = longest.slice(head.indexOf("queries"), head.indexOf("output") + 1 || undefined);
  const size = sizeFor(Math.max(...own));
  return all.map(({ values }, at) => {
    const side = Math.min(size, sizeFor(longest[at]));
    return values[0].length === 1 ? [Math.max(COLUMN, side), side] : [side, side];
  });
}

type Colour = ReturnType<typeof ramp>;

/** The colour of each cell; null where it is hidden. Weights have the page's scale, all else that of signed numbers. */
function colours(head: HeadMatrices, at: number, scale: ScaleName): (Colour | null)[][] {
  const { values, name } = head.all[at];
  const weights = name === "softmax";
  const hidden = weights ? head.all[head.scoresBefore(at)].values : values;
  const most = values.flat().reduce<number>((top, x) => Math.max(top, Math.abs(x ?? 0)), 0) || 1;
  const colour = (x: number): Colour =>
    weights ? ramp(SCALES[scale], toned(x, 1, "root")) : ramp(SIGNED, 0.5 + (0.5 * x) / most);
  return values.map((line, r) => line.map((x, c) => (x === null || hidden[r][c] === null ? null : colour(x))));
}

/** Paints cells, with their numbers where these fit; nothing where a cell is hidden: stripes show through. */
function paint(canvas: HTMLCanvasElement, head: HeadMatrices, at: number, size: CellSize, scale: ScaleName): void {
  const { values } = head.all[at];
  const [width, height] = size;
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [values[0].length * width * ratio, values.length * height * ratio];
  const brush = canvas.getContext("2d") as CanvasRenderingContext2D;
  brush.scale(ratio, ratio);
  brush.textAlign = "center";
  brush.textBaseline = "middle";
  colours(head, at, scale).forEach((line, r) =>
    line.forEach((colour, c) => {
      if (!colour) return;
      brush.fillStyle = css(colour);
      brush.fillRect(c * width, r * height, width, height);
      if (width < NUMBER[0]) return;
      brush.fillStyle = readableOn(colour);
      brush.fillText(short(values[r][c] as number), (c + 0.5) * width, (r + 0.5) * height);
    }),
  );
}

/** What a reader does with a matrix. */
export interface MatrixActions {
  /** Points at a cell; null: no longer. */
  point(spot: Spot | null): void;
  choose(spot: Spot): void;
  /** Goes to this matrix by the keyboard. */
  enter(): void;
  /** Goes on by so many rows and columns. */
  step(rows: number, cols: number): void;
}

const STEPS: Record<string, readonly [rows: number, cols: number]> = {
  ArrowUp: [-1, 0],
  ArrowDown: [1, 0],
  ArrowLeft: [0, -1],
  ArrowRight: [0, 1],
};

function listen(stage: HTMLElement, spotAt: (event: MouseEvent) => Spot, actions: MatrixActions): void {
  stage.addEventListener("pointermove", (event) => actions.point(spotAt(event)));
  stage.addEventListener("pointerleave", () => actions.point(null));
  stage.addEventListener("click", (event) => actions.choose(spotAt(event)));
  stage.addEventListener("focus", () => actions.enter());
  stage.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    actions.step(...step);
  });
}

export interface MatrixFigure {
  readonly element: HTMLElement;
  /** Outlines a row, a column or a cell. */
  outline(mark: Omit<Mark, "at">, kind: "from" | "spot"): void;
  clear(): void;
}

/** A stage with the tokens of its rows and columns. */
function labelled(matrix: Matrix, [width, height]: CellSize, stage: HTMLElement, tokenAt: TokenAt): HTMLElement {
  const [rows, columns] = [labelsOf(matrix, "row", height, tokenAt), labelsOf(matrix, "column", width, tokenAt)];
  return h("div", { class: "labelled" }, columns && h("span", {}), columns, rows ?? h("span", {}), stage);
}

export function matrixFigure(
  head: HeadMatrices,
  at: number,
  size: CellSize,
  scale: ScaleName,
  actions: MatrixActions,
  tokenAt: TokenAt,
): MatrixFigure {
  const { name, tensor, values } = head.all[at];
  const [rows, cols, width, height] = [values.length, values[0].length, ...size];
  const canvas = h("canvas", { "aria-hidden": "true" });
  const overlay = s("svg", { viewBox: `0 0 ${cols * width} ${rows * height}`, "aria-hidden": "true" });
  const attributes = {
    class: "matrix-stage",
    tabindex: 0,
    role: "application",
    "aria-roledescription": "matrix",
    "aria-label": `${name} ${tensor}, ${rows} by ${cols}. Arrow keys choose a number.`,
    "data-matrix": name,
  };
  const stage = h("div", attributes, canvas, overlay);
  stage.style.width = `${cols * width}px`;
  stage.style.height = `${rows * height}px`;
  const spotAt = ({ clientX, clientY }: MouseEvent): Spot => {
    const box = stage.getBoundingClientRect();
    const row = Math.floor(((clientY - box.top) / box.height) * rows);
    return head.within({ row, col: Math.floor(((clientX - box.left) / box.width) * cols) }, at);
  };
  listen(stage, spotAt, actions);
  paint(canvas, head, at, size, scale);
  const caption = h("figcaption", {}, h("b", {}, name), ` ${tensor}`, h("em", {}, questionOf(name)));
  return {
    element: h("figure", { class: "matrix" }, caption, labelled(head.all[at], size, stage, tokenAt)),
    outline({ row, col }, kind) {
      const [x, y] = [(col ?? 0) * width, (row ?? 0) * height];
      const wide = col === undefined ? cols * width : width;
      const high = row === undefined ? rows * height : height;
      overlay.append(s("rect", { class: kind, x, y, width: wide, height: high }));
    },
    clear: () => overlay.replaceChildren(),
  };
}
