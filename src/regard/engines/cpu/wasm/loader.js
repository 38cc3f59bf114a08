// Exact attention in a web page or in Node.js: softmax(score(scale · q kᵀ)) v, in memory of O(n).
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
// some query blocks of the same keys. Each has a record: where its rows are, and where its list of tiles begins.

const PAGE = 65536;
const WORD = 8; // bytes of a kernel's field, of a number of a query block, of an entry of a list of tiles
const OPTIONS = ["q", "k", "v", "d", "dV", "heads", "kvHeads", "batch", "scale", "offset"];
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
  need(about.version === 2, `this loader reads modules of version 2, got ${about.version}`, Error);
  const { exports } = await WebAssembly.instantiate(module, {});
  return attentionOf(about, exports, WebAssembly.Module.customSections(module, "regard.tables")[0]);
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

function attentionOf(about, kernels, tables) {
  // The tables of the rules lie at the start of free memory, and stay.
  const tablesAt = kernels.__heap_base.value;
  const free = tablesAt + tables.byteLength;
  reserve(kernels.memory, free);
  new Uint8Array(kernels.memory.buffer, tablesAt).set(new Uint8Array(tables));
  const rules = Object.entries(about.values).map(([name, number]) => [name, BigInt(number)]);
  for (const [name, place] of Object.entries(about.tables)) rules.push([name, BigInt(tablesAt + place)]);

  const attention = (call) => {
    need(about.kernels.length > 0, "this module computes maps of weights, and no attention", Error);
    const c = checked(call, about);
    const found = new Forward(about, kernels, rules, c, free).results(call);
    const sums = about.sums ? new Sums(about, kernels, rules, c, free).results({ ...call, lse: found.lse }) : {};
    return { ...found, ...sums };
  };
  const maps = (call) => {
    need(about.maps, "this module has no maps: it was exported without maps=True", Error);
    return new Maps(about, kernels, rules, checkedMaps(call, about), free).results(call);
  };
  const weights = (call) => {
    const [rows, cols] = [call.rows, call.cols].map((x) => singles(x));
    return maps({ ...call, rows, cols }).mass;
  };
  return Object.assign(attention, { maps, weights });
}

/** The memory of one call, and the lists of its tiles. */
class Run {
  constructor(about, kernels, rules, c, kernel) {
    Object.assign(this, { about, kernels, rules, c, kernel });
    this.tiles = Math.ceil(c.nK / about.tile.keys);
    this.listed = null; // which lists are in memory
  }

  /** Give arrays of these bytes, and what every kernel needs, a place from `free` on. Throws where memory lacks. */
  place(sizes, free, blocks) {
    const { about, c, kernel } = this;
    const { multiple, group, block } = kernel.scratch;
    const features = [1, ...[c.d, c.dV].map((x) => Math.ceil(x / multiple) * multiple)];
    const scratch = features.reduce((sum, x, n) => sum + x * (group[n] + blocks * block[n]), 0);
    const every = {
      ...sizes,
      fields: WORD * kernel.fields.length,
      listing: WORD * (kernel.visible?.fields.length ?? 0),
      bases: WORD * kernel.blockFields.length,
      records: WORD * blocks * kernel.blockFields.length,
      lists: WORD * this.tiles * (kernel.visible ? blocks : 1),
      workGroups: 2 * WORD,
      taken: WORD,
      scratch,
    };
    this.at = {};
    let end = free;
    for (const [name, size] of Object.entries(every)) {
      this.at[name] = Math.ceil(end / 64) * 64;
      end = this.at[name] + size;
    }
    reserve(this.kernels.memory, end);
    this.floats = new Float32Array(this.kernels.memory.buffer);
    this.integers = new BigInt64Array(this.kernels.memory.buffer);
    this.reals = new Float64Array(this.kernels.memory.buffer);
    // Keys are cut into splits of 2^split_bits tiles, whose keys and values fill half of a cache. Bits depend on it.
    const { splitBytes, splitTiles, keys } = about.tile;
    const fit = Math.floor(splitBytes / (keys * 2 * c.d * 4));
    const splitBits = Math.floor(Math.log2(Math.min(Math.max(1, fit), splitTiles)));
    const layout = (name, rows, features) => ({
      [`${name}_head`]: 4 * rows * features,
      [`${name}_row`]: 4 * features,
      [`${name}_feature`]: 4,
    });
    const { at } = this;
    this.setFields("fields", kernel.fields, [
      ...this.rules,
      ...Object.entries({
        ...{ work_groups: at.workGroups, count: 1, taken: at.taken, blocks: at.records, bases: at.bases },
        ...{ tiles: at.lists, scratch: at.scratch },
        ...{ d: c.d, d_v: c.dV, n_k: c.nK, keys: c.nK, row_head: c.nQ, split_bits: splitBits },
        ...layout("q", c.nQ, c.d),
        ...layout("k", c.nK, c.d),
        ...layout("v", c.nK, c.dV),
        ...layout("out", c.nQ, c.dV),
      }),
    ]);
    this.reals[at.fields / WORD + kernel.fields.indexOf("scale")] = c.scale;
  }

