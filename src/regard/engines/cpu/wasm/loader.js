// Exact attention in a web page or in Node.js: softmax(score(scale · q kᵀ) + bias) v, in memory of O(n).
//
//     import { load } from "./NAME.js";
//     const attention = await load("NAME.wasm");
//     const { out, lse } = attention({ q, k, v, heads: 8, d: 64 });
//     const part = attention.weights({ q, k, lse, d: 64, rows: [0, 9], cols: [0, 9] }); // of one head, with maps=True
//
// Written by regard.export_wasm. The module holds the kernels, and a description of what they take. Here a call is
// checked, its tiles are listed, and the kernels run, a few query blocks at a time. NAME.d.ts says what a call takes.
//
// Words: a query block is some rows that use keys together; a tile is a query block against 128 keys. A launch computes
// some query blocks of the same keys. Each has a record: where its rows are, and where its list of tiles begins. A
// kernel has one argument, the address of its fields: 64-bit words, in the order of their names.

const VERSION = 5; // of the description
const PAGE = 65536;
const WORD = 8; // bytes of a field, and of an entry of a list of tiles
const SHARED = ["k", "v"]; // arrays that the heads of a group share, and all rows
const OF_HEAD = ["q", "k", "d", "scale", "offset"];
const OF_ALL = [...OF_HEAD, "v", "dV", "heads", "kvHeads", "batch"];
// What a call may give if the module was exported so, and the option of regard.export_wasm.
const EXPORTED = { bias: "bias", mask: "array_mask", sink: "sink", dropout: "dropout", seed: "dropout" };
// A module that has an instruction on vectors.
const SIMD = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11,
];

/** Load a module, from its address or its bytes. */
export async function load(source) {
  const there = typeof WebAssembly === "object";
  need(there, "attention needs WebAssembly, which this browser lacks or forbids", Error);
  const simd = WebAssembly.validate(new Uint8Array(SIMD));
  need(simd, "attention needs WebAssembly with SIMD, which this browser lacks", Error);
  const module = source instanceof WebAssembly.Module ? source : await compiled(await bytesOf(source));
  const [text] = WebAssembly.Module.customSections(module, "regard");
  need(text, "this module was not written by regard.export_wasm", Error);
  const about = JSON.parse(new TextDecoder().decode(text));
  need(about.version === VERSION, `this loader reads modules of version ${VERSION}, got ${about.version}`, Error);
  const { exports } = await WebAssembly.instantiate(module, {});
  const [tables] = WebAssembly.Module.customSections(module, "regard.tables");
  return attentionOf(withTables(about, exports, tables));
}

async function bytesOf(source) {
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return source;
  const response = source instanceof Response ? source : await fetch(source);
  need(response.ok, `${response.url} could not be read: ${response.status} ${response.statusText}`, Error);
  return response.arrayBuffer();
}

async function compiled(bytes) {
  try {
    return await WebAssembly.compile(bytes);
  } catch (error) {
    throw new Error(`this browser does not take the module: ${error.message}`, { cause: error });
  }
}

/** Copy the tables of the rules to the start of free memory, where they stay. */
function withTables(about, exports, tables) {
  const start = exports.__heap_base.value;
  const free = start + tables.byteLength;
  reserve(exports.memory, free);
  new Uint8Array(exports.memory.buffer, start).set(new Uint8Array(tables));
  const rules = Object.fromEntries(Object.entries(about.values).map(([name, word]) => [name, BigInt(word)]));
  for (const [name, place] of Object.entries(about.tables)) rules[name] = start + place;
  return { about, exports, rules, free };
}

function attentionOf(module) {
  const { about } = module;
  const attention = (call) => {
    need(about.kernels.length > 0, "this module computes maps of weights, and no attention", Error);
    const c = checked(call, about);
    const found = new Forward(module, c).results();
    return about.sums ? { ...found, ...new Sums(module, c, found.lse).results() } : found;
  };
  const ofHead = (compute) => (call) => {
    need(about.maps, "this module has no maps: it was exported without maps=True", Error);
    return compute(call);
  };
  const maps = ofHead((call) => new Maps(module, checkedHead(call, about)).results());
  const weights = ofHead((call) => {
    const c = checkedHead(call, about, { ranges: true });
    return new Maps(module, { ...c, rows: singles(c.rows), cols: singles(c.cols) }).results().mass;
  });
  const scores = ofHead((call) => scoresOf(module, checkedHead(call, about, { ranges: true, lse: false })));
  return Object.assign(attention, { maps, weights, scores });
}

