/** Kernels in a worker, one module for each set of rules: of a saved file, or of a notebook. */

import type { MapsResult, ScoresResult, WeightsCall } from "../../../src/regard/engines/cpu/wasm/loader.js";
import { bytesOf } from "../numbers/base64";
import type { Answered, Order, Reply } from "./kernels.worker";
import KernelWorker from "./kernels.worker?worker&inline";

/** What kernels compute: maps by edges of bins, and scores of a range of queries and one of keys. */
export interface Computed {
  maps: MapsResult;
  scores: ScoresResult;
}

export class Kernels {
  /** Why the last question was not answered. */
  missing = "";
  private lost = false;
  private worker: Worker | null = null;
  private readonly sent = new Set<string>();
  private readonly waiting = new Map<number, (answered: Answered) => void>();
  private next = 0;

  /** modules: in base64. */
  constructor(private readonly modules: readonly string[]) {}

  /** What is asked of some queries and keys of a head; null where it cannot be computed. */
  async ask<What extends keyof Computed>(
    what: What,
    name: string,
    module: number,
    head: () => WeightsCall,
    rows: number[],
    cols: number[],
  ): Promise<Computed[What] | null> {
    if (this.lost) return null;
    const answered = await this.answer(what, name, module, head, rows, cols);
    if (!("error" in answered)) return answered as Computed[What];
    this.missing = answered.error;
    this.lost ||= answered.lost;
    return null;
  }

  /** Gives up what is held of a head. */
  forget(name: string): void {
    if (this.sent.delete(name)) this.send({ what: "forget", head: name });
  }

  close(): void {
    this.worker?.terminate();
    this.end("this page was closed");
  }

  private answer(
    what: keyof Computed,
    name: string,
    module: number,
    head: () => WeightsCall,
    rows: number[],
    cols: number[],
  ): Promise<Answered> {
    return new Promise((resolve) => {
      const id = this.next++;
      this.waiting.set(id, resolve);
      try {
        this.worker ??= this.started();
        if (!this.sent.has(String(module))) {
          this.send({ what: "module", module, bytes: bytesOf(this.modules[module]) });
          this.sent.add(String(module));
        }
        if (!this.sent.has(name)) this.send({ what: "head", head: name, module, call: head() });
        this.sent.add(name);
        this.send({ what, id, head: name, rows, cols });
      } catch (error) {
        this.end(error instanceof Error ? error.message : String(error));
      }
    });
  }

  private send(order: Order): void {
    this.worker?.postMessage(order);
  }

  private started(): Worker {
    const worker = new KernelWorker();
    worker.onerror = (event) => this.end(event.message || "this page may run nothing beside itself");
    worker.onmessage = ({ data: { id, ...answered } }: MessageEvent<Reply>) => {
      this.waiting.get(id)?.(answered as Answered);
      this.waiting.delete(id);
    };
    return worker;
  }

  /** Nothing will be answered any more. */
  private end(error: string): void {
    for (const resolve of this.waiting.values()) resolve({ error, lost: true });
    this.waiting.clear();
  }
}