  /** Set fields of a kernel by their names, and the others of `names` to 0. */
  setFields(place, names, values) {
    this.integers.fill(0n, this.at[place] / WORD, this.at[place] / WORD + names.length);
    for (const [name, value] of values) {
      const n = names.indexOf(name);
      if (n >= 0) this.integers[this.at[place] / WORD + n] = BigInt(value);
    }
  }

  /** Set a number of the call itself. */
  setField(name, value) {
    this.integers[this.at.fields / WORD + this.kernel.fields.indexOf(name)] = BigInt(value);
  }

  /**
   * Run the kernel on query blocks of some rows each, [row, rows, part], of `count` heads from h on.
   *
   * bases: addresses of the call's arrays, by their fields. numbers: a block's own fields, given its first row and part.
   */
  run(b, h, count, blocks, bases, numbers) {
    const { c, at, integers, kernel } = this;
    const names = kernel.blockFields;
    this.setFields("bases", names, Object.entries(bases));
    blocks.forEach(([row, rows, part], n) => {
      const own = { b, h, head: h, i: row + c.offset, rows, lanes: rows * count, ...numbers(row, part) };
      Object.assign(own, { tiles: this.begins[n], count: this.counts[n] });
      const record = at.records / WORD + n * names.length;
      names.forEach((name, f) => {
        integers[record + f] = BigInt(own[name] ?? 0);
      });
    });
    integers[at.workGroups / WORD] = 0n;
    integers[at.workGroups / WORD + 1] = BigInt(blocks.length);
    integers[at.taken / WORD] = 0n;
    this.kernels[kernel.name](at.fields);
  }

  /** List the tiles of query blocks among keys [from, to); lists that are in memory are used again. */
  list(b, h, blocks, from, to) {
    const { about, c, at, integers, kernel } = this;
    const { visible } = kernel;
    const reads = (name) => about.maskReads.includes(name);
    const wanted = visible ? [reads("b") ? b : 0, reads("h") ? h : 0, blocks[0][0]].join() : "all";
    if (this.listed === wanted) return;
    this.listed = wanted;
    const lists = at.lists / WORD;
    const first = Math.floor(from / about.tile.keys);
    if (!visible) {
      const full = BigInt(about.tile.full);
      const stop = Math.ceil(to / about.tile.keys);
      for (let n = first; n < stop; n++) integers[lists + n - first] = (BigInt(n) << BigInt(about.tile.shift)) | full;
      this.begins = new Array(about.workGroup).fill(0);
      this.counts = new Array(about.workGroup).fill(Math.max(0, stop - first));
      return;
    }
    [this.begins, this.counts] = [[], []];
    const place = (name) => at.listing / WORD + visible.fields.indexOf(name);
    const least = BigInt(first) << BigInt(about.tile.shift);
    let begin = 0;
    for (const [row, rows] of blocks) {
      const block = { b, h, i: row + c.offset, rows, tiles: at.lists + WORD * begin, n_k: to };
      for (const [name, value] of Object.entries(block)) integers[place(name)] = BigInt(value);
      this.kernels[visible.name](at.listing);
      const end = begin + Number(integers[place("count")]);
      let start = begin;
      while (start < end && integers[lists + start] < least) start++;
      this.begins.push(start);
      this.counts.push(end - start);
      begin = end;
    }
  }