/** Return the bytes of an array with these axes, and those from an entry of each axis to the next. */
function layout(shape, bytes, broadcast = false) {
  const strides = [];
  let size = bytes;
  for (let axis = shape.length - 1; axis >= 0; axis--) {
    strides[axis] = broadcast && shape[axis] === 1 ? 0 : size;
    size *= shape[axis];
  }
  return { size, strides };
}

/** Return the layouts of a call's arrays, of axes (batch, heads, rows, columns), by the names that kernels use. */
function layouts(c) {
  const made = { q: layout([c.batch, c.heads, c.nQ, c.d], 4), k: layout([c.batch, c.kvHeads, c.nK, c.d], 4) };
  if (c.v) made.v = layout([c.batch, c.kvHeads, c.nK, c.dV], 4);
  if (c.lse) made.lse = layout([c.batch, c.heads, c.nQ, 1], 4);
  if (c.bias) made.bias = layout(c.bias.shape, 4, true);
  if (c.mask) made.dense0 = layout(c.mask.shape, 1, true);
  return made;
}

/** The memory of a call: arrays by their names, after the tables of the rules. */
class Memory {
  /** Throws where the page may not have so much. */
  constructor({ exports, free }, sizes) {
    this.at = {}; // addresses
    let end = free;
    for (const [name, size] of Object.entries(sizes)) {
      this.at[name] = Math.ceil(end / 64) * 64;
      end = this.at[name] + size;
    }
    reserve(exports.memory, end);
    this.buffer = exports.memory.buffer;
    this.floats = new Float32Array(this.buffer);
    this.reals = new Float64Array(this.buffer);
    this.integers = new BigInt64Array(this.buffer);
  }

  /** Copy the arrays that a call gives. */
  write({ q, k, v, lse, bias, mask, sink }) {
    const given = { q, k, v, lse, bias: bias?.data, dense0: mask?.data, sink };
    for (const [name, array] of Object.entries(given)) {
      if (array) new array.constructor(this.buffer, this.at[name], array.length).set(array);
    }
  }

  /** Set the fields at an address by their names, those without a value to 0. reals: those that are no integers. */
  setFields(address, names, values, reals = {}) {
    const start = address / WORD;
    names.forEach((name, n) => {
      this.integers[start + n] = BigInt(values[name] ?? 0);
    });
    for (const [name, x] of Object.entries(reals)) this.reals[start + names.indexOf(name)] = x;
  }

  /** Return a copy of `count` floats. */
  numbers(name, count) {
    return this.floats.slice(this.at[name] / 4, this.at[name] / 4 + count);
  }
}

/** Fields: the strides of arrays. */
function stridesOf(arrays) {
  const made = {};
  for (const [name, { strides }] of Object.entries(arrays)) {
    const [, head, row, column] = strides;
    Object.assign(made, { [`${name}_head`]: head, [`${name}_row`]: row });
    Object.assign(made, { [`${name}_feature`]: column, [`${name}_key`]: column });
  }
  return made;
}

