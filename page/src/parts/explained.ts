/** A word that opens its meaning, by pointer, finger or key. */

import { h } from "../dom";

/** Pixels of a meaning's width at most, and to the word and the edges of the window at least. */
const [WIDE, APART] = [320, 6];

/** Puts a meaning, which is about to be shown, below its word; above it, where it is low in the window. */
function place(meaning: HTMLElement, word: HTMLElement): void {
  const { left, top, bottom } = word.getBoundingClientRect();
  const wide = Math.min(WIDE, innerWidth - 2 * APART);
  const low = bottom > innerHeight * 0.7;
  Object.assign(meaning.style, {
    width: `${wide}px`,
    left: `${Math.max(APART, Math.min(left, innerWidth - APART - wide))}px`,
    top: low ? "auto" : `${bottom + APART}px`,
    bottom: low ? `${innerHeight - top + APART}px` : "auto",
  });
}

/** The word as a button, and its meaning, which Escape, a click elsewhere and scrolling close. */
export function explained(word: string, meaning: string): [HTMLButtonElement, HTMLElement] {
  const id = `regard-${Math.random().toString(36).slice(2)}`; // a notebook has several pages in one document
  const said = h("span", { class: "meaning", popover: "auto", id }, meaning);
  const button = h("button", { type: "button", class: "term", "aria-describedby": id, "data-focus": word }, word);
  button.popoverTargetElement = said;
  const close = (): void => said.hidePopover();
  said.addEventListener("beforetoggle", (event) => {
    if (event.newState === "open") place(said, button);
    window[event.newState === "open" ? "addEventListener" : "removeEventListener"]("scroll", close, true);
  });
  return [button, said];
}
