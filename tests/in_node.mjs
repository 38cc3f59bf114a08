// Run WebAssembly as a JSON file says: node in_node.mjs job.json. What it names are files beside it.
//
// "image": a module, a memory to start from, and what to launch in it; writes the bytes from `from` to `to`.
// "calls": a loader and a module, calls for it, and seconds to time each; prints results.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

import { results } from "./exported_calls.mjs";

const file = process.argv[2];
const job = JSON.parse(readFileSync(file));
const here = (name) => join(dirname(file), name);

function image({ module, kernel, memory: initial, start, launches, taken, from, to, result }) {
  const { exports } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(here(module))), {});
  const bytes = readFileSync(here(initial));
  const more = Math.ceil((start + bytes.length - exports.memory.buffer.byteLength) / 65536);
  if (more > 0) exports.memory.grow(more);
  new Uint8Array(exports.memory.buffer).set(bytes, start);
  for (const fields of launches) {
    new BigInt64Array(exports.memory.buffer)[taken / 8] = 0n;
    exports[kernel ?? "forward"](fields);
  }
  writeFileSync(here(result), new Uint8Array(exports.memory.buffer, from, to - from));
}

async function calls({ loader, module, calls, seconds }) {
  const { load } = await import(pathToFileURL(here(loader)));
  console.log(JSON.stringify(results(await load(readFileSync(here(module))), calls, seconds)));
}

await (job.image ? image(job.image) : calls(job.calls));
