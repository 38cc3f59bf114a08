// Calls of an exported module, in Node.js or in a page: arrays are in base64, integers from 2^53 on are text.

/** Results of calls: their arrays and the least milliseconds of `seconds`; or an error. Calls with rows are of one head. */
export function results(attention, calls, seconds = 0) {
  return calls.map((call) => {
    const given = argument(call);
    const run = !call.rows ? attention : call.lse ? attention.maps : attention.scores;
    try {
      const { top, ...arrays } = run(given);
      if (top) Object.assign(arrays, { values: top.values, indices: top.indices });
      let milliseconds = Infinity;
      for (const stop = performance.now() + 1000 * seconds; performance.now() < stop; ) {
        const begun = performance.now();
        run(given);
        milliseconds = Math.min(milliseconds, performance.now() - begun);
      }
      const texts = Object.entries(arrays).map(([name, x]) => [name, [x.constructor.name, base64(x)]]);
      return { milliseconds, arrays: Object.fromEntries(texts) };
    } catch (error) {
      return { error: `${error.name}: ${error.message}` };
    }
  });
}

function argument(x) {
  if (typeof x !== "object" || x === null || Array.isArray(x)) return x;
  if (x.bigint) return BigInt(x.bigint);
  if ("base64" in x) return new globalThis[x.kind](bytes(x.base64).buffer);
  return Object.fromEntries(Object.entries(x).map(([name, value]) => [name, argument(value)]));
}

export function bytes(text) {
  return Uint8Array.from(atob(text), (x) => x.charCodeAt(0));
}

function base64(x) {
  const parts = [];
  const all = new Uint8Array(x.buffer, x.byteOffset, x.byteLength);
  for (let n = 0; n < all.length; n += 4096) parts.push(String.fromCharCode(...all.subarray(n, n + 4096)));
  return btoa(parts.join(""));
}
