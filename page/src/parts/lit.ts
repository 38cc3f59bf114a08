/** The token that is pointed at, lit wherever it stands: in texts, in lists, and in maps by their crosshair. */

import type { Cell } from "./deepmap";

export interface Pointed {
  axis: "query" | "key";
  token: number;
}

/** Sent by a map, up to the page: the cell that is pointed at in it, or null. */
export const CELL = "regard-cell";
/** Sent to each map: the token that is pointed at elsewhere, or null. */
export const TOKEN = "regard-token";

/** The axis of an element's tokens, by the nearest box that says so; most are keys. */
const axisOf = (element: Element): Pointed["axis"] =>
  element.closest<HTMLElement>("[data-axis]")?.dataset.axis === "query" ? "query" : "key";

/** Lights tokens of an element's panels; `same`: whether queries and keys are the same tokens. */
export function lightTokens(root: HTMLElement, same: () => boolean): void {
  let lit: Element[] = [];
  const light = (pointed: readonly Pointed[]): void => {
    for (const element of lit) element.classList.remove("lit-token");
    lit = pointed.flatMap(({ axis, token }) =>
      [...root.querySelectorAll(`[data-token="${token}"]`)].filter((one) => same() || axisOf(one) === axis),
    );
    for (const element of lit) element.classList.add("lit-token");
  };
  const tell = (pointed: Pointed | null): void => {
    // A view that is kept until the next one has come is of another scene.
    const maps = [...root.querySelectorAll(".deepmap")].filter((map) => !map.closest(".stale"));
    for (const map of maps) map.dispatchEvent(new CustomEvent(TOKEN, { detail: pointed }));
  };
  let last = "";
  root.addEventListener("pointerover", ({ target }) => {
    const element = (target as Element).closest<HTMLElement>("[data-token]");
    const pointed = element && { axis: axisOf(element), token: Number(element.dataset.token) };
    const name = pointed ? `${pointed.axis} ${pointed.token}` : "";
    if (name === last) return;
    last = name;
    light(pointed ? [pointed] : []);
    tell(pointed);
  });
  root.addEventListener(CELL, (event) => {
    const cell = (event as CustomEvent<Cell | null>).detail;
    const [query, key] = ["query", "key"] as const;
    light(
      cell
        ? [
            { axis: query, token: cell.i },
            { axis: key, token: cell.j },
          ]
        : [],
    );
  });
}
