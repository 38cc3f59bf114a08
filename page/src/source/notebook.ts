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

const PATIENCE_MS = 120_000;

/** The kernel of a notebook, asked by messages. */
export class NotebookSource implements Source {
  readonly kind = "notebook";
  progress = (_: number): void => {};
  private next = 0;
  private readonly waiting = new Map<number, (answer: Answer, buffers: DataView[]) => void>();

  constructor(private readonly model: WidgetModel) {
    model.on("msg:custom", this.receive);
  }

  close(): void {
    this.model.off("msg:custom", this.receive);
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
    const reply = await new Promise<{ answer: Answer; buffers: DataView[] }>((resolve, reject) => {
      const timer = setTimeout(() => {
        this.waiting.delete(id);
        reject(new Gone("The notebook's kernel does not answer. Is it busy, or was it restarted?"));
      }, PATIENCE_MS);
      this.waiting.set(id, (answer, buffers) => {
        clearTimeout(timer);
        resolve({ answer, buffers });
      });
      this.model.send({ id, ...request });
    });
    if (reply.answer.status >= 400) throw refusal(reply.answer.json, reply.answer.status);
    return reply;
  }
}
