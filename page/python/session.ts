/** The one Python of a page: which of its blocks have run, and what runs next. */

import type { Answer, Loading, Output, Run } from "./messages";

/** As much of a `Worker` as is used. */
export interface Port {
  postMessage(run: Run): void;
  terminate(): void;
  onmessage: ((event: { data: Answer }) => void) | null;
  onerror: ((event: { message?: string }) => void) | null;
}

export type End = "done" | "failed" | "stopped";

/** A block of the page. */
export interface Block {
  source(): string;
  started(): void;
  show(output: Output): void;
  ended(how: End): void;
}

export interface State {
  /** The block that was asked for, while it or one above it runs. */
  asked: number | null;
  loading: Loading | null;
}

export class Session {
  private port: Port | null = null;
  private loading: Loading | null = null;
  private asked: number | null = null;
  private running = 0;
  /** What has run, by block. */
  private readonly ran = new Map<number, string>();

  /** open: starts a Python. */
  constructor(
    private readonly blocks: readonly Block[],
    private readonly open: () => Port,
    private readonly changed: (state: State) => void,
  ) {}

  /** Run a block, after those above it from the first one on that has not run as it is now: it may use their names. */
  run(block: number): void {
    if (this.asked !== null) return;
    this.asked = block;
    const stale = this.blocks.findIndex((above, n) => this.ran.get(n) !== above.source());
    this.running = stale < 0 ? block : Math.min(stale, block);
    this.port ??= this.opened();
    this.start();
  }

  /** End Python in the middle of what it does. All names are lost with it. */
  stop(): void {
    this.close("stopped");
  }

  private opened(): Port {
    const port = this.open();
    port.onmessage = ({ data }) => port === this.port && this.answer(data);
    port.onerror = ({ message }) => port === this.port && this.fail(message ?? "its worker did not start");
    this.loading = { kind: "loading", loaded: 0, total: 1 };
    return port;
  }

  private start(): void {
    const block = this.blocks[this.running]!;
    block.started();
    this.port!.postMessage({ name: `block ${this.running + 1}`, source: block.source() });
    this.tell();
  }

  private answer(answer: Answer): void {
    if (answer.kind === "loading" || answer.kind === "ready") {
      this.loading = answer.kind === "loading" ? answer : null;
      this.tell();
    } else if (answer.kind === "failed") {
      this.fail(answer.why);
    } else if (answer.kind === "done") {
      this.done(answer.ok);
    } else {
      this.blocks[this.running]!.show(answer);
    }
  }

  private done(ok: boolean): void {
    const block = this.blocks[this.running]!;
    if (ok) this.ran.set(this.running, block.source());
    else this.ran.delete(this.running);
    block.ended(ok ? "done" : "failed");
    if (ok && this.running !== this.asked) {
      this.running++;
      this.start();
    } else {
      this.asked = null;
      this.tell();
    }
  }

  private fail(why: string): void {
    if (this.asked !== null)
      this.blocks[this.running]!.show({ kind: "error", content: `Python cannot run here: ${why}` });
    this.close("failed");
  }

  private close(how: End): void {
    this.port?.terminate();
    this.port = this.loading = null;
    this.ran.clear();
    if (this.asked !== null) this.blocks[this.running]!.ended(how);
    this.asked = null;
    this.tell();
  }

  private tell(): void {
    this.changed({ asked: this.asked, loading: this.loading });
  }
}
