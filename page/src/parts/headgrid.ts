/** Every head as a small picture in rows of layers, to choose one. */

import type { HeadRow, Scene, Told } from "../data";
import { h, reveal } from "../dom";
import { scoreText } from "../numbers/format";
import { headName, scaleName, type Context } from "../views/view";
import { keepEven } from "./evenrows";
import { saysOf } from "./sentences";
import { definitionOf } from "./terms";
import { headPixels, sinkFirst, thumb } from "./thumb";

/** So many heads in a layer have room for the names of their kinds. */
const FEW = 6;

export interface HeadGrid {
  readonly element: HTMLElement;
  /** Names the kinds of heads. */
  tell(rows: readonly HeadRow[]): void;
  /** Marks the chosen head, in the page's colours. */
  update(recolour: boolean): void;
  destroy(): void;
}

/** A head's kinds as text, tentative ones with a question mark. */
export const kindsOf = (row: HeadRow): string =>
  row.kinds.map(({ name, score, tentative }) => `${name}${tentative ? "?" : ""} ${scoreText(score)}`).join(", ");

/** What stands below a head's picture: its kind, where there is room for it and it has one, or its number. */
export const labelOf = ({ kinds: [kind] }: HeadRow, number: number, written: boolean): string =>
  written && kind ? `${kind.name}${kind.tentative ? "?" : ""}` : `H${number}`;

/** Says at its button what a head of no kind does on this text. */
function tellClaims(context: Context, { layer, head }: HeadRow, button: HTMLElement): void {
  const { data, store, scene, words } = context;
  const say = (heads: Told[][]): void => {
    const said = `${headName(scene, layer, head)}: ${saysOf(heads[head], words, scaleName(store.state) !== "ink")}`;
    button.setAttribute("aria-label", said);
    button.title = said;
  };
  data.claims(store.state.scene, layer).then(say, context.fail);
}

/** Names the kinds of a head at its button, in writing where there is room. */
function tellKinds(context: Context, row: HeadRow, button: HTMLElement, written: boolean): void {
  const [kind] = row.kinds;
  if (!kind) {
    tellClaims(context, row, button);
    return;
  }
  const name = `${headName(context.scene, row.layer, row.head)}: ${kindsOf(row)}`;
  button.setAttribute("aria-label", name);
  button.title = `${name}\n${definitionOf(kind.kind, context.words)}`;
  const { numbers } = context.scene.layers[row.layer];
  button.querySelector(".kind")?.replaceChildren(labelOf(row, numbers[row.head], written));
  button.classList.toggle("notable", !kind.tentative);
}

/** The heads of each layer in a row: layers and heads of a scene are counted from 0, `number` is the model's own. */
export function rowsOfHeads(
  scene: Scene,
  cell: (layer: number, head: number, number: number) => HTMLElement,
): HTMLElement[] {
  return scene.layers.map((layer, l) =>
    h(
      "div",
      { class: "gridrow", role: "group", "aria-label": `Layer ${layer.number}` },
      h("span", { class: "which" }, `L${layer.number}`),
      h("div", { class: "gridheads" }, ...layer.numbers.map((number, head) => cell(l, head, number))),
    ),
  );
}

export function headGrid(context: Context): HeadGrid {
  const { store, scene } = context;
  const buttons = new Map<string, HTMLElement>();
  const wanted = new IntersectionObserver(fill, { rootMargin: "200px" });
  const most = Math.max(...scene.layers.map(({ heads }) => heads));
  const element = h(
    "div",
    { class: most > FEW ? "headgrid many" : "headgrid" },
    h("p", { class: "axes" }, "in each: ", h("b", {}, "query ↓"), " ", h("b", {}, "key →"), sinkFirst(scene)),
    ...rowsOfHeads(scene, cell),
  );

  const even = keepEven(element, ".gridheads");

  function cell(layer: number, head: number, number: number): HTMLElement {
    const picture = h("span", { class: "thumb sheet", "data-head": `${layer}/${head}` });
    const name = headName(scene, layer, head);
    const button = h(
      "button",
      { type: "button", class: "gridhead", "aria-label": name, title: name, click: () => store.set({ layer, head }) },
      picture,
      h("span", { class: "kind" }, `H${number}`),
    );
    buttons.set(`${layer}/${head}`, button);
    wanted.observe(picture);
    return button;
  }

  function fill(entries: IntersectionObserverEntry[]): void {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      wanted.unobserve(target);
      paint(target);
    }
  }

  function paint(target: Element): void {
    const [layer, head] = (target.getAttribute("data-head") as string).split("/").map(Number);
    headPixels(context, layer, head, scaleName(store.state)).then(
      (pixels) => target.replaceChildren(thumb(pixels)),
      context.fail,
    );
  }

  return {
    element,
    tell(rows) {
      for (const row of rows) {
        const button = buttons.get(`${row.layer}/${row.head}`);
        if (button) tellKinds(context, row, button, most <= FEW);
      }
    },
    update(recolour) {
      const { layer, head } = store.state;
      for (const [place, button] of buttons) {
        const current = place === `${layer}/${head}`;
        button.classList.toggle("current", current);
        if (current) {
          button.setAttribute("aria-current", "true");
          if (element.parentElement) reveal(element.parentElement, button);
        } else button.removeAttribute("aria-current");
      }
      if (recolour) for (const picture of element.querySelectorAll(".thumb canvas")) paint(picture.parentElement!);
    },
    destroy() {
      wanted.disconnect();
      even.end();
    },
  };
}
