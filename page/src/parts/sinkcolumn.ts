/** The learned sink's column beside a map: it has a weight of every query, and no key. */

import { fitted, h } from "../dom";
import { short } from "../numbers/format";
import { perPixel } from "../numbers/levels";
import type { Picture } from "./pictures";

/** How the rows of a map lie on the screen, of which one may be marked, −1: none. */
interface Rows {
  start: number;
  step: number;
  marked: number;
}

/** The least height of a cell in pixels that holds a number, which is turned. */
const ROOM_FOR_NUMBERS = 36;

const MEANING = "The learned sink: what a query's weights on keys are short of 1.";

/** A pixel (RGBA, little endian) as a colour; null where it is transparent. */
const colourOf = (pixel: number): string | null =>
  pixel >>> 24 ? `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})` : null;

export class SinkColumn {
  readonly label = h("div", { class: "sink-label", "aria-hidden": "true", title: MEANING, hidden: true }, "sink");
  readonly element = h("canvas", { class: "sinks", "aria-hidden": "true", title: MEANING, hidden: true });

  /** Makes room for the column, or takes it away. */
  set shown(shown: boolean) {
    this.label.hidden = this.element.hidden = !shown;
  }

  draw(picture: Picture, level: number, { start, step, marked }: Rows): void {
    if (this.element.hidden) return;
    const brush = fitted(this.element);
    const { clientWidth: width, clientHeight: height } = this.element;
    const { n_q } = picture.info;
    const size = perPixel(picture.info, level);
    const [first, last] = [-start / step, (height - start) / step].map((at) => at / size);
    const [r0, r1] = [Math.max(0, Math.floor(first)), Math.min(Math.ceil(n_q / size), Math.ceil(last))];
    if (r1 <= r0) return;
    const edge = (row: number): number => Math.round(start + Math.min(n_q, row * size) * step);
    picture.sinkPixels(level, r0, r1).forEach((pixel, k) => {
      const colour = colourOf(pixel);
      if (colour === null) return;
      brush.fillStyle = colour;
      brush.fillRect(0, edge(r0 + k), width, Math.max(1, edge(r0 + k + 1) - edge(r0 + k)));
    });
    const style = getComputedStyle(this.element);
    if (step >= ROOM_FOR_NUMBERS && !picture.look.hide) this.drawNumbers(brush, picture.sinks, { start, step }, r0, r1);
    if (marked < 0) return;
    brush.strokeStyle = style.getPropertyValue("--mark");
    brush.lineWidth = 2;
    brush.strokeRect(1, start + marked * step, width - 2, Math.max(4, step));
  }

  private drawNumbers(
    brush: CanvasRenderingContext2D,
    sinks: Float32Array,
    { start, step }: Pick<Rows, "start" | "step">,
    from: number,
    to: number,
  ): void {
    const style = getComputedStyle(this.element);
    brush.font = `11px ${style.getPropertyValue("--mono")}`;
    [brush.textAlign, brush.textBaseline, brush.lineWidth] = ["center", "middle", 3];
    brush.strokeStyle = style.getPropertyValue("--halo");
    brush.fillStyle = style.getPropertyValue("--ink");
    for (let i = from; i < to; i++) {
      brush.save();
      brush.translate(this.element.clientWidth / 2, start + (i + 0.5) * step);
      brush.rotate(-Math.PI / 2);
      brush.strokeText(short(sinks[i]), 0, 0);
      brush.fillText(short(sinks[i]), 0, 0);
      brush.restore();
    }
  }
}
