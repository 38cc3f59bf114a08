/** A number with a bar below it. */

import { h } from "../dom";

/** A bar of a share of its box, with what it says; its class gives the colour. */
export function amount(share: number, said: string, kind: string): HTMLElement {
  const element = h("span", { class: `amount ${kind}` }, h("b", {}, said));
  element.style.setProperty("--share", String(Math.max(0, Math.min(1, share))));
  return element;
}
