import { describe, expect, it } from "vitest";

import { crc32, npy, npz } from "../src/numbers/npz";
import { escaped, wrapped } from "../src/share/drawing";
import { partOf } from "../src/share/maps";
import { csvOf, field, npzOf } from "../src/share/tables";

const text = (x: Uint8Array): string => String.fromCharCode(...x);

describe("arrays for NumPy", () => {
  it("have a header that ends at a multiple of 64 bytes", () => {
    for (const shape of [[6], [2, 3], [1, 6]]) {
      const made = npy({ data: Float32Array.of(1, 2, 3, 4, 5, 6), shape });
      const start = 10 + new DataView(made.buffer).getUint16(8, true);
      expect(start % 64).toBe(0);
      expect(text(made.subarray(0, 8))).toBe("\x93NUMPY\x01\x00");
      expect(text(made.subarray(10, start))).toMatch(
        /^\{'descr': '<f4', 'fortran_order': False, 'shape': \(.*\), \} *\n$/,
      );
      expect([...new Float32Array(made.slice(start).buffer)]).toEqual([1, 2, 3, 4, 5, 6]);
    }
  });
  it("hold texts by code points", () => {
    const made = npy({ data: ["a", "\ud83d\ude00b", ""] });
    const start = 10 + new DataView(made.buffer).getUint16(8, true);
    expect(text(made.subarray(10, start))).toContain("'<U2'");
    expect([...new Uint32Array(made.slice(start).buffer)]).toEqual([97, 0, 0x1f600, 98, 0, 0]);
  });
  it("are in an archive with the sum of each", () => {
    expect(crc32(new TextEncoder().encode("123456789"))).toBe(0xcbf43926);
    const made = npz({ x: { data: Int32Array.of(7), shape: [1] }, y: { data: ["z"] } });
    expect(text(made.subarray(0, 4))).toBe("PK\x03\x04");
    const end = new DataView(made.buffer, made.length - 22);
    expect([end.getUint32(0, true), end.getUint16(8, true)]).toEqual([0x06054b50, 2]);
    const [size, start] = [end.getUint32(12, true), end.getUint32(16, true)];
    expect(start + size + 22).toBe(made.length);
    expect(text(made.subarray(start, start + 4))).toBe("PK\x01\x02");
  });
});

describe("tables", () => {
  const table = {
    part: { r0: 5, r1: 6, c0: 2, c1: 5 },
    weights: Float32Array.of(0.5, NaN, 0.25),
    sinks: new Float32Array(0),
    query: ['say "hi"\n'],
    key: ["a,b", "c", "=1+1"],
  };
  it("quote what would be read as something else", () => {
    expect(["plain", 'a"b', "a,b", "a\nb"].map(field)).toEqual(["plain", '"a""b"', '"a,b"', '"a\nb"']);
    expect(csvOf(table).split("\r\n")).toEqual([
      "query,query token,key,key token,weight",
      '5,"say ""hi""\n",2,"a,b",0.5',
      '5,"say ""hi""\n",4,=1+1,0.25',
      "",
    ]);
    expect(csvOf({ ...table, query: null, key: null }).split("\r\n")[0]).toBe("query,key,weight");
  });
  it("keep what is hidden in an archive", () => {
    expect(text(npzOf(table))).toContain("query_tokens.npy");
    expect(text(npzOf(table))).toContain("'shape': (1, 3)");
    expect(text(npzOf(table))).not.toContain("columns.npy");
  });
  it("have the learned sink as a column of its own", () => {
    const two = { ...table, part: { ...table.part, r1: 7 }, weights: Float32Array.of(0.5, NaN, 0.25, 0, 0.5, 0.25) };
    const sunk = { ...two, query: null, sinks: Float32Array.of(0.125, 0.0625) };
    expect(csvOf(sunk).split("\r\n")).toEqual([
      "query,key,key token,weight",
      '5,2,"a,b",0.5',
      "5,4,=1+1,0.25",
      "5,sink,,0.125",
      '6,2,"a,b",0',
      "6,3,c,0.5",
      "6,4,=1+1,0.25",
      "6,sink,,0.0625",
      "",
    ]);
    const archive = npzOf(sunk);
    expect(text(archive)).toContain("'shape': (2, 4)");
    const numbers = Float32Array.of(0.5, NaN, 0.25, 0.125, 0, 0.5, 0.25, 0.0625);
    expect(text(archive)).toContain(text(new Uint8Array(numbers.buffer)));
    const names = text(npy({ data: ["2", "3", "4", "sink"] }));
    expect(text(archive)).toContain(names);
  });
});

describe("figures", () => {
  it("hold no markup of users", () => {
    expect(escaped('<script>&"\u0000\ud800')).toBe("&lt;script&gt;&amp;&quot;\\u{0}\\u{d800}");
  });
  it("break captions between words, and words that are longer than a line", () => {
    expect(wrapped("one two three", 7)).toEqual(["one two", "three"]);
    expect(wrapped("a " + "x".repeat(10), 4)).toEqual(["a", "xxxx", "xxxx", "xx"]);
  });
  it("are of the part of a map that is seen, in whole pairs", () => {
    const map = { n_q: 100, n_k: 50 };
    expect(partOf("", map)).toEqual({ r0: 0, r1: 100, c0: 0, c1: 50 });
    expect(partOf("-3,20.5,10.2,70", map)).toEqual({ r0: 0, r1: 21, c0: 10, c1: 50 });
    expect(partOf("a,b", map)).toEqual(partOf("", map));
    expect(partOf("200,300,0,10", map)).toEqual(partOf("", map));
  });
});
