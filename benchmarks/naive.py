"""Attention as in a textbook, n × n in memory: the peer of every engine."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def weights(q: Array, k: Array, causal: bool) -> Array:
    """Return softmax(Q Kᵀ / √d)."""
    P: Array = q @ k.swapaxes(-1, -2)
    P *= q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        n_q, n_k = P.shape[-2:]
        P[..., ~np.tri(n_q, n_k, n_k - n_q, dtype=bool)] = -np.inf
    P -= P.max(axis=-1, keepdims=True)
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    return P


def attention(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Return softmax(Q Kᵀ / √d) V in the dtype of the inputs, (h, n, d) each."""
    return np.asarray(weights(q, k, causal) @ v)


def gradients(q: Array, k: Array, v: Array, dout: Array, causal: bool = False) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv; the weights are computed again."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    P = weights(q, k, causal)
    dv = P.swapaxes(-1, -2) @ dout
    dS = dout @ v.swapaxes(-1, -2)
    dS -= (dS * P).sum(axis=-1, keepdims=True)
    dS *= P
    return np.asarray(dS @ k * scale), np.asarray(dS.swapaxes(-1, -2) @ q * scale), np.asarray(dv)