/** A call of one kernel. */
class Run extends Memory {
  /**
   * arrays: layouts of those that query blocks have a part of. others: bytes of further ones that the kernel knows by
   * a field. most: query blocks of a launch.
   */
  constructor(module, c, kernel, most, arrays, others = {}) {
    const { multiple, group, block } = kernel.scratch;
    const features = [1, ...[c.d, c.dV].map((x) => Math.ceil(x / multiple) * multiple)];
    const { keys, splitBytes, splitTiles } = module.about.tile;
    const tiles = Math.ceil(c.nK / keys);
    super(module, {
      ...Object.fromEntries(Object.entries(arrays).map(([name, { size }]) => [name, size])),
      ...others,
      fields: WORD * kernel.fields.length,
      listing: WORD * (kernel.visible?.fields.length ?? 0),
      bases: WORD * kernel.blockFields.length,
      blocks: WORD * most * kernel.blockFields.length,
      tiles: WORD * tiles * (kernel.visible ? most : 1),
      work_groups: 2 * WORD,
      taken: WORD,
      scratch: features.reduce((sum, x, n) => sum + x * (group[n] + most * block[n]), 0),
    });
    Object.assign(this, { ...module, c, kernel, most, arrays, tiles });
    this.strides = stridesOf(arrays);
    // Keys are cut into splits of 2^split_bits tiles, whose keys and values fill half of a cache. Bits depend on it.
    const fit = Math.floor(splitBytes / (keys * 2 * c.d * 4));
    const numbers = {
      ...{ count: 1, d: c.d, d_v: c.dV, n_k: c.nK, keys: c.nK, row_head: c.nQ },
      ...{ threshold: Math.floor(c.dropout * 2 ** 32), seed: c.seed },
      split_bits: Math.floor(Math.log2(Math.min(Math.max(1, fit), splitTiles))),
    };
    const reals = { scale: c.scale, keep_scale: Math.fround(1 / (1 - c.dropout)) };
    this.setFields(this.at.fields, kernel.fields, { ...this.rules, ...this.at, ...this.strides, ...numbers }, reals);
    this.write(c);
    // Whether lists of tiles differ by batch element and by head, and which of them are in memory.
    const { maskReads } = this.about;
    const [batch, head] = arrays.dense0?.strides ?? [0, 0];
    const moved = c.offsets.some((x) => x !== c.offsets[0]);
    this.listsDiffer = { b: maskReads.includes("b") || batch > 0 || moved, h: maskReads.includes("h") || head > 0 };
    this.listed = null;
  }

  /** Compute query blocks, [row, rows, part], of `count` heads from h on. own: further fields of a block. */
  launch(b, h, count, blocks, own = () => ({})) {
    const { c, at, kernel, arrays } = this;
    const bases = {};
    for (const name in arrays) {
      const [batch, head] = arrays[name].strides;
      bases[name] = at[name] + b * batch + (SHARED.includes(name) ? Math.floor(h / c.group) : h) * head;
    }
    this.setFields(at.bases, kernel.blockFields, bases);
    blocks.forEach(([row, rows, part], n) => {
      const [tiles, length] = this.spans[n];
      const i = row + c.offsets[b];
      const record = { b: c.b + b, h: c.h + h, head: h, i, row, rows, lanes: rows * count, tiles, count: length };
      for (const name in arrays) record[name] = SHARED.includes(name) ? 0 : row * arrays[name].strides[2];
      Object.assign(record, own(row, part));
      this.setFields(at.blocks + WORD * n * kernel.blockFields.length, kernel.blockFields, record);
    });
    this.integers[at.work_groups / WORD] = 0n;
    this.integers[at.work_groups / WORD + 1] = BigInt(blocks.length);
    this.integers[at.taken / WORD] = 0n;
    this.exports[kernel.name](at.fields);
  }

  /** List the tiles of query blocks among keys [from, to), `spans`: where each list begins, and its length. */
  list(b, h, blocks, from = 0, to = this.c.nK) {
    const { c, at, integers, rules, strides } = this;
    const { visible } = this.kernel;
    const { keys, shift, full } = this.about.tile;
    const lists = at.tiles / WORD;
    const first = Math.floor(from / keys);
    if (!visible) {
      const count = Math.max(0, Math.ceil(to / keys) - first);
      for (let n = 0; n < count; n++) integers[lists + n] = (BigInt(first + n) << BigInt(shift)) | BigInt(full);
      this.spans = blocks.map(() => [0, count]);
      return;
    }
    const wanted = [this.listsDiffer.b ? b : 0, this.listsDiffer.h ? h : 0, blocks[0][0]].join();
    if (this.listed === wanted) return;
    this.listed = wanted;
    this.spans = [];
    const least = BigInt(first) << BigInt(shift);
    const mask = this.arrays.dense0?.strides ?? [0, 0, 0];
    let end = lists;
    for (const [row, rows] of blocks) {
      this.setFields(at.listing, visible.fields, {
        ...{ ...rules, ...strides, b: c.b + b, h: c.h + h, i: row + c.offsets[b], rows, n_k: to, keys: c.nK },
        ...{ tiles: WORD * end, dense0: (at.dense0 ?? 0) + b * mask[0] + h * mask[1] + row * mask[2] },
      });
      this.exports[visible.name](at.listing);
      let start = end;
      end += Number(integers[at.listing / WORD + visible.fields.indexOf("count")]);
      while (start < end && integers[start] < least) start++;
      this.spans.push([start - lists, end - start]);
    }
  }
}

