/** Products of matrices: by a kernel of the engine `cpu` as WebAssembly, or by a loop where there is none. */

/** x (n, c) · w (c, m) of any n, c a multiple of 4, m of 8. */
export type Product = (x: Float32Array, c: number, w: Float32Array, m: number) => Float32Array;

interface Exports {
  memory: WebAssembly.Memory;
  __heap_base: WebAssembly.Global<"i32">;
  product(fields: number): void;
}

const PAGE = 65536;
/** Rows that the kernel computes together. */
const ROWS = 4;
const FIELDS_BYTES = 64;

/** The product that a module computes; the loop where there is no module, or this browser does not take it. */
export function productBy(module: ArrayBuffer | undefined): Product {
  if (!module) return looped;
  try {
    // The module has 1 kB: compiling it does not hold the page up.
    return called(new WebAssembly.Instance(new WebAssembly.Module(module)).exports as unknown as Exports);
  } catch {
    return looped;
  }
}

function called({ memory, __heap_base, product }: Exports): Product {
  const fields: number = __heap_base.value;
  const a = fields + FIELDS_BYTES;
  return (x, c, w, m) => {
    const n = x.length / c;
    const rows = Math.ceil(n / ROWS) * ROWS; // of those beyond n nothing is used
    const b = a + 4 * rows * c;
    const y = b + 4 * w.length;
    const missing = y + 4 * rows * m - memory.buffer.byteLength;
    if (missing > 0) memory.grow(Math.ceil(missing / PAGE));
    new BigInt64Array(memory.buffer, fields, 6).set([a, b, y, rows, c, m].map(BigInt));
    const floats = new Float32Array(memory.buffer);
    floats.set(x, a / 4);
    floats.set(w, b / 4);
    product(fields);
    return floats.slice(y / 4, y / 4 + n * m);
  };
}

/** Two rows and four terms at a time. */
export const looped: Product = (x, c, w, m) => {
  const n = x.length / c;
  const y = new Float32Array(n * m);
  for (let i = 0; i < n; i += 2) {
    const two = i + 1 < n ? 1 : 0; // the last row of an odd number is computed twice
    const p = i * c;
    const r = p + two * c;
    const s = i * m;
    const t = s + two * m;
    for (let a = 0; a < c; a += 4) {
      const x0 = x[p + a];
      const x1 = x[p + a + 1];
      const x2 = x[p + a + 2];
      const x3 = x[p + a + 3];
      const z0 = x[r + a];
      const z1 = x[r + a + 1];
      const z2 = x[r + a + 2];
      const z3 = x[r + a + 3];
      for (let j = 0, at = a * m; j < m; j++, at++) {
        const w0 = w[at];
        const w1 = w[at + m];
        const w2 = w[at + 2 * m];
        const w3 = w[at + 3 * m];
        const sum = y[s + j] + x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3;
        y[t + j] += z0 * w0 + z1 * w1 + z2 * w2 + z3 * w3; // of a lone row, what is written next
        y[s + j] = sum;
      }
    }
  }
  return y;
};
