/** A line from the word that looks to the word it looks at, over a text whose tokens are elements. */

import { s } from "../dom";

/** The path of an arc from one place to another, above both. */
export function arcPath(from: { x: number; y: number }, to: { x: number; y: number }, height: number): string {
  const top = Math.min(from.y, to.y) - height;
  return `M${from.x} ${from.y}C${from.x} ${top} ${to.x} ${top} ${to.x} ${to.y}`;
}

/** Draws the line over a text with elements of the classes `query` and `key`, also after it was broken anew. */
export function withLine(text: HTMLElement): HTMLElement {
  const path = s("path");
  text.classList.add("lined");
  text.append(s("svg", { class: "line", "aria-hidden": "true" }, path));
  const draw = (): void => {
    const [query, key] = ["query", "key"].map((name) => text.querySelector<HTMLElement>(`.token.${name}`));
    if (!query || !key || !text.isConnected) return;
    const middle = (token: HTMLElement): { x: number; y: number } => ({
      x: token.offsetLeft + token.offsetWidth / 2,
      y: token.offsetTop,
    });
    path.setAttribute("d", arcPath(middle(query), middle(key), parseFloat(getComputedStyle(text).paddingTop)));
  };
  new ResizeObserver(draw).observe(text);
  return text;
}