/** A call of attention. */
class Forward extends Run {
  constructor(module, c) {
    const { kernels, statistics, best, workGroup } = module.about;
    // With few rows a lane is a key, else a query.
    const [prefill, ...decode] = kernels; // those for fewer rows first
    const kernel = decode.find((x) => c.nQ * c.group <= x.rows) ?? prefill;
    const rows = Math.max(1, Math.min(c.nQ, kernel.lanes)); // of a query block
    const ofQueries = (columns, bytes) => layout([c.batch, c.heads, c.nQ, columns], bytes);
    const outputs = { out: ofQueries(c.dV, 4), lse: ofQueries(1, 4) };
    for (const name of ["entropy", "max"]) if (statistics.includes(name)) outputs[name] = ofQueries(1, 4);
    if (best) Object.assign(outputs, { values: ofQueries(best, 4), indices: ofQueries(best, 8) });
    const most = Math.min(workGroup, Math.ceil(c.nQ / rows));
    super(module, c, kernel, most, { ...layouts(c), ...outputs }, c.sink ? { sink: 4 * c.heads } : {});
    Object.assign(this, { rows, outputs });
    // Heads with the same keys share a query block where their rows fit, and the mask is the same.
    const fit = Math.floor((kernel.rows || kernel.lanes) / rows);
    this.headsTogether = this.listsDiffer.h ? 1 : Math.max(1, Math.min(c.group, fit));
  }

  results() {
    const { c, rows, most, headsTogether: step } = this;
    for (let first = 0; first < c.nQ; first += most * rows) {
      const starts = Array.from({ length: most }, (_, n) => first + n * rows).filter((row) => row < c.nQ);
      const blocks = starts.map((row) => [row, Math.min(rows, c.nQ - row)]);
      for (let b = 0; b < c.batch; b++) {
        for (let h = 0, count; h < c.heads; h += count) {
          count = Math.min(step, c.group - (h % c.group));
          this.list(b, h, blocks);
          this.launch(b, h, count, blocks);
        }
      }
    }
    return this.found();
  }

  found() {
    const { c, outputs } = this;
    const { statistics, best, top } = this.about;
    const queries = c.batch * c.heads * c.nQ;
    const found = {};
    for (const name of ["out", "lse", "entropy", "max"]) {
      if (outputs[name]) found[name] = this.numbers(name, outputs[name].size / 4);
    }
    // The first k of each query's `best` largest weights.
    const largest = (Kind, of, name, k) => {
      const start = this.at[name] / of.BYTES_PER_ELEMENT;
      return Kind.from({ length: queries * k }, (_, n) => Number(of[start + Math.floor(n / k) * best + (n % k)]));
    };
    if (statistics.includes("argmax")) found.argmax = largest(Int32Array, this.integers, "indices", 1);
    if (statistics.includes("top")) {
      const values = largest(Float32Array, this.floats, "values", top);
      found.top = { values, indices: largest(Int32Array, this.integers, "indices", top) };
    }
    return found;
  }
}

/** The second pass, from lse to what is summed over queries. */
class SecondPass extends Run {
  /** Set arrays to 0, which kernels add to. */
  clear(...names) {
    for (const name of names) new Uint8Array(this.buffer, this.at[name], this.arrays[name].size).fill(0);
  }

  /**
   * Query blocks that are computed together, [row, rows, part], in the engine's order, on which bits of sums depend.
   *
   * edges: those of the parts of a head's rows, each of which is summed by itself.
   */
  *workGroups(edges) {
    const { lanes, workGroup, band } = this.kernel;
    const blocks = [];
    for (let part = 0; part + 1 < edges.length; part++) {
      const stop = edges[part + 1];
      for (let row = edges[part]; row < stop; row += lanes) blocks.push([row, Math.min(lanes, stop - row), part]);
    }
    // With rules that hide, later rows come first, some blocks at a time.
    const backwards = band > 0 && this.tiles > 1;
    const size = backwards ? band : blocks.length;
    for (let stop = blocks.length; stop > 0; stop -= size) {
      const some = blocks.slice(Math.max(0, stop - size), stop);
      if (backwards) some.reverse();
      for (let part = 0; part + 1 < edges.length; part++) {
        const own = some.filter((block) => block[2] === part);
        for (let n = 0; n < own.length; n += workGroup) yield own.slice(n, n + workGroup);
      }
    }
  }
}

