/** Blocks of a page that a reader edits and runs. Without this script they are code with its output. */

import type { Output } from "./messages";
import { Session, type Block, type End, type Port, type State } from "./session";

declare const TOTAL: number; // bytes that the first block to run downloads
const DOWNLOAD = `The first run downloads Python, ${Math.round(TOTAL / 1e6)} MB, once`;
const INDENT = "    ";
const FROM_DISK =
  "Python needs a page from a server: run `python -m http.server` in the folder of this site, and open http://localhost:8000";
const script = document.currentScript as HTMLScriptElement;

function element<K extends keyof HTMLElementTagNameMap>(tag: K, name: string, text = ""): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

class Cell implements Block {
  readonly button = element("button", "run-button", "Run");
  private readonly code: HTMLElement;
  private readonly bar = element("div", "run-bar");
  private readonly status = element("span", "run-status", DOWNLOAD);
  private readonly progress = element("progress", "run-progress");
  private output: HTMLElement | null;
  private asked = false;

  constructor(
    private readonly cell: HTMLElement,
    private readonly number: number,
    private readonly run: () => void,
    stop: () => void,
  ) {
    this.code = cell.querySelector<HTMLElement>(".cell_input pre")!;
    this.output = cell.querySelector<HTMLElement>(".cell_output");
    this.edited();
    this.button.type = "button";
    this.button.addEventListener("click", () => (this.asked ? stop() : run()));
    this.status.setAttribute("role", "status");
    this.progress.setAttribute("aria-label", "Python is loading");
    this.progress.hidden = true;
    this.bar.append(this.button, this.status, this.progress);
    cell.querySelector(".cell_input")!.after(this.bar);
  }

  /** Let the code be edited where it stands: it keeps its colours, and nothing on the page moves. */
  private edited(): void {
    try {
      this.code.contentEditable = "plaintext-only";
    } catch {
      this.code.contentEditable = "true"; // browsers that do not know it
    }
    this.code.spellcheck = false;
    const names = { role: "textbox", "aria-multiline": "true", "aria-keyshortcuts": "Control+Enter" };
    for (const [name, value] of Object.entries(names)) this.code.setAttribute(name, value);
    this.code.setAttribute("aria-label", `Python, block ${this.number + 1}: Control and Enter run it`);
    this.code.addEventListener("keydown", (event) => {
      event.stopPropagation(); // the site's own shortcuts: "/" would move to its search
      if (event.key !== "Enter" || event.shiftKey || event.altKey || event.isComposing) return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.run();
      else document.execCommand("insertText", false, `\n${this.indentation()}`); // the one way that undo knows
    });
  }

  /** Spaces for the line after the caret's. */
  private indentation(): string {
    const caret = getSelection()!.getRangeAt(0);
    const before = document.createRange();
    before.setStart(this.code, 0);
    before.setEnd(caret.startContainer, caret.startOffset);
    const line = before.toString().split("\n").pop()!;
    return /^ */.exec(line)![0] + (line.trimEnd().endsWith(":") ? INDENT : "");
  }

  source(): string {
    return this.code.innerText || this.code.textContent!; // of a folded block browsers say that it has no text
  }

  started(): void {
    if (this.output === null) {
      this.output = element("div", "cell_output docutils container");
      this.cell.append(this.output);
    }
    this.output.replaceChildren();
    this.output.setAttribute("aria-live", "polite");
    this.status.textContent = "";
  }

  show({ kind, content }: Output): void {
    if (kind === "picture") {
      const drawing = new DOMParser().parseFromString(content, "image/svg+xml").documentElement;
      const picture = element("img", drawing.classList.contains("figure") ? "run-picture drawn" : "run-picture");
      picture.alt = drawing.querySelector("title")?.textContent ?? `The picture that block ${this.number + 1} made`;
      picture.src = `data:image/svg+xml,${encodeURIComponent(content)}`;
      this.output!.append(picture);
      return;
    }
    const last = this.output!.lastElementChild;
    const text = last?.classList.contains(`run-${kind}`) ? last.querySelector("pre")! : this.text(kind);
    text.append(content);
  }

  private text(kind: string): HTMLPreElement {
    const made = element("div", `output stream highlight run-${kind}`);
    const text = element("pre", "");
    text.tabIndex = 0; // the keyboard scrolls it
    made.append(text);
    this.output!.append(made);
    return text;
  }

  ended(how: End): void {
    this.status.textContent = { done: "Done", failed: "Failed", stopped: "Stopped" }[how];
    const fold = how === "failed" ? this.code.closest("details") : null;
    if (fold) fold.open = true; // a block that another one needs may be folded
  }

  update({ asked, loading }: State): void {
    this.asked = asked === this.number;
    if (asked !== null && this.status.textContent === DOWNLOAD) this.status.textContent = "";
    this.button.textContent = this.asked ? "Stop" : "Run";
    this.button.disabled = asked !== null && !this.asked;
    this.progress.hidden = !this.asked || loading === null;
    if (loading !== null) Object.assign(this.progress, { max: loading.total, value: loading.loaded });
    const status = loading === null ? "Running" : "Loading Python";
    if (this.asked && this.status.textContent !== status) this.status.textContent = status;
  }
}

function run(block: number): void {
  if (location.protocol === "file:") {
    cells[block]!.started();
    cells[block]!.show({ kind: "error", content: FROM_DISK });
  } else {
    session.run(block);
  }
}

const found = [...document.querySelectorAll<HTMLElement>(".cell.tag_run")];
const cells = found.map(
  (cell, n) =>
    new Cell(
      cell,
      n,
      () => run(n),
      () => session.stop(),
    ),
);
const session = new Session(
  cells,
  () => new Worker(new URL("python.js", script.src)) as Port,
  (state) => cells.forEach((cell) => cell.update(state)),
);
