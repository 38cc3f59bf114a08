// Exact attention in a web page or in Node.js: softmax(score(scale · q kᵀ)) v, in memory of O(n).
//
//     import { load } from "./NAME.js";
//     const attention = await load("NAME.wasm");
//     const { out, lse } = attention({ q, k, v, heads: 8, d: 64 });
//
// Written by regard.export_wasm. The module holds the kernels, and a description of what they take. Here a call is
// checked, its tiles are listed, and the kernels run, a few query blocks at a time. NAME.d.ts says what a call takes.
//
// Words: a query block is some rows that use keys together; a tile is a query block against 128 keys. A launch computes
// some query blocks of the same keys. Each has a record: where its rows are, and where its list of tiles begins.

const PAGE = 65536;
const WORD = 8; // bytes of a kernel's field, of a number of a query block, of an entry of a list of tiles
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
  need(about.version === 1, `this loader reads modules of version 1, got ${about.version}`, Error);
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

  return (call) => {
    const c = checked(call, about);
    const run = new Run(about, kernels, rules, c, free);
    for (const name of ["q", "k", "v"]) run.floats.set(call[name], run.at[name] / 4);
    const { blocks, rows, headsTogether: step } = run;
    for (let first = 0; first < c.nQ; first += blocks * rows) {
      for (let b = 0; b < c.batch; b++) {
        for (let kvHead = 0; kvHead < c.kvHeads; kvHead++) {
          for (let g = 0; g < c.group; g += step) run.launch(b, kvHead, g, Math.min(step, c.group - g), first);
        }
      }
    }
    return run.results();
  };
}

/** The memory and the launches of one call. */
class Run {
  constructor(about, kernels, rules, c, free) {
    Object.assign(this, { about, kernels, c });
    // With few rows a lane is a key, else a query.
    const [prefill, ...decode] = about.kernels; // those for fewer rows first
    this.kernel = decode.find((x) => c.nQ * c.group <= x.rows) ?? prefill;
    this.rows = Math.max(1, Math.min(c.nQ, this.kernel.lanes)); // of a query block
    // Heads with the same keys share a query block where their rows fit, and the mask is the same.
    const fit = Math.floor((this.kernel.rows || this.kernel.lanes) / this.rows);
    this.headsTogether = about.maskReads.includes("h") ? 1 : Math.max(1, Math.min(c.group, fit));
    this.blocks = Math.min(about.workGroup, Math.ceil(c.nQ / this.rows)); // of a launch
    this.tiles = Math.ceil(c.nK / about.tile.keys);
    this.listed = null; // which lists are in memory
    this.at = this.placed(free);

    this.floats = new Float32Array(kernels.memory.buffer);
    this.integers = new BigInt64Array(kernels.memory.buffer);
    this.reals = new Float64Array(kernels.memory.buffer);
    this.setFields("fields", this.kernel.fields, [...rules, ...Object.entries(this.fields())]);
    this.reals[this.at.fields / WORD + this.kernel.fields.indexOf("scale")] = c.scale;
    if (about.visible) this.setFields("visible", about.visible, [...rules, ["n_k", c.nK], ["keys", c.nK]]);
  }

  /** Give every array a place from `free` on. Throws where there is not enough memory. */
  placed(free) {
    const { about, c, kernel, blocks } = this;
    const queries = c.batch * c.heads * c.nQ;
    const { multiple, group, block } = kernel.scratch;
    const features = [1, ...[c.d, c.dV].map((x) => Math.ceil(x / multiple) * multiple)];
    const scratch = features.reduce((sum, x, n) => sum + x * (group[n] + blocks * block[n]), 0);
    const best = about.best * queries;
    const has = (name) => (about.statistics.includes(name) ? 4 * queries : 0);
    const keys = c.batch * c.kvHeads * c.nK;
    const sizes = {
      q: 4 * queries * c.d,
      k: 4 * keys * c.d,
      v: 4 * keys * c.dV,
      out: 4 * queries * c.dV,
      lse: 4 * queries,
      entropy: has("entropy"),
      max: has("max"),
      values: 4 * best,
      indices: 8 * best,
      fields: WORD * kernel.fields.length,
      visible: WORD * (about.visible ?? []).length,
      bases: WORD * kernel.blockFields.length,
      records: WORD * blocks * kernel.blockFields.length,
      lists: WORD * this.tiles * (about.visible ? blocks : 1),
      workGroups: 2 * WORD,
      taken: WORD,
      scratch,
    };
    const at = {};
    let end = free;
    for (const [name, size] of Object.entries(sizes)) {
      at[name] = Math.ceil(end / 64) * 64;
      end = at[name] + size;
    }
    reserve(this.kernels.memory, end);
    return at;
  }

