/** Maps of weights by the kernels of the engine `cpu`, as WebAssembly, beside the page's own thread. */

import { load, type Attention, type HeadCall, type MapsResult } from "../../../src/regard/engines/cpu/wasm/loader.js";

/** A module, a head, or a question about one. */
export type Order =
  | { what: "module"; module: number; bytes: ArrayBuffer }
  | { what: "head"; head: string; module: number; call: HeadCall }
  | { what: "maps"; id: number; head: string; rows: number[]; cols: number[] };

/** Maps, or why there are none; lost: there will be none of this module. */
export type Answered = MapsResult | { error: string; lost: boolean };

export type Reply = { id: number } & Answered;

const modules = new Map<number, Promise<Attention>>();
const heads = new Map<string, { module: number; call: HeadCall }>();

async function found({ head, rows, cols }: { head: string; rows: number[]; cols: number[] }): Promise<Answered> {
  const { module, call } = heads.get(head)!;
  let attention: Attention;
  try {
    attention = await modules.get(module)!;
  } catch (error) {
    return { error: messageOf(error), lost: true };
  }
  try {
    return attention.maps({ ...call, rows, cols });
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
  else void found(data).then((answered) => self.postMessage({ id: data.id, ...answered } satisfies Reply));
};
