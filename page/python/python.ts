/** Python in a worker: Pyodide, NumPy and regard from the files beside this one. */

import type { Answer, Output, Run } from "./messages";

/** As much of Pyodide as is used. */
interface Pyodide {
  unpackArchive(archive: ArrayBuffer, format: "gztar" | "zip", options: { extractDir: string }): void;
  pyimport(name: "blocks"): { Blocks(post: (kind: Output["kind"], content: string) => void): Blocks };
}

interface Blocks {
  provide_display(): void;
  run(name: string, source: string): boolean;
}

/** What Pyodide's script makes: the function that starts an interpreter, given its settings. */
declare let _createPyodideModule: (settings: Settings) => Promise<unknown>;

interface Settings {
  instantiateWasm(imports: { env: Record<string, unknown> }, done: unknown): object;
}

declare function importScripts(...urls: string[]): void;

/** Bytes of all parts, a constant of the build. */
declare const TOTAL: number;

const here = new URL(".", self.location.href);
const request = self.fetch.bind(self);
const answer = (message: Answer): void => self.postMessage(message);
let loaded = 0;

/** A part of Python; its bytes are counted as they come. */
async function part(name: string): Promise<Response> {
  const found = await request(new URL(name, here));
  if (!found.ok || found.body === null) throw new Error(`${name} is missing (${found.status})`);
  const count = new TransformStream<Uint8Array, Uint8Array>({
    transform(chunk, out) {
      loaded += chunk.length;
      answer({ kind: "loading", loaded, total: TOTAL });
      out.enqueue(chunk);
    },
  });
  return new Response(found.body.pipeThrough(count), { headers: found.headers });
}

/** The interpreter, which the site holds compressed: few hosts compress WebAssembly on the way. */
async function interpreter(): Promise<Response> {
  const packed = (await part("interpreter.bin")).body!;
  const body = packed.pipeThrough(new DecompressionStream("gzip"));
  return new Response(body, { headers: { "content-type": "application/wasm" } });
}

/**
 * This build of NumPy asks who calls it, before it reuses the memory of a large intermediate result. Emscripten cannot
 * tell, and the call would end the interpreter. No callers is an answer that NumPy knows.
 */
function provideBacktrace(): void {
  const create = _createPyodideModule;
  _createPyodideModule = (settings) => {
    const instantiate = settings.instantiateWasm;
    settings.instantiateWasm = (imports, done) => {
      imports.env.backtrace = () => 0;
      return instantiate(imports, done);
    };
    return create(settings);
  };
}

async function start(): Promise<Blocks> {
  const archives = Promise.all(["numpy.bin", "regard.bin"].map(async (name) => (await part(name)).arrayBuffer()));
  self.fetch = (asked) => {
    const name = String(asked).split("/").pop()!;
    return name === "pyodide.asm.wasm" ? interpreter() : part(name);
  };
  importScripts(new URL("pyodide.asm.js", here).href);
  provideBacktrace();
  const { loadPyodide } = await import(new URL("pyodide.mjs", here).href);
  const loading: Promise<Pyodide> = loadPyodide({ indexURL: here.href });
  const [python, [numpy, regard]] = await Promise.all([loading, archives]);
  self.fetch = request;
  python.unpackArchive(numpy!, "gztar", { extractDir: "/" });
  python.unpackArchive(regard!, "zip", { extractDir: "/lib/python3.12/site-packages" });
  const blocks = python.pyimport("blocks").Blocks((kind, content) => answer({ kind, content }));
  blocks.provide_display();
  answer({ kind: "ready" });
  return blocks;
}

const failed = (error: unknown): void =>
  answer({ kind: "failed", why: error instanceof Error ? error.message : String(error) });
const started = start();
started.catch(failed);

self.onmessage = async ({ data }: MessageEvent<Run>) => {
  const blocks = await started;
  try {
    answer({ kind: "done", ok: blocks.run(data.name, data.source) });
  } catch (error) {
    failed(error); // not the block's error: the interpreter has ended
  }
};