/** Return the edges of the parts of rows [first, last); bins: edges of bins, which then are among them. */
function partEdges(kernel, heads, first, last, bins = null) {
  const most = Math.floor(kernel.parts / Math.max(1, heads));
  const number = Math.max(1, Math.min(most, Math.floor((last - first) / (8 * kernel.lanes))));
  const even = Array.from({ length: number }, (_, n) => first + Math.trunc(n * ((last - first) / number)));
  return [...new Set([...(bins ? even.map((row) => bins.find((edge) => edge >= row)) : even), last])];
}

/** Counts of visible keys, received weight and weight by distance, of every head of a call. */
class Sums extends SecondPass {
  constructor(module, call, lse) {
    const c = { ...call, lse, v: null, dV: 0, sink: null };
    const { sums } = module.about;
    const { keys } = module.about.tile;
    const edges = partEdges(sums, c.batch * c.heads, 0, c.nQ);
    const lengths = { received: Math.ceil(c.nK / keys) * keys, profile: c.nQ + c.nK + 2 * keys + sums.lanes };
    const partials = (name) => ({ size: 4 * (edges.length - 1) * lengths[name], strides: [0, 0, 0, 0] });
    super(module, c, sums, sums.workGroup, {
      ...layouts(c),
      visible: layout([c.batch, c.heads, c.nQ, 1], 8),
      received: partials("received"),
      profile: partials("profile"),
    });
    Object.assign(this, { edges, lengths });
  }

  results() {
    const { c, at, integers } = this;
    const heads = c.batch * c.heads;
    const start = at.visible / WORD;
    this.clear("visible");
    const found = { received: new Float32Array(heads * c.nK), profile: new Float32Array(heads * c.diagonals) };
    for (let head = 0; head < heads; head++) {
      this.head(Math.floor(head / c.heads), head % c.heads);
      found.received.set(this.total("received", 0, c.nK), head * c.nK);
      found.profile.set(this.total("profile", this.about.tile.keys, c.diagonals), head * c.diagonals);
    }
    found.visible = Int32Array.from({ length: heads * c.nQ }, (_, n) => Number(integers[start + n]));
    return Object.fromEntries(this.kernel.statistics.map((name) => [name, found[name]]));
  }

  /** Sum over the queries of a head. */
  head(b, h) {
    const { c, lengths } = this;
    this.clear("received", "profile");
    const place = (row, part) => ({
      received: 4 * part * lengths.received,
      profile: 4 * (part * lengths.profile + row + c.nK - 1 + this.about.tile.keys),
    });
    for (const blocks of c.nK ? this.workGroups(this.edges) : []) {
      this.list(b, h, blocks);
      this.launch(b, h, 1, blocks, place);
    }
  }

  /** Return the sum of the parts of a statistic, `count` numbers from `first` on. */
  total(name, first, count) {
    const sums = new Float32Array(count);
    for (let part = 0; part + 1 < this.edges.length; part++) {
      const from = this.at[name] / 4 + part * this.lengths[name] + first;
      for (let n = 0; n < count; n++) sums[n] += this.floats[from + n];
    }
    return sums;
  }
}

/** Maps of the weights of one head: sums, maxima, and what is visible, by bins of queries and keys. */
class Maps extends SecondPass {
  constructor(module, c) {
    // Keys before and after those of the bins fall into a bin at either end.
    const edges = [0, ...c.cols, c.nK];
    const width = edges.length - 1;
    const map = { size: 4 * width * (c.rows.length - 1), strides: [0, 0, 0, 0] };
    const tiles = Math.ceil(c.nK / module.about.tile.keys);
    const bins = { row_bins: WORD * (c.nQ + 1), tile_bins: WORD * tiles, edges: WORD * edges.length };
    const kernel = module.about.maps;
    super(module, c, kernel, kernel.workGroup, { ...layouts(c), mass: map, max_map: map, seen_map: map }, bins);
    Object.assign(this, { edges, width });
  }