  /** The fields of a call besides its rules; others are 0. */
  fields() {
    const { c, at } = this;
    const tile = this.about.tile;
    // Keys are cut into splits of 2^split_bits tiles, whose keys and values fill half of a cache. Bits depend on it.
    const fit = Math.floor(tile.splitBytes / (tile.keys * 2 * c.d * 4));
    const splitBits = Math.floor(Math.log2(Math.min(Math.max(1, fit), tile.splitTiles)));
    const layout = (name, rows, features) => ({
      [`${name}_head`]: 4 * rows * features,
      [`${name}_row`]: 4 * features,
      [`${name}_feature`]: 4,
    });
    return {
      ...{ work_groups: at.workGroups, count: 1, taken: at.taken, blocks: at.records, bases: at.bases },
      ...{ tiles: at.lists, scratch: at.scratch },
      ...{ d: c.d, d_v: c.dV, n_k: c.nK, keys: c.nK, row_head: c.nQ, split_bits: splitBits },
      ...layout("q", c.nQ, c.d),
      ...layout("k", c.nK, c.d),
      ...layout("v", c.nK, c.dV),
      ...layout("out", c.nQ, c.dV),
    };
  }

  setFields(place, names, values) {
    this.integers.fill(0n, this.at[place] / WORD, this.at[place] / WORD + names.length);
    for (const [name, value] of values) {
      const n = names.indexOf(name);
      if (n >= 0) this.integers[this.at[place] / WORD + n] = BigInt(value);
    }
  }

  /** Compute some query blocks, from row `first` on, of `count` heads of a group. */
  launch(b, kvHead, g, count, first) {
    const { about, c, at, integers, rows } = this;
    const h = kvHead * c.group + g;
    const blocks = Math.min(this.blocks, Math.ceil((c.nQ - first) / rows));
    this.list(b, h, first, blocks);

    const query = (b * c.heads + h) * c.nQ + first;
    const key = (b * c.kvHeads + kvHead) * c.nK;
    // Bytes of a query's row in each array.
    const width = { q: 4 * c.d, out: 4 * c.dV, lse: 4 };
    for (const name of ["entropy", "max"]) if (about.statistics.includes(name)) width[name] = 4;
    if (about.best) Object.assign(width, { values: 4 * about.best, indices: 8 * about.best });
    const bases = Object.entries(width).map(([name, bytes]) => [name, at[name] + bytes * query]);
    bases.push(["k", at.k + 4 * c.d * key], ["v", at.v + 4 * c.dV * key]);
    const names = this.kernel.blockFields;
    this.setFields("bases", names, bases);
    for (let n = 0; n < blocks; n++) {
      const row = n * rows; // of the launch
      const here = Math.min(rows, c.nQ - first - row);
      const numbers = { b, h, head: h, i: first + row + c.offset, rows: here, lanes: here * count };
      Object.assign(numbers, { tiles: this.begins[n], count: this.counts[n] });
      const record = at.records / WORD + n * names.length;
      names.forEach((name, f) => {
        integers[record + f] = BigInt(numbers[name] ?? row * (width[name] ?? 0));
      });
    }
    integers[at.workGroups / WORD] = 0n;
    integers[at.workGroups / WORD + 1] = BigInt(blocks);
    integers[at.taken / WORD] = 0n;
    this.kernels[this.kernel.name](at.fields);
  }

  /** List the tiles of query blocks; lists that are in memory are used again. */
  list(b, h, first, blocks) {
    const { about, c, at, integers, rows } = this;
    const reads = (name) => about.maskReads.includes(name);
    const wanted = about.visible ? [reads("b") ? b : 0, reads("h") ? h : 0, first].join() : "all";
    if (this.listed === wanted) return;
    this.listed = wanted;
    const lists = at.lists / WORD;
    if (!about.visible) {
      const full = BigInt(about.tile.full);
      for (let n = 0; n < this.tiles; n++) integers[lists + n] = (BigInt(n) << BigInt(about.tile.shift)) | full;
      this.begins = new Array(this.blocks).fill(0);
      this.counts = new Array(this.blocks).fill(this.tiles);
      return;
    }
    [this.begins, this.counts] = [[], []];
    const set = (name, value) => (integers[at.visible / WORD + about.visible.indexOf(name)] = BigInt(value));
    for (let n = 0, begin = 0; n < blocks; n++) {
      const row = first + n * rows;
      const block = { b, h, i: row + c.offset, rows: Math.min(rows, c.nQ - row), tiles: at.lists + WORD * begin };
      for (const [name, value] of Object.entries(block)) set(name, value);
      this.kernels.visible(at.visible);
      this.begins.push(begin);
      this.counts.push(Number(integers[at.visible / WORD + about.visible.indexOf("count")]));
      begin += this.counts[n];
    }
  }

  results() {
    const { about, c, at, floats, integers } = this;
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

/** Return the sizes and options of a call. Throws TypeError or RangeError for one that makes no sense. */
function checked(call, about) {
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
  const ranges = { b: [0, batch], h: [0, heads], i: [offset, offset + nQ], j: [0, nK] };
  for (const [rule, argument, axis, length] of about.requires) {
    const [low, high] = ranges[axis];
    const anyIndex = "bh".includes(axis) && length === 1;
    const outside = low < 0 ? low : high - 1;
    const covered = low >= high || anyIndex || (low >= 0 && high <= length);
    need(covered, `${argument} of ${rule} covers ${axis} from 0 to ${length - 1}, but this call has ${outside}`);
  }
  return { d, dV, heads, kvHeads, group: heads / kvHeads, batch, nQ, nK, offset, scale };
}
