/** A box that finds words in a text of tokens. */

import { h } from "../dom";
import { count } from "../numbers/format";
import { nextPlace, placesOf } from "../numbers/searching";

/** Tokens from which a text is long enough to be searched. */
const LONG = 40;

export class SearchBox {
  private readonly input = h("input", {
    type: "search",
    placeholder: "Find in the text",
    "aria-label": "Find in the text",
    title: "Enter goes to the next place, with Shift to the one before",
  });
  private readonly told = h("output", {});
  readonly element = h("div", { class: "field search" }, this.input, this.told);
  private tokens: readonly string[] = [];
  /** The token from which the next place is looked for. */
  private at = -1;

  /** go: called with the first token of a place. */
  constructor(private readonly go: (token: number) => void) {
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.next(event.shiftKey);
    });
    this.input.addEventListener("input", () => {
      this.at = -1;
      this.say();
    });
  }

  setTokens(tokens: readonly string[]): void {
    [this.tokens, this.at] = [tokens, -1];
    this.element.hidden = tokens.length < LONG;
    this.say();
  }

  private next(back: boolean): void {
    const places = placesOf(this.tokens, this.input.value);
    if (!places.length) return;
    const k = nextPlace(places, this.at, back);
    this.at = places[k][0];
    this.told.textContent = `${count(k + 1)} of ${count(places.length)}`;
    this.go(this.at);
  }

  private say(): void {
    const { value } = this.input;
    const { length } = placesOf(this.tokens, value);
    this.told.textContent = !value ? "" : length ? `${count(length)} found` : "not found";
  }
}