  results() {
    const { c, at, integers, width, edges } = this;
    const { rows, cols } = c;
    this.clear("mass", "max_map", "seen_map");
    const bins = at.row_bins / WORD;
    integers.fill(-1n, bins, bins + c.nQ + 1);
    for (let r = 0; r + 1 < rows.length; r++) integers.fill(BigInt(r * width), bins + rows[r], bins + rows[r + 1]);
    edges.forEach((edge, n) => (integers[at.edges / WORD + n] = BigInt(edge)));
    for (let tile = 0, bin = 0; tile < this.tiles; tile++) {
      while (edges[bin + 1] <= tile * this.about.tile.keys) bin++;
      integers[at.tile_bins / WORD + tile] = BigInt(bin);
    }
    for (const blocks of this.workGroups(partEdges(this.kernel, 1, rows[0], rows.at(-1), rows))) {
      this.list(0, 0, blocks, cols[0], cols.at(-1));
      this.launch(0, 0, 1, blocks);
    }
    return this.found();
  }

  /** The maps without the bins at either end, mass as the mean over queries. */
  found() {
    const { c, at, floats, width } = this;
    const { rows, cols } = c;
    const [height, inner] = [rows.length - 1, cols.length - 1];
    const map = (name, of = (x) => x) => {
      const whole = new Float32Array(height * inner);
      for (let r = 0; r < height; r++) {
        const from = at[name] / 4 + r * width + 1;
        for (let n = 0; n < inner; n++) whole[r * inner + n] = of(floats[from + n], r);
      }
      return whole;
    };
    return {
      mass: map("mass", (x, r) => x / (rows[r + 1] - rows[r])),
      max: map("max_map"),
      seen: Uint8Array.from(map("seen_map")),
    };
  }
}

/** Return the scores of some queries of one head on some keys, before and after the mask. */
function scoresOf(module, c) {
  const { about, exports, rules } = module;
  const [i, j] = [c.rows[0], c.cols[0]];
  const [rows, cols] = [c.rows[1] - i, c.cols[1] - j];
  const arrays = layouts(c);
  const names = Object.keys(arrays);
  const bytes = 4 * rows * cols;
  const sizes = Object.fromEntries(names.map((name) => [name, arrays[name].size]));
  const memory = new Memory(module, { ...sizes, unmasked: bytes, masked: bytes, fields: WORD * about.scores.length });
  memory.write(c);
  const { at } = memory;
  const start = (name, row, col) => at[name] + row * arrays[name].strides[2] + col * arrays[name].strides[3];
  const starts = { ...at, q: start("q", i, 0), k: start("k", j, 0) };
  for (const name of ["bias", "dense0"]) if (arrays[name]) starts[name] = start(name, i, j);
  const numbers = { d: c.d, b: c.b, h: c.h, i: i + c.offsets[0], j, rows, cols, keys: c.nK };
  const values = { ...rules, ...starts, ...stridesOf(arrays), ...numbers };
  memory.setFields(at.fields, about.scores, values, { scale: c.scale });
  exports.scores(at.fields);
  return { unmasked: memory.numbers("unmasked", rows * cols), masked: memory.numbers("masked", rows * cols) };
}

/** Grow the memory to hold `end` bytes. Throws where the page may not have so much. */
function reserve(memory, end) {
  const more = Math.ceil((end - memory.buffer.byteLength) / PAGE);
  if (more <= 0) return;
  try {
    memory.grow(more);
  } catch (error) {
    const size = Math.ceil(end / 2 ** 20);
    throw new RangeError(`this call of attention takes ${size} MiB, more than this page may have`, { cause: error });
  }
}

function need(condition, message, Kind = RangeError) {
  if (!condition) throw new Kind(message);
}

/** Return a value as errors tell it. */
function shown(x) {
  if (typeof x === "object" && x !== null) return x.constructor?.name ?? "an object";
  return typeof x === "string" ? JSON.stringify(x) : String(x);
}

/**
 * Return a call's arrays, sizes and options. Throws TypeError or RangeError for one that makes no sense.
 *
 * head: it is about one head, and what it takes in addition; b, h: that head, as rules read it.
 */
