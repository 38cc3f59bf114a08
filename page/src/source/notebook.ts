import { perPixel } from "../numbers/levels";
import { Recent } from "../recent";
import { Kernels } from "./kernels";
import { Gone, refusal, Refused, whenReady, type Numbers, type Source, type Working } from "./source";
import { arraysOf, ComputedWeights, KernelWeights, numbersOf, pyramidOf, type StoredHead } from "./weights";

/** What anywidget hands to a widget, as far as it is used here. */
export interface WidgetModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(event: "msg:custom", callback: (content: unknown, buffers: DataView[]) => void): void;
  off(event: "msg:custom", callback: (content: unknown, buffers: DataView[]) => void): void;
}

interface Answer {
  id: number;
  status: number;
  json?: unknown;
  exact?: boolean;
}

const SILENT = "The kernel of this notebook does not answer. If it was restarted, run the cell again.";
const PATIENCE_MS = 120_000;
/** Cells that run keep messages waiting. */
const SLOW_MS = 3_000;

/** Heads whose queries and keys are held here, of 2 MiB at most. */
const HELD = 32;
/** Queries and keys of a tile that is computed here, at most. */
const ON_PAGE = 2048;

/** The kernel's answer about a head that may be computed here, and the module of its rules in base64. */
interface Held {
  head: StoredHead | null;
  code: string | null;
}

/**
 * The kernel of a notebook, asked by messages.
 *
 * Weights of heads that are not too large are computed here, also while the kernel runs a cell: tiles of fine levels,
 * rows, columns and numbers, from queries and keys that are asked for once.
 */
export class NotebookSource implements Source {
  readonly kind = "notebook";
  progress = (_: Working): void => {};
  private readonly modules: string[] = [];
  private readonly kernels = new Kernels(this.modules);
  private readonly heads = new Recent<Promise<ComputedWeights | null>>(HELD, (name) => this.kernels.forget(name));
  private next = 0;
  private readonly waiting = new Map<number, (answer: Answer, buffers: DataView[]) => void>();

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.receive);
  }

  /** Nobody looks any more: what the kernel keeps for this may go. */
  close(): void {
    this.kernels.close();
    this.model.off("msg:custom", this.receive);
    try {
      this.model.send({ leave: true });
    } catch {
      // There is no kernel any more.
    }
  }

  async json(path: string): Promise<unknown> {
    return whenReady(async () => {
      const { answer } = await this.ask({ path });
      return { status: answer.status, body: answer.json };
    }, this.progress);
  }

  async numbers(path: string): Promise<Numbers> {
    const data = await this.computed(path);
    if (data) return { data, exact: true };
    return (await whenReady(async () => {
      const { answer, buffers } = await this.ask({ path });
      const [view] = buffers;
      if (!view) return { status: answer.status, body: answer.json };
      const data = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
      return { status: answer.status, body: { data, exact: answer.exact ?? true } };
    }, this.progress)) as Numbers;
  }

  async post(path: string, body: unknown): Promise<unknown> {
    return (await this.ask({ path, method: "POST", body })).answer.json;
  }

  /** What follows from a head's queries and keys; undefined of what the kernel has to tell. */
  private async computed(path: string): Promise<ArrayBuffer | undefined> {
    const [place, query = ""] = path.split("?");
    const [, scene, what, layer, head, ...rest] = place.split("/");
    if (!["row", "column", "values", "dots", "tile"].includes(what)) return undefined;
    const options = new URLSearchParams(query);
    const weights = await this.head(`${scene}/stored/${layer}/${head}`, options.get("b") ?? "0");
    if (!weights) return undefined;
    const at = rest.map(Number);
    const pyramid = pyramidOf(weights);
    if (what === "tile" && pyramid.tile * perPixel(pyramid, at[0]) > ON_PAGE) return undefined;
    try {
      return await numbersOf(weights, what, at, options);
    } catch (error) {
      if (error instanceof Refused) return undefined; // these rules, and no WebAssembly
      throw error;
    }
  }

  /** The head of a path as it may be computed here; null if that is the kernel's task. */
  private head(path: string, b: string): Promise<ComputedWeights | null> {
    const name = `api/${path}?b=${b}`;
    const known = this.heads.get(name);
    if (known) return known;
    const asked = (this.json(name) as Promise<Held>).then(({ head, code }) => {
      if (!head) return null;
      if (code === null) return new ComputedWeights(head, arraysOf(head));
      if (!this.modules.includes(code)) this.modules.push(code);
      return new KernelWeights({ ...head, module: this.modules.indexOf(code) }, arraysOf(head), name, this.kernels);
    });
    asked.catch(() => this.heads.forget((key) => key === name));
    this.heads.set(name, asked);
    return asked;
  }

  private readonly receive = (content: unknown, buffers: DataView[]): void => {
    const answer = content as Answer;
    const resolve = this.waiting.get(answer.id);
    this.waiting.delete(answer.id);
    resolve?.(answer, buffers);
  };

  private async ask(request: object): Promise<{ answer: Answer; buffers: DataView[] }> {
    const id = this.next++;
    const slow = setTimeout(() => this.progress({ share: null }), SLOW_MS);
    let end: ReturnType<typeof setTimeout> | undefined;
    const reply = new Promise<{ answer: Answer; buffers: DataView[] }>((resolve, reject) => {
      end = setTimeout(() => reject(new Gone(SILENT)), PATIENCE_MS);
      this.waiting.set(id, (answer, buffers) => resolve({ answer, buffers }));
      try {
        this.model.send({ id, ...request });
      } catch (error) {
        reject(new Gone(SILENT, { cause: error })); // the connection is gone
      }
    });
    try {
      const { answer, buffers } = await reply;
      if (answer.status >= 400) throw refusal(answer.json, answer.status);
      return { answer, buffers };
    } finally {
      this.waiting.delete(id);
      clearTimeout(slow);
      clearTimeout(end);
      if (!this.waiting.size) this.progress({ share: 1 });
    }
  }
}
