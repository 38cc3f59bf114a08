import { Gone, refusal, whenReady, type Numbers, type Source } from "./source";

/** What anywidget hands to a widget, as far as it is used here. */
export interface WidgetModel {
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

/** The kernel of a notebook, asked by messages. */
export class NotebookSource implements Source {
  readonly kind = "notebook";
  progress = (_: number | null): void => {};
  private next = 0;
  private readonly waiting = new Map<number, (answer: Answer, buffers: DataView[]) => void>();

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.receive);
  }

  /** Nobody looks any more: what the kernel keeps for this may go. */
  close(): void {
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

  private readonly receive = (content: unknown, buffers: DataView[]): void => {
    const answer = content as Answer;
    const resolve = this.waiting.get(answer.id);
    this.waiting.delete(answer.id);
    resolve?.(answer, buffers);
  };

  private async ask(request: object): Promise<{ answer: Answer; buffers: DataView[] }> {
    const id = this.next++;
    const slow = setTimeout(() => this.progress(null), SLOW_MS);
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
      if (!this.waiting.size) this.progress(1);
    }
  }
}