  /** Prepare the kernel that lists tiles. */
  prepareLists() {
    const { visible } = this.kernel;
    if (visible) this.setFields("listing", visible.fields, [...this.rules, ["keys", this.c.nK]]);
  }
}

/** A call of attention. */
class Forward extends Run {
  constructor(about, kernels, rules, c, free) {
    // With few rows a lane is a key, else a query.
    const [prefill, ...decode] = about.kernels; // those for fewer rows first
    super(about, kernels, rules, c, decode.find((x) => c.nQ * c.group <= x.rows) ?? prefill);
    this.rows = Math.max(1, Math.min(c.nQ, this.kernel.lanes)); // of a query block
    // Heads with the same keys share a query block where their rows fit, and the mask is the same.
    const fit = Math.floor((this.kernel.rows || this.kernel.lanes) / this.rows);
    this.headsTogether = about.maskReads.includes("h") ? 1 : Math.max(1, Math.min(c.group, fit));
    this.blocks = Math.min(about.workGroup, Math.ceil(c.nQ / this.rows)); // of a launch
    const queries = c.batch * c.heads * c.nQ;
    const best = about.best * queries;
    const has = (name) => (about.statistics.includes(name) ? 4 * queries : 0);
    const keys = c.batch * c.kvHeads * c.nK;
    const arrays = { q: 4 * queries * c.d, k: 4 * keys * c.d, v: 4 * keys * c.dV, out: 4 * queries * c.dV };
    const statistics = { lse: 4 * queries, entropy: has("entropy"), max: has("max") };
    this.place({ ...arrays, ...statistics, values: 4 * best, indices: 8 * best }, free, this.blocks);
    this.prepareLists();
    // Bytes of a query's row in each array.
    this.width = { q: 4 * c.d, out: 4 * c.dV, lse: 4 };
    for (const name of ["entropy", "max"]) if (about.statistics.includes(name)) this.width[name] = 4;
    if (about.best) Object.assign(this.width, { values: 4 * about.best, indices: 8 * about.best });
  }

  /** Compute some query blocks, from row `first` on, of `count` heads of a group. */
  launch(b, kvHead, g, count, first) {
    const { c, at, rows, width } = this;
    const h = kvHead * c.group + g;
    const blocks = [];
    for (let row = first; row < c.nQ && blocks.length < this.blocks; row += rows) {
      blocks.push([row, Math.min(rows, c.nQ - row)]);
    }
    this.list(b, h, blocks, 0, c.nK);
    const query = (b * c.heads + h) * c.nQ;
    const key = (b * c.kvHeads + kvHead) * c.nK;
    const bases = { k: at.k + 4 * c.d * key, v: at.v + 4 * c.dV * key };
    for (const [name, bytes] of Object.entries(width)) bases[name] = at[name] + bytes * query;
    const offsets = (row) => Object.fromEntries(Object.entries(width).map(([name, bytes]) => [name, bytes * row]));
    this.run(b, h, count, blocks, bases, offsets);
  }

  results(call) {
    const { about, c, at, floats, integers, blocks, rows, headsTogether: step } = this;
    for (const name of ["q", "k", "v"]) floats.set(call[name], at[name] / 4);
    for (let first = 0; first < c.nQ; first += blocks * rows) {
      for (let b = 0; b < c.batch; b++) {
        for (let kvHead = 0; kvHead < c.kvHeads; kvHead++) {
          for (let g = 0; g < c.group; g += step) this.launch(b, kvHead, g, Math.min(step, c.group - g), first);
        }
      }
    }
    const queries = c.batch * c.heads * c.nQ;
    const numbers = (name, each = 1) => floats.slice(at[name] / 4, at[name] / 4 + queries * each);
    const found = { out: numbers("out", c.dV), lse: numbers("lse") };
    for (const name of ["entropy", "max"]) if (about.statistics.includes(name)) found[name] = numbers(name);
    // The first `k` of each query's largest weights.
    const largest = (make, array, place, k) => {
      const entry = (n) => array[place + Math.floor(n / k) * about.best + (n % k)];
      return make.from({ length: queries * k }, (_, n) => Number(entry(n)));
    };
    if (about.statistics.includes("argmax")) found.argmax = largest(Int32Array, integers, at.indices / WORD, 1);
    if (about.statistics.includes("top")) {
      found.top = {
        values: largest(Float32Array, floats, at.values / 4, about.top),
        indices: largest(Int32Array, integers, at.indices / WORD, about.top),
      };
    }
    return found;
  }
}