function checked(call, about, head = null, b = 0, h = 0) {
  const given = Object.fromEntries(Object.entries(call ?? {}).filter(([, value]) => value !== undefined));
  const exported = head ? ["bias", "mask"] : Object.keys(EXPORTED);
  const takes = (name) => about.takes.includes(EXPORTED[name]);
  const names = [...(head ? [...OF_HEAD, ...head] : OF_ALL), ...exported.filter(takes)];
  const unknown = Object.keys(given).find((name) => !names.includes(name));
  if (exported.includes(unknown)) {
    throw new TypeError(`this module takes no ${unknown}: it was exported without ${EXPORTED[unknown]}=True`);
  }
  need(unknown === undefined, `a call takes ${names.join(", ")}, and no ${unknown}`, TypeError);
  const floats = (name) => {
    const x = given[name];
    need(x instanceof Float32Array, `${name} must be a Float32Array, got ${shown(x)}`, TypeError);
    return x;
  };
  const whole = (name, most, otherwise) => {
    const { [name]: x = otherwise } = given;
    const fits = Number.isInteger(x) && x >= 1 && x <= most;
    need(fits, `${name} must be an integer from 1 to ${most}, got ${shown(x)}`);
    return x;
  };
  const [q, k, v] = ["q", "k", ...(head ? [] : ["v"])].map(floats);
  const { features, positions, indices } = about;
  const d = whole("d", features);
  const heads = whole("heads", indices, 1);
  const kvHeads = whole("kvHeads", indices, heads);
  const batch = whole("batch", indices, 1);
  need(heads % kvHeads === 0, `heads must be a multiple of kvHeads, got ${heads} and ${kvHeads}`);
  const rowsOf = (name, array, each, meaning) => {
    const rows = array.length / each;
    need(Number.isInteger(rows), `${name} must hold a multiple of ${meaning} = ${each} numbers, got ${array.length}`);
    return rows;
  };
  const nQ = rowsOf("q", q, batch * heads * d, "batch · heads · d");
  const nK = rowsOf("k", k, batch * kvHeads * d, "batch · kvHeads · d");
  need(nQ <= positions && nK <= positions, `a call has at most ${positions} queries and keys, got ${nQ} and ${nK}`);
  const values = v ? rowsOf("v", v, batch * kvHeads * Math.max(1, nK), "batch · kvHeads · keys") : 0;
  const dV = nK || !v ? values : whole("dV", features, d);
  need(dV <= features, `v must have at most ${features} features, got ${dV}`);

  const { offset = nK - nQ, scale = 1 / Math.sqrt(d), dropout = 0, seed = 0 } = given;
  const offsets = offsetsOf(offset, batch, positions);
  need(typeof scale === "number" && Number.isFinite(Math.fround(scale)), `scale must be finite in float32, got ${shown(scale)}`);
  const [first, last] = [Math.min(...offsets), Math.max(...offsets)];
  const ranges = { b: [b, b + batch], h: [h, h + heads], i: [first, last + nQ], j: [0, nK] };
  for (const [rule, argument, axis, length] of about.requires) {
    const [low, high] = ranges[axis];
    const anyIndex = "bh".includes(axis) && length === 1;
    const outside = low < 0 ? low : high - 1;
    const covered = low >= high || anyIndex || (low >= 0 && high <= length);
    need(covered, `${argument} of ${rule} covers ${axis} from 0 to ${length - 1}, but this call has ${outside}`);
  }
  for (const [rule, argument, axis, length] of head ? [] : about.ends) {
    const end = ranges[axis][1];
    need(length <= end, `${argument} of ${rule} covers ${axis} from 0 to ${length - 1}, but this call ends at ${end - 1}`);
  }
  for (const [rule, axis, table, length] of "offset" in given || !nK || nK === nQ ? [] : about.readByQuery) {
    const by = `is row + n_k - n_q = row + ${nK - nQ}, but it has an entry for each of the ${nQ} rows`;
    const cures = "give offset=0, by which i is the row, or table(..., bounds='clamp') to read its nearest entry";
    need(length !== nQ, `${rule} reads axis ${axis} of a ${table} at i, which ${by}: ${cures}`);
  }

  const axes = [batch, heads, nQ, nK];
  const bias = takes("bias") ? ofPairs("bias", given.bias, Float32Array, axes) : null;
  const mask = takes("mask") ? ofPairs("mask", given.mask, Uint8Array, axes) : null;
  need(!mask || mask.data.every((x) => x <= 1), "mask must hold 0 and 1");
  let sink = null;
  if (takes("sink") && !head) {
    const one = floats("sink");
    const fits = one.length === 1 || one.length === heads;
    need(fits, `sink must hold one number, or one for each of ${heads} heads, got ${one.length}`);
    sink = Float32Array.from({ length: heads }, (_, n) => one[one.length === 1 ? 0 : n]);
  }
  const share = typeof dropout === "number" && dropout >= 0 && dropout < 1;
  need(share, `dropout must be a number in [0, 1), got ${shown(dropout)}`);
  need(!dropout || "seed" in given, `dropout ${dropout} needs a seed: the same seed drops the same weights everywhere`);
  const counts = typeof seed === "bigint" ? seed >= 0n && seed < 2n ** 64n : Number.isSafeInteger(seed) && seed >= 0;
  need(counts, `seed must be an integer in [0, 2^64), a BigInt from 2^53 on, got ${shown(seed)}`);
  return {
    ...{ q, k, v, bias, mask, sink, dropout, seed, scale, offsets, b, h },
    ...{ d, dV, heads, kvHeads, group: heads / kvHeads, batch, nQ, nK, diagonals: nQ && nK && nQ + nK - 1 },
  };
}

