import { h } from "../dom";

/** A sentence about what is shown, until it is closed or what is shown changes. */
export class Notice {
  private readonly text = h("span", {});
  readonly element = h(
    "div",
    { class: "notice", role: "status", hidden: true },
    this.text,
    h("button", { type: "button", click: () => this.hide() }, "Close"),
  );

  show(text: string): void {
    this.text.textContent = text;
    this.element.hidden = false;
  }

  hide(): void {
    this.element.hidden = true;
  }
}