/** The second pass, from lse to what is summed over queries. */
class SecondPass extends Run {
  /** Query blocks that are computed together, [row, rows, part], in the engine's order, on which bits of sums depend. */
  *workGroups(parts) {
    const { lanes, workGroup, band } = this.kernel;
    const blocks = [];
    for (let part = 0; part + 1 < parts.length; part++) {
      const stop = parts[part + 1];
      for (let row = parts[part]; row < stop; row += lanes) blocks.push([row, Math.min(lanes, stop - row), part]);
    }
    // With rules that hide, later rows come first, some blocks at a time.
    const size = band && this.tiles > 1 ? band : blocks.length;
    for (let stop = blocks.length; stop > 0; stop -= size) {
      const some = blocks.slice(Math.max(0, stop - size), stop);
      if (band && this.tiles > 1) some.reverse();
      for (let part = 0; part + 1 < parts.length; part++) {
        const own = some.filter((block) => block[2] === part);
        for (let n = 0; n < own.length; n += workGroup) yield own.slice(n, n + workGroup);
      }
    }
  }

  /**
   * Edges of the parts of a head's rows: each is summed by itself, as the engine does it.
   *
   * heads: of the call. bins: edges among which those of the parts are, if there are any.
   */
  parts(heads, first, last, bins = null) {
    const most = Math.floor(this.kernel.parts / Math.max(1, heads));
    const number = Math.max(1, Math.min(most, Math.floor((last - first) / (8 * this.kernel.lanes))));
    const even = Array.from({ length: number }, (_, n) => first + Math.trunc(n * ((last - first) / number)));
    return [...new Set([...(bins ? even.map((row) => bins.find((edge) => edge >= row)) : even), last])];
  }
}

/** Counts of visible keys, received weight and weight by distance, of every head of a call. */
class Sums extends SecondPass {
  constructor(about, kernels, rules, c, free) {
    super(about, kernels, rules, { ...c, dV: 0 }, about.sums);
    const { keys } = about.tile;
    const queries = c.batch * c.heads * c.nQ;
    this.edges = this.parts(c.batch * c.heads, 0, c.nQ);
    this.lengths = { received: this.tiles * keys, profile: c.nQ + c.nK + 2 * keys + this.kernel.lanes };
    const partials = (name) => 4 * (this.edges.length - 1) * this.lengths[name];
    const arrays = { q: 4 * queries * c.d, k: 4 * c.batch * c.kvHeads * c.nK * c.d, lse: 4 * queries };
    const sums = { visible: 8 * queries, received: partials("received"), profile: partials("profile") };
    this.place({ ...arrays, ...sums }, free, this.kernel.workGroup);
    this.prepareLists();
  }

  results(call) {
    const { c, at, floats, integers, kernel } = this;
    for (const name of ["q", "k", "lse"]) floats.set(call[name], at[name] / 4);
    const heads = c.batch * c.heads;
    integers.fill(0n, at.visible / WORD, at.visible / WORD + heads * c.nQ);
    const found = { received: new Float32Array(heads * c.nK), profile: new Float32Array(heads * c.diagonals) };
    for (let one = 0; one < heads; one++) {
      const [b, h] = [Math.floor(one / c.heads), one % c.heads];
      this.head(b, h, c.nQ * one, c.nK * (b * c.kvHeads + Math.floor(h / c.group)));
      found.received.set(this.total("received", 0, c.nK), one * c.nK);
      found.profile.set(this.total("profile", this.about.tile.keys, c.diagonals), one * c.diagonals);
    }
    const count = (_, n) => Number(integers[at.visible / WORD + n]);
    found.visible = Int32Array.from({ length: heads * c.nQ }, count);
    return Object.fromEntries(kernel.statistics.map((name) => [name, found[name]]));
  }

