/** Heads by the loss of the model without each, to choose one. */

import type { HeadRow, Scene } from "../data";
import { h, redraw } from "../dom";
import { placeSaid, type Effect } from "../numbers/effects";
import { changeText, lossText } from "../numbers/format";
import { headName } from "../views/view";
import { amount } from "./amount";
import { kindsOf } from "./headgrid";

interface Place {
  layer: number;
  head: number;
}

const nameOf = ({ layer, head }: Place): string => `${layer}/${head}`;

export class EffectList {
  private readonly list = h("ol", { class: "effects" });
  private readonly said = h("p", { class: "help" });
  private readonly place = h("p", { class: "help place" });
  /** In order, once all of them are known. */
  private effects: readonly Effect[] = [];
  readonly element = h(
    "div",
    { class: "left", tabindex: 0, role: "region", "aria-label": "Heads by the loss without them" },
    h("h2", {}, "Every head, by how much the loss rises without it"),
    this.said,
    this.place,
    this.list,
  );

  constructor(
    private readonly scene: Scene,
    private readonly pick: (head: Place) => void,
  ) {}

  /** Says that the effects are on their way, unless others are shown until then. */
  wait(): void {
    if (!this.list.childElementCount) this.said.textContent = "Running the model without each head …";
  }

  show(loss: number, effects: readonly Effect[], kinds: readonly HeadRow[], chosen: Place, done: number): void {
    const left = done < 1 ? ` ${Math.round(100 * done)} % of the heads are done.` : "";
    this.said.textContent = `Loss with all heads: ${lossText(loss)} nats a token. Orange: more without this head; blue: less.${left}`;
    this.effects = done < 1 ? [] : effects;
    const known = new Map(kinds.map((row) => [nameOf(row), row]));
    redraw(this.list, ...effects.map((effect) => h("li", {}, this.button(effect, known.get(nameOf(effect))))));
    this.mark(chosen);
  }

  /** Marks the chosen head, and says its place among all. */
  mark(chosen: Place): void {
    this.place.textContent = placeSaid(headName(this.scene, chosen.layer, chosen.head), this.effects, chosen);
    for (const button of this.list.querySelectorAll("button")) {
      const is = button.dataset.head === nameOf(chosen);
      button.classList.toggle("current", is);
      button.setAttribute("aria-pressed", String(is));
    }
  }

  private button(effect: Effect, row?: HeadRow): HTMLElement {
    const { layer, head, by, share } = effect;
    return h(
      "button",
      {
        type: "button",
        class: "effect",
        "data-head": nameOf(effect),
        "data-focus": nameOf(effect),
        "data-change": by,
        click: () => this.pick({ layer, head }),
      },
      h("span", { class: "name" }, headName(this.scene, layer, head)),
      h("span", { class: "kind" }, row ? kindsOf(row) : ""),
      amount(share, changeText(by), by < 0 ? "less" : "more"),
    );
  }
}