/** Return the offset of each batch element. */
function offsetsOf(given, batch, most) {
  const offsets = typeof given === "number" ? new Array(batch).fill(given) : Array.from(given ?? []);
  const fits = offsets.length === batch;
  need(fits, `offset must be one integer, or one for each of ${batch} batch elements, got ${offsets.length}`);
  for (const x of offsets) {
    const near = Number.isInteger(x) && Math.abs(x) <= most;
    need(near, `offset must be an integer of at most ${most}, got ${shown(x)}`);
  }
  return offsets;
}

/** Return an array { data, shape } that broadcasts to these axes, as in NumPy; its shape with all of them. */
function ofPairs(name, given, Kind, axes) {
  const { data, shape } = given ?? {};
  const wanted = `${name} must be { data: ${Kind.name}, shape: number[] }`;
  need(data instanceof Kind && Array.isArray(shape), `${wanted}, got ${shown(given)}`, TypeError);
  const whole = [...new Array(Math.max(0, 4 - shape.length)).fill(1), ...shape];
  const fits = whole.length === 4 && whole.every((x, axis) => x === 1 || x === axes[axis]);
  need(fits, `shape of ${name} must broadcast to (${axes.join(", ")}), got (${shape.join(", ")})`);
  const count = whole.reduce((product, x) => product * x, 1);
  need(data.length === count, `${name} must hold ${count} numbers, as its shape says, got ${data.length}`);
  return { data, shape: whole };
}

/**
 * Return what `checked` does for a call about one head, with its lse, and rows and cols.
 *
 * ranges: rows and cols are [from, to), else edges of bins. lse: the call has one.
 */
function checkedHead(call, about, { ranges = false, lse = true } = {}) {
  const [b, h] = ["b", "h"].map((name) => {
    const x = call?.[name] ?? 0;
    const fits = Number.isInteger(x) && x >= 0 && x < about.indices;
    need(fits, `${name} must be an integer from 0 to ${about.indices - 1}, got ${shown(x)}`);
    return x;
  });
  const c = checked(call, about, ["b", "h", ...(lse ? ["lse"] : []), "rows", "cols"], b, h);
  if (lse) {
    need(call.lse instanceof Float32Array, `lse must be a Float32Array, got ${shown(call.lse)}`, TypeError);
    need(call.lse.length === c.nQ, `lse must have a number for each of ${c.nQ} queries, got ${call.lse.length}`);
  }
  const edges = (name, most) => {
    const x = Array.from(call[name] ?? []);
    const rising = x.every((edge, n) => Number.isInteger(edge) && edge >= 0 && edge <= most && (!n || edge > x[n - 1]));
    const enough = ranges ? x.length === 2 : x.length > 1;
    need(rising && enough, `${name} must be ${ranges ? "two" : "two or more"} rising integers from 0 to ${most}`);
    return x;
  };
  return { ...c, lse: lse ? call.lse : null, rows: edges("rows", c.nQ), cols: edges("cols", c.nK) };
}

/** Return the edges of bins of one position each, from and to two positions. */
function singles([from, to]) {
  return Array.from({ length: to - from + 1 }, (_, n) => from + n);
}
