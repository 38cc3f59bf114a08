import { Gone, refusal, whenReady, type Numbers, type Source, type Working } from "./source";

/** The server that this page came from. */
export class HttpSource implements Source {
  readonly kind = "server";
  progress = (_: Working): void => {};

  async json(path: string): Promise<unknown> {
    return whenReady(async () => {
      const answer = await this.ask(path);
      return { status: answer.status, body: await answer.json() };
    }, this.progress);
  }

  async numbers(path: string): Promise<Numbers> {
    return (await whenReady(async () => {
      const answer = await this.ask(path);
      const { status } = answer;
      if (status === 202) return { status, body: await answer.json() };
      return {
        status,
        body: { data: await answer.arrayBuffer(), exact: answer.headers.get("X-Regard-Exact") !== "0" },
      };
    }, this.progress)) as Numbers;
  }

  async post(path: string, body: unknown): Promise<unknown> {
    const headers = { "Content-Type": "application/json" };
    return (await this.ask(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
  }

  private async ask(path: string, options?: RequestInit): Promise<Response> {
    const answer = await fetch(path, options).catch((error: unknown) => {
      throw new Gone("The server of this page does not answer. Is `regard look` still running?", { cause: error });
    });
    if (!answer.ok) throw refusal(await answer.json().catch(() => null), answer.status);
    return answer;
  }
}
