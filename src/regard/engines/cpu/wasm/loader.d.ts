/** One call of attention. Arrays are row-major, heads before positions. */
export interface AttentionCall {
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
  /** Position of the first query, counted from the first key. By default the last query and the last key meet. */
  offset?: number;
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
  /** The sum of weights by distance i − j, from offset − keys + 1 on, (batch, heads, queries + keys − 1). */
  profile?: Float32Array;
  /** The largest weights in falling order and their keys, (batch, heads, queries, k). */
  top?: { values: Float32Array; indices: Int32Array };
}

/** One head whose weights are wanted. */
export interface HeadCall {
  /** (queries, d) */
  q: Float32Array;
  /** (keys, d) */
  k: Float32Array;
  /** Of each query, as attention gives it. */
  lse: Float32Array;
  d: number;
  scale?: number;
  offset?: number;
  /** The batch element and the head that rules read. By default 0. */
  b?: number;
  h?: number;
}

/** A head, and edges of bins of its queries and keys: bin n is of [edges[n], edges[n + 1]). */
export interface MapsCall extends HeadCall {
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

/** The functions of a module. Each throws a TypeError or a RangeError for a call that makes no sense or does not fit. */
export interface Attention {
  (call: AttentionCall): AttentionResult;
  /** Maps of weights, of modules that were exported with maps=True. */
  maps(call: MapsCall): MapsResult;
  /** Weights of the queries [from, to) on the keys [from, to), row by row; 0 where a pair is hidden. */
  weights(call: HeadCall & { rows: [number, number]; cols: [number, number] }): Float32Array;
}

/** Load a module from its address, its bytes, or compiled. Throws an Error where WebAssembly or its SIMD is missing. */
export function load(source: string | URL | Response | BufferSource | WebAssembly.Module): Promise<Attention>;
