/** What the colours of a map mean. */

import { fitted, h } from "../dom";
import { css, ramp, SCALES, signedScale, toned, weightAt } from "../numbers/colour";
import { figure } from "../numbers/format";
import { perPixel } from "../numbers/levels";
import type { State } from "../state";
import { scaleName } from "../views/view";
import type { Picture } from "./pictures";

/** A bar in which colours go over into each other. */
export function scaleBar(stops: readonly string[]): HTMLElement {
  const bar = h("span", { class: "scale-bar", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  return bar;
}

/** What the shades of texts and small pictures mean: weights from 0 to `top`, which is what is said of it. */
export function shadeKey(state: State, top: number, said: string): HTMLElement {
  const scale = SCALES[scaleName(state)];
  const stops = Array.from({ length: 11 }, (_, k) => css(ramp(scale, toned(k / 10, 1, state.tone))));
  const most = h("span", {}, `${figure(top, 2)}${said}`);
  return h("p", { class: "shade-key" }, h("span", {}, "weight 0"), scaleBar(stops), most);
}

/** What is said of the end of a scale that is the largest weight of a row. */
export const largestHere = (sink: number | null): string =>
  sink === null ? ", the largest here" : `, the largest here; the learned sink has ${figure(sink, 2)}`;

export class Legend {
  private readonly bar = h("canvas", { "aria-hidden": "true" });
  private readonly text = h("span", {});
  readonly element = h("div", { class: "legend" }, this.bar, this.text);

  show(picture: Picture, level: number): void {
    const { look, info } = picture;
    const top = picture.top(level);
    const context = fitted(this.bar);
    const { clientWidth: width, clientHeight: height } = this.bar;
    const scale = picture.signed ? signedScale(look.scale) : SCALES[look.scale];
    for (let x = 0; x < width; x++) {
      context.fillStyle = css(ramp(scale, x / (width - 1)));
      context.fillRect(x, 0, 1, height - 14);
    }
    context.fillStyle = getComputedStyle(this.bar).getPropertyValue("--ink-soft");
    context.font = `10.5px ${getComputedStyle(this.bar).getPropertyValue("--sans")}`;
    const places = [0, 0.5, 1];
    for (const place of places) {
      context.textAlign = place === 0 ? "left" : place === 1 ? "right" : "center";
      const at = picture.signed
        ? Math.sign(place - 0.5) * weightAt(Math.abs(2 * place - 1), top, look.tone)
        : weightAt(place, top, look.tone);
      const least = look.tone === "log" && place === 0 && !picture.signed ? "≤ " : "";
      context.fillText(least + figure(at || 0, 2), place * width, height - 2);
    }
    const step = perPixel(info, level);
    const pooled = step === 1 ? "" : `, ${look.kind} pooling of ${step} × ${step} pairs`;
    // A scale that still grows has no end to tell of.
    const [end, known] =
      picture.done < 1
        ? ["", `; striped: being computed, ${Math.floor(100 * picture.done)} % of the queries are there`]
        : [", up to the largest of the map", ""];
    const of = `weight${end}${pooled}`;
    this.text.textContent = (picture.signed ? `left − right; ${of}` : of) + known;
  }
}
