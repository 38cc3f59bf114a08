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
  /** The largest weights in falling order and their keys, (batch, heads, queries, k). */
  top?: { values: Float32Array; indices: Int32Array };
}

/** Compute attention. Throws a TypeError or a RangeError for a call that makes no sense or takes too much memory. */
export type Attention = (call: AttentionCall) => AttentionResult;

/** Load a module from its address, its bytes, or compiled. Throws an Error where WebAssembly or its SIMD is missing. */
export function load(source: string | URL | Response | BufferSource | WebAssembly.Module): Promise<Attention>;
