"""Multi-head attention: features split into heads, attended by `regard.attention`, and joined again."""

from typing import Any

import numpy as np

from regard import checks
from regard.api import attention

Array = np.ndarray[Any, np.dtype[Any]]


def multihead_attention(
    query: Array,
    key: Array,
    value: Array,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    w_q: Array | None = None,
    w_k: Array | None = None,
    w_v: Array | None = None,
    w_o: Array | None = None,
    b_q: Array | None = None,
    b_k: Array | None = None,
    b_v: Array | None = None,
    b_o: Array | None = None,
    **attention_options: Any,
) -> Any:
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2) of x with h = `num_heads` heads.

    In index notation, with i a query, j a key, c a feature of the model, h a head, g the key-value head that it shares,
    a and b features of a head:

        Q[h,i,a] = X[i,c] W_q[c,h,a] + b_q[h,a]
        K[g,j,a] = Y[j,c] W_k[c,g,a] + b_k[g,a]
        V[g,j,b] = Z[j,c] W_v[c,g,b] + b_v[g,b]
        O[h,i,b] = attention(Q, K, V)                    see `regard.attention`
        out[i,c] = O[h,i,b] W_o[h,b,c] + b_o[c]

    X, Y and Z are query, key and value. Self-attention is `multihead_attention(x, x, x, 8)`; in cross-attention keys and
    values come from another sequence, of any length.

    query (..., n_q, d_model), key (..., n_k, d_k), value (..., n_k, d_v), leading dimensions broadcasting.
    num_kv_heads: heads of keys and values, shared by groups of query heads; a divisor of num_heads, by default equal.
    w_q (d_model, h·d), w_k (d_k, h_kv·d), w_v (d_v, h_kv·e), w_o (h·e, d_out): the heads' columns side by side, as
    `x @ w_q` needs (the transpose of a `torch.nn.Linear.weight`). What is not given is the identity: without any, the
    features themselves are split into heads, attended and joined. w_q and w_k come together.
    b_q, b_k, b_v, b_o: one number for each column of the projection they belong to.
    attention_options: all of `regard.attention` but `layout`: mask, causal, score, bias, scale, sink, dropout, seed,
    offset, origin, return_weights, observe, engine. Masks and biases align right to (..., h, n_q, n_k).

    Returns (..., n_q, d_out), or (..., n_q, h·e) without w_o. With return_weights or observe, a tuple of it and what
    `regard.attention` returns: weights (..., h, n_q, n_k), then `seen`. One floating dtype for all arrays; products of
    16-bit arrays accumulate in float32.

    Raises TypeError for dtypes; ValueError, with both shapes, where they do not fit or heads do not divide them.

    >>> x = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    >>> multihead_attention(x, x, x, 8).shape
    (10, 64)
    >>> out, weights = multihead_attention(x, x[:6], x[:6], 8, return_weights=True)
    >>> weights.shape
    (8, 10, 6)
    >>> w = np.eye(64, dtype=np.float32)
    >>> out = multihead_attention(x, x, x, 8, num_kv_heads=2, w_q=w, w_k=w[:, :16], w_v=w[:, :16], w_o=w, causal=True)
    >>> out.shape
    (10, 64)
    """
    if "layout" in attention_options:
        raise TypeError("multihead_attention has no layout: it splits (..., n, features) into heads itself")
    h = checks.integer("num_heads", num_heads)
    h_kv = h if num_kv_heads is None else checks.integer("num_kv_heads", num_kv_heads)
    if h < 1 or h_kv < 1 or h % h_kv:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_heads={h} and num_kv_heads={h_kv}")
    if (w_q is None) != (w_k is None):
        given, missing = ("w_k", "w_q") if w_q is None else ("w_q", "w_k")
        raise ValueError(f"{given} without {missing}: queries and keys are projected together or not at all")
    ...