  /** Sum over the queries of a head. */
  head(b, h, query, key) {
    const { c, at, floats, lengths } = this;
    for (const name of ["received", "profile"]) {
      floats.fill(0, at[name] / 4, at[name] / 4 + (this.edges.length - 1) * lengths[name]);
    }
    const bases = { q: at.q + 4 * c.d * query, k: at.k + 4 * c.d * key, lse: at.lse + 4 * query };
    Object.assign(bases, { visible: at.visible + WORD * query, received: at.received, profile: at.profile });
    const numbers = (row, part) => ({
      ...{ q: 4 * c.d * row, lse: 4 * row, row, visible: WORD * row, received: 4 * part * lengths.received },
      profile: 4 * (part * lengths.profile + row + c.nK - 1 + this.about.tile.keys),
    });
    for (const blocks of c.nK ? this.workGroups(this.edges) : []) {
      this.list(b, h, blocks, 0, c.nK);
      this.run(b, h, 1, blocks, bases, numbers);
    }
  }

  /** The sum of the parts of a statistic, `count` numbers from `first` on. */
  total(name, first, count) {
    const { at, floats, lengths } = this;
    const sums = new Float32Array(count);
    for (let part = 0; part + 1 < this.edges.length; part++) {
      const from = at[name] / 4 + part * lengths[name] + first;
      for (let n = 0; n < count; n++) sums[n] += floats[from + n];
    }
    return sums;
  }
}

/** Maps of the weights of one head: sums, maxima, and what is visible, by bins of queries and keys. */
class Maps extends SecondPass {
  constructor(about, kernels, rules, c, free) {
    super(about, kernels, rules, c, about.maps);
    const { rows, cols } = c;
    // Keys before and after those of the bins fall into a bin at either end.
    this.edges = [0, ...cols, c.nK];
    this.width = this.edges.length - 1;
    const bytes = 4 * this.width * (rows.length - 1);
    const sizes = { q: 4 * c.nQ * c.d, k: 4 * c.nK * c.d, lse: 4 * c.nQ, mass: bytes, max_map: bytes, seen_map: bytes };
    const lists = { row_bins: WORD * (c.nQ + 1), tile_bins: WORD * this.tiles, edges: WORD * this.edges.length };
    this.place({ ...sizes, ...lists }, free, this.kernel.workGroup);
    this.prepareLists();
    for (const name of Object.keys(lists)) this.setField(name, this.at[name]);
  }

