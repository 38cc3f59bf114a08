/** NumPy's archive of arrays, as `numpy.load` reads it: .npy files in a zip that is not compressed. */

export type NpyArray = { data: Float32Array | Int32Array; shape: readonly number[] } | { data: readonly string[] };

const ENCODER = new TextEncoder();

/** Version 1.0 of the format: a magic, the length of the header, a dictionary of Python, the numbers. */
export function npy(array: NpyArray): Uint8Array<ArrayBuffer> {
  const text = !ArrayBuffer.isView(array.data);
  const width = text ? Math.max(1, ...(array.data as readonly string[]).map((x) => Array.from(x).length)) : 4;
  const shape = "shape" in array ? array.shape : [array.data.length];
  const kind = text ? `<U${width}` : array.data instanceof Float32Array ? "<f4" : "<i4";
  const axes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const start = `{'descr': '${kind}', 'fortran_order': False, 'shape': (${axes}), }`;
  const room = 64 - ((10 + start.length + 1) % 64);
  const header = ENCODER.encode(`\x93NUMPY\x01\x00..${start}${" ".repeat(room % 64)}\n`).subarray(1); // \x93 is two bytes
  header[0] = 0x93;
  new DataView(header.buffer, header.byteOffset).setUint16(8, header.length - 10, true);
  const body = text ? letters(array.data as readonly string[], width) : bytes(array.data as Float32Array);
  return joined([header, body]);
}

/** Numbers as they travel: little endian, which every platform of this page is. */
const bytes = (x: Float32Array | Int32Array): Uint8Array => new Uint8Array(x.buffer, x.byteOffset, x.byteLength);

function letters(texts: readonly string[], width: number): Uint8Array {
  const out = new Uint32Array(texts.length * width);
  texts.forEach((text, k) => Array.from(text).forEach((c, n) => (out[k * width + n] = c.codePointAt(0) ?? 0)));
  return new Uint8Array(out.buffer);
}

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  let c = n;
  for (let k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ (c >>> 1) : c >>> 1;
  return c;
});

export function crc32(data: Uint8Array): number {
  let c = 0xffffffff;
  for (const byte of data) c = TABLE[(c ^ byte) & 0xff] ^ (c >>> 8);
  return (c ^ 0xffffffff) >>> 0;
}

export function npz(arrays: Readonly<Record<string, NpyArray>>): Uint8Array<ArrayBuffer> {
  const parts: Uint8Array[] = [];
  const directory: Uint8Array[] = [];
  let at = 0;
  for (const [name, array] of Object.entries(arrays)) {
    const [file, data] = [ENCODER.encode(`${name}.npy`), npy(array)];
    // Version, flags (names in UTF-8), no compression, 1 January 1980, sum, sizes, length of the name, nothing more.
    const fields = (extra: number): DataView => {
      const view = new DataView(new ArrayBuffer(26));
      view.setUint16(0, 20, true);
      view.setUint16(2, 0x800, true);
      view.setUint16(8, 0x21, true);
      view.setUint32(10, crc32(data), true);
      view.setUint32(14, data.length, true);
      view.setUint32(18, data.length, true);
      view.setUint16(22, file.length, true);
      view.setUint16(24, extra, true);
      return view;
    };
    const local = joined([Uint8Array.of(0x50, 0x4b, 3, 4), new Uint8Array(fields(0).buffer), file, data]);
    const place = new DataView(new ArrayBuffer(14));
    place.setUint32(10, at, true);
    directory.push(
      joined([
        Uint8Array.of(0x50, 0x4b, 1, 2, 20, 0),
        new Uint8Array(fields(0).buffer),
        new Uint8Array(place.buffer),
        file,
      ]),
    );
    parts.push(local);
    at += local.length;
  }
  const central = joined(directory);
  const end = new DataView(new ArrayBuffer(22));
  end.setUint32(0, 0x06054b50, true);
  end.setUint16(8, parts.length, true);
  end.setUint16(10, parts.length, true);
  end.setUint32(12, central.length, true);
  end.setUint32(16, at, true);
  return joined([...parts, central, new Uint8Array(end.buffer)]);
}

function joined(parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}
