/** An array of any shape that broadcasts to (batch, heads, queries, keys), as in NumPy: aligned right, axes of 1 repeat. */
export interface Pairs<Data> {
  /** Row-major. */
  data: Data;
  shape: readonly number[];
}

/** What a call may give about pairs of a query and a key. Each is needed if the module was exported for it, else refused. */
export interface PairOptions {
  /** Added to scores; −∞ hides a pair. Of modules with bias=True. */
  bias?: Pairs<Float32Array>;
  /** 1 where a pair is visible, 0 where it is hidden, whatever the rule says. Of modules with array_mask=True. */
  mask?: Pairs<Uint8Array>;
}

/** One call of attention. Arrays are row-major, heads before positions. */
export interface AttentionCall extends PairOptions {
  /** (batch, heads, queries, d) */
  q: Float32Array;
  /** (batch, kvHeads, keys, d) */
  k: Float32Array;
  /** (batch, kvHeads, keys, features of v) */
  v: Float32Array;
  /** Features of q and k. */
  d: number;
  /** Features of v, where there are no keys that tell. By default d. */
  dV?: number;
  /** By default 1. */
  heads?: number;
  /** Heads of k and v; `heads` is a multiple. By default `heads`. */
  kvHeads?: number;
  /** By default 1. */
  batch?: number;
  /** Factor of the products of q and k. By default 1 / √d. */
  scale?: number;
  /**
   * Position of the first query, counted from the first key; or one for each batch element. By default the last query
   * and the last key meet.
   */
  offset?: number | ArrayLike<number>;
  /** A logit that takes weight and gives no value, one for each head or one for all. Needed by modules with sink=True. */
  sink?: Float32Array;
  /** The share of weights that is dropped, in [0, 1); the others are scaled by 1 / (1 − dropout). By default 0. */
  dropout?: number;
  /** An integer in [0, 2⁶⁴) that decides which weights are dropped; a BigInt from 2⁵³ on. Needed if dropout is not 0. */
  seed?: number | bigint;
}

/** Statistics are there if regard.export_wasm was given them. */
export interface AttentionResult {
  /** (batch, heads, queries, features of v); 0 for a query that sees nothing. */
  out: Float32Array;
  /** The logarithm of the sum of exp(score), (batch, heads, queries); −∞ for a query that sees nothing. */
  lse: Float32Array;
  /** The entropy of the weights in nats, (batch, heads, queries). */
  entropy?: Float32Array;
  /** The largest weight, (batch, heads, queries). */
  max?: Float32Array;
  /** The key of the largest weight, (batch, heads, queries); −1 for a query that sees nothing. */
  argmax?: Int32Array;
  /** The number of keys that a query sees, (batch, heads, queries). */
  visible?: Int32Array;
  /** The sum of weights that a key receives, (batch, heads, keys). */
  received?: Float32Array;
  /**
   * The sum of weights by distance i − j, from offset − keys + 1 on, (batch, heads, queries + keys − 1); empty where
   * there are no pairs.
   */
  profile?: Float32Array;
  /** The largest weights in falling order and their keys, (batch, heads, queries, k). */
  top?: { values: Float32Array; indices: Int32Array };
}

/** One head. */
export interface HeadCall extends PairOptions {
  /** (queries, d) */
  q: Float32Array;
  /** (keys, d) */
  k: Float32Array;
  d: number;
  scale?: number;
  offset?: number;
  /** The batch element and the head that rules read. By default 0. */
  b?: number;
  h?: number;
}

/** One head whose weights are wanted. */
export interface WeightsCall extends HeadCall {
  /** Of each query, as attention gives it. */
  lse: Float32Array;
}

/** A head, and edges of bins of its queries and keys: bin n is of [edges[n], edges[n + 1]). */
export interface MapsCall extends WeightsCall {
  rows: ArrayLike<number>;
  cols: ArrayLike<number>;
}

/** Of each bin, (bins of queries, bins of keys). */
export interface MapsResult {
  /** The sum of weights over its keys, its mean over queries. */
  mass: Float32Array;
  /** The largest weight. */
  max: Float32Array;
  /** 1 if any pair is visible, else 0. */
  seen: Uint8Array;
}

/** The queries [from, to) and the keys [from, to) of a head. */
export interface Ranges {
  rows: readonly [number, number];
  cols: readonly [number, number];
}

/** Scores of pairs, row by row. */
export interface ScoresResult {
  /** What the score rule and the bias make of scale · q · k. */
  unmasked: Float32Array;
  /** The same, and −∞ where a mask hides the pair. */
  masked: Float32Array;
}

/** The functions of a module. Each throws a TypeError or a RangeError for a call that makes no sense or does not fit. */
export interface Attention {
  (call: AttentionCall): AttentionResult;
  /** Maps of weights. Of modules that were exported with maps=True, as those below. */
  maps(call: MapsCall): MapsResult;
  /** Weights of some queries on some keys, row by row; 0 where a pair is hidden. */
  weights(call: WeightsCall & Ranges): Float32Array;
  /** Scores of some queries on some keys. */
  scores(call: HeadCall & Ranges): ScoresResult;
}

/** Load a module from its address, its bytes, or compiled. Throws an Error where WebAssembly or its SIMD is missing. */
export function load(source: string | URL | Response | BufferSource | WebAssembly.Module): Promise<Attention>;
