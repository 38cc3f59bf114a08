"""Attention as the textbook writes it, n × n in memory: the peer that every engine is measured against."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """softmax(Q Kᵀ / √d) V in the dtype of the inputs, (h, n, d) each."""
    S: Array = q @ k.swapaxes(-1, -2)
    S *= q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        n_q, n_k = S.shape[-2:]
        S[..., ~np.tri(n_q, n_k, n_k - n_q, dtype=bool)] = -np.inf
    S -= S.max(axis=-1, keepdims=True)
    np.exp(S, out=S)
    S /= S.sum(axis=-1, keepdims=True)
    return np.asarray(S @ v)


def gradients(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """dq, dk and dv without a mask."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    P = (q @ k.swapaxes(-1, -2)) * scale
    P -= P.max(axis=-1, keepdims=True)
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    dv = P.swapaxes(-1, -2) @ dout
    dS = dout @ v.swapaxes(-1, -2)
    dS -= (dS * P).sum(axis=-1, keepdims=True)
    dS *= P
    return np.asarray(dS @ k * scale), np.asarray(dS.swapaxes(-1, -2) @ q * scale), np.asarray(dv)
