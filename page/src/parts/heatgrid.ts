/** The heat of every head on a small picture, in rows of layers, to choose one. */

import type { Grid } from "../data";
import { h } from "../dom";
import { heatSaid, largestOf } from "../numbers/grids";
import { headName, type Context } from "../views/view";
import { keepEven } from "./evenrows";
import { rowsOfHeads } from "./headgrid";
import { heatThumb, type HeatLook } from "./heatpicture";

/** So many heads in a layer have room for larger pictures. */
const FEW = 6;
const [LARGE, SMALL] = [112, 64];

export interface HeatGrid {
  readonly element: HTMLElement;
  /** Draws weights on patches, by layer and head, all up to the largest of them, which it returns. */
  show(grid: Grid, image: ImageBitmap | null, heads: readonly Float32Array[][], look: HeatLook): number;
  /** Marks the chosen head. */
  mark(): void;
  destroy(): void;
}

export function heatGrid(context: Context): HeatGrid {
  const { store, scene } = context;
  const most = Math.max(...scene.layers.map(({ heads }) => heads));
  const buttons = new Map<string, HTMLElement>();
  const element = h(
    "div",
    { class: most > FEW ? "headgrid heats many" : "headgrid heats" },
    ...rowsOfHeads(scene, cell),
  );
  const even = keepEven(element, ".gridheads");

  function cell(layer: number, head: number, number: number): HTMLElement {
    const name = headName(scene, layer, head);
    const act = (): void => store.set({ layer, head, heat: "head" });
    const button = h(
      "button",
      { type: "button", class: "gridhead", "aria-label": name, title: name, click: act },
      h("span", { class: "thumb" }),
      h("span", { class: "kind" }, `H${number}`),
    );
    buttons.set(`${layer}/${head}`, button);
    return button;
  }

  return {
    element,
    show(grid, image, heads, look) {
      const top = heads.flat().reduce((largest, one) => Math.max(largest, largestOf(one)), 0);
      heads.forEach((layer, l) =>
        layer.forEach((weights, head) => {
          const button = buttons.get(`${l}/${head}`);
          const drawn = heatThumb({ grid, image, weights, top, look }, most > FEW ? SMALL : LARGE);
          button?.querySelector(".thumb")?.replaceChildren(drawn);
          const said = `${headName(scene, l, head)}: ${heatSaid(grid, weights)}`;
          button?.setAttribute("aria-label", said);
          button?.setAttribute("title", said);
        }),
      );
      return top;
    },
    mark() {
      const { layer, head, heat } = store.state;
      for (const [place, button] of buttons) {
        const current = heat === "head" && place === `${layer}/${head}`;
        button.classList.toggle("current", current);
        if (current) button.setAttribute("aria-current", "true");
        else button.removeAttribute("aria-current");
      }
    },
    destroy: () => even.end(),
  };
}
