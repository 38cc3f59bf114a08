// Run WebAssembly as a JSON file says: node in_node.mjs job.json. Arrays are files beside it, of raw numbers.
//
// "image": a module, a memory to start from, and what to launch in it; writes the bytes from `from` to `to`.
// "calls": a loader and a module, calls for it, and seconds to time each; writes results, prints times or errors.
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

const file = process.argv[2];
const job = JSON.parse(readFileSync(file));
const here = (name) => join(dirname(file), name);

function image({ module, memory: initial, start, launches, taken, from, to, result }) {
  const { exports } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(here(module))), {});
  const bytes = readFileSync(here(initial));
  const more = Math.ceil((start + bytes.length - exports.memory.buffer.byteLength) / 65536);
  if (more > 0) exports.memory.grow(more);
  new Uint8Array(exports.memory.buffer).set(bytes, start);
  for (const fields of launches) {
    new BigInt64Array(exports.memory.buffer)[taken / 8] = 0n;
    exports.forward(fields);
  }
  writeFileSync(here(result), new Uint8Array(exports.memory.buffer, from, to - from));
}

async function calls({ loader, module, calls, seconds }) {
  const { load } = await import(pathToFileURL(here(loader)));
  const attention = await load(readFileSync(here(module)));
  const printed = [];
  for (const [n, call] of calls.entries()) {
    const floats = (name) => new Float32Array(new Uint8Array(readFileSync(here(name))).buffer);
    const given = { ...call };
    for (const name of ["q", "k", "v", "lse"]) if (typeof call[name] === "string") given[name] = floats(call[name]);
    try {
      const run = call.rows ? attention.maps : attention;
      const result = run(given);
      const { top, ...arrays } = result;
      if (top) Object.assign(arrays, { values: top.values, indices: top.indices });
      for (const [name, x] of Object.entries(arrays)) writeFileSync(here(`${n}.${name}`), new Uint8Array(x.buffer));
      let best = Infinity;
      for (const stop = performance.now() + 1000 * (seconds ?? 0); performance.now() < stop; ) {
        const begun = performance.now();
        run(given);
        best = Math.min(best, performance.now() - begun);
      }
      printed.push({ milliseconds: best });
    } catch (error) {
      printed.push({ error: `${error.name}: ${error.message}` });
    }
  }
  console.log(JSON.stringify(printed));
}

await (job.image ? image(job.image) : calls(job.calls));
