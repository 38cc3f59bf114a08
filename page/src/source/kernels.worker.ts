/** Maps and scores by the kernels of the engine `cpu`, as WebAssembly, beside the page's own thread. */

import {
  load,
  type Attention,
  type MapsResult,
  type ScoresResult,
  type WeightsCall,
} from "../../../src/regard/engines/cpu/wasm/loader.js";

/** A module, a head, one that is not asked about any more, or a question about one. */
export type Order =
  | { what: "module"; module: number; bytes: ArrayBuffer }
  | { what: "head"; head: string; module: number; call: WeightsCall }
  | { what: "forget"; head: string }
  | Question;

/** Maps by edges of bins, or the scores of a range of queries and one of keys. */
interface Question {
  what: "maps" | "scores";
  id: number;
  head: string;
  rows: number[];
  cols: number[];
}

/** What was asked for, or why there is nothing; lost: there will be nothing of this module. */
export type Answered = MapsResult | ScoresResult | { error: string; lost: boolean };

export type Reply = { id: number } & Answered;

const modules = new Map<number, Promise<Attention>>();
const heads = new Map<string, { module: number; call: WeightsCall }>();

async function found({ what, head, rows, cols }: Question): Promise<Answered> {
  const { module, call } = heads.get(head)!;
  let attention: Attention;
  try {
    attention = await modules.get(module)!;
  } catch (error) {
    return { error: messageOf(error), lost: true };
  }
  try {
    if (what === "maps") return attention.maps({ ...call, rows, cols });
    const { lse: _, ...scored } = call;
    return attention.scores({ ...scored, rows: [rows[0], rows[1]], cols: [cols[0], cols[1]] });
  } catch (error) {
    return { error: messageOf(error), lost: false };
  }
}

const messageOf = (error: unknown): string => (error instanceof Error ? error.message : String(error));

self.onmessage = ({ data }: MessageEvent<Order>): void => {
  if (data.what === "module") {
    const loaded = load(data.bytes);
    loaded.catch(() => undefined); // told to whoever asks
    modules.set(data.module, loaded);
  } else if (data.what === "head") heads.set(data.head, data);
  else if (data.what === "forget") heads.delete(data.head);
  else void found(data).then((answered) => self.postMessage({ id: data.id, ...answered } satisfies Reply));
};