  results({ q, k, lse }) {
    const { c, at, floats, integers, width, edges } = this;
    const { rows } = c;
    floats.set(q, at.q / 4);
    floats.set(k, at.k / 4);
    floats.set(lse, at.lse / 4);
    for (const name of ["mass", "max_map", "seen_map"]) {
      floats.fill(0, at[name] / 4, at[name] / 4 + width * (rows.length - 1));
    }
    integers.fill(-1n, at.row_bins / WORD, at.row_bins / WORD + c.nQ + 1);
    for (let r = 0; r + 1 < rows.length; r++) {
      integers.fill(BigInt(r * width), at.row_bins / WORD + rows[r], at.row_bins / WORD + rows[r + 1]);
    }
    edges.forEach((edge, n) => (integers[at.edges / WORD + n] = BigInt(edge)));
    for (let tile = 0, bin = 0; tile < this.tiles; tile++) {
      while (edges[bin + 1] <= tile * this.about.tile.keys) bin++;
      integers[at.tile_bins / WORD + tile] = BigInt(bin);
    }
    const bases = Object.fromEntries(["q", "k", "lse", "mass", "max_map", "seen_map"].map((name) => [name, at[name]]));
    const numbers = (row) => ({ q: 4 * c.d * row, lse: 4 * row, row });
    for (const blocks of this.workGroups(this.parts(1, c.rows[0], c.rows.at(-1), c.rows))) {
      this.list(c.b, c.h, blocks, c.cols[0], c.cols.at(-1));
      this.run(c.b, c.h, 1, blocks, bases, numbers);
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

/**
 * Return the sizes and options of a call. Throws TypeError or RangeError for one that makes no sense.
 *
 * b, h: its first batch element and head, as rules read them.
 */
function checked(call, about, b = 0, h = 0) {
  const unknown = Object.keys(call ?? {}).find((name) => !OPTIONS.includes(name));
  need(unknown === undefined, `a call takes ${OPTIONS.join(", ")}, and no ${unknown}`, TypeError);
  for (const name of ["q", "k", "v"]) {
    need(call?.[name] instanceof Float32Array, `${name} must be a Float32Array`, TypeError);
  }
  const { q, k, v } = call;
  const whole = (name, value, most) => {
    const fits = Number.isInteger(value) && value >= 1 && value <= most;
    need(fits, `${name} must be an integer from 1 to ${most}, got ${value}`);
    return value;
  };
  const d = whole("d", call.d, about.features);
  const heads = whole("heads", call.heads ?? 1, about.indices);
  const kvHeads = whole("kvHeads", call.kvHeads ?? heads, about.indices);
  const batch = whole("batch", call.batch ?? 1, about.indices);
  need(heads % kvHeads === 0, `heads must be a multiple of kvHeads, got ${heads} and ${kvHeads}`);
  const rowsOf = (name, array, each, meaning) => {
    const rows = array.length / each;
    need(Number.isInteger(rows), `${name} must hold a multiple of ${meaning} = ${each} numbers, got ${array.length}`);
    return rows;
  };
  const nQ = rowsOf("q", q, batch * heads * d, "batch · heads · d");
  const nK = rowsOf("k", k, batch * kvHeads * d, "batch · kvHeads · d");
  const values = rowsOf("v", v, batch * kvHeads * Math.max(1, nK), "batch · kvHeads · keys");
  const dV = nK ? values : (call.dV ?? d);
  const { features, positions } = about;
  need(dV <= features, `v must have at most ${features} features, got ${dV}`);
  need(nQ <= positions && nK <= positions, `a call has at most ${positions} queries and keys, got ${nQ} and ${nK}`);
  const offset = call.offset ?? nK - nQ;
  const near = Number.isInteger(offset) && Math.abs(offset) <= positions;
  need(near, `offset must be an integer of at most ${positions}, got ${offset}`);
  const scale = call.scale ?? 1 / Math.sqrt(d);
  need(Number.isFinite(Math.fround(scale)), `scale must be finite in float32, got ${scale}`);
  const ranges = { b: [b, b + batch], h: [h, h + heads], i: [offset, offset + nQ], j: [0, nK] };
  for (const [rule, argument, axis, length] of about.requires) {
    const [low, high] = ranges[axis];
    const anyIndex = "bh".includes(axis) && length === 1;
    const outside = low < 0 ? low : high - 1;
    const covered = low >= high || anyIndex || (low >= 0 && high <= length);
    need(covered, `${argument} of ${rule} covers ${axis} from 0 to ${length - 1}, but this call has ${outside}`);
  }
  const diagonals = Math.max(0, nQ + nK - 1);
  return { d, dV, heads, kvHeads, group: heads / kvHeads, batch, nQ, nK, diagonals, offset, scale };
}

/** Return the sizes and options of a call for maps of one head. Throws TypeError or RangeError. */
function checkedMaps(call, about) {
  const index = (name) => {
    const value = call?.[name] ?? 0;
    need(Number.isInteger(value) && value >= 0 && value < about.indices, `${name} must be an index, got ${value}`);
    return value;
  };
  const [b, h] = ["b", "h"].map(index);
  const own = Object.entries(call ?? {}).filter(([name]) => !["lse", "rows", "cols", "b", "h"].includes(name));
  const c = checked({ ...Object.fromEntries(own), v: new Float32Array(0), heads: 1, kvHeads: 1, batch: 1 }, about, b, h);
  need(call.lse instanceof Float32Array, "lse must be a Float32Array", TypeError);
  need(call.lse.length === c.nQ, `lse must have a number for each of ${c.nQ} queries, got ${call.lse.length}`);
  const edges = (name, most) => {
    const given = Array.from(call[name] ?? []);
    const rising = given.every((x, n) => Number.isInteger(x) && x >= 0 && x <= most && (n === 0 || x > given[n - 1]));
    need(rising && given.length > 1, `${name} must be two or more rising integers from 0 to ${most}`);
    return given;
  };
  return { ...c, b, h, rows: edges("rows", c.nQ), cols: edges("cols", c.nK) };
}

/** The edges of bins of one position each, from and to two positions. */
function singles([from, to] = []) {
  return Array.from({ length: Math.max(0, to - from + 1) || 0 }, (_, n) => from + n);
}
