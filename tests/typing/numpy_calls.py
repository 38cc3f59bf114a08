"""Calls on NumPy arrays, as a user's type checker sees them. A line that must be refused says so."""

from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import regard

q: NDArray[np.float32] = np.zeros((8, 10, 64), np.float32)

assert_type(regard.attention(q, q, q), NDArray[np.float32])
assert_type(
    regard.attention(q, q, q, causal=True, mask=regard.window(8), score=regard.softcap(5.0)), NDArray[np.float32]
)
assert_type(regard.attention(q, q, q, return_weights=True), tuple[NDArray[np.float32], NDArray[np.float32]])
assert_type(regard.attention(q, q, q, observe=["lse", regard.top(3)]), tuple[NDArray[np.float32], regard.Seen])
assert_type(
    regard.attention(q, q, q, return_weights=True, observe=["lse"]),
    tuple[NDArray[np.float32], NDArray[np.float32], regard.Seen],
)
assert_type(regard.weights(q, q, rows=slice(0, 2)), NDArray[np.float32])

known = regard.attention(q, q, q, observe=["lse"], causal=True)
assert_type(regard.attention_vjp(q, q, q, q, outputs=known, causal=True), regard.Differential)
assert_type(regard.attention_jvp(q, q, q, dquery=q), tuple[regard.Outputs, regard.Outputs])
assert_type(
    regard.attention_vjp_jvp(q, q, q, q, regard.Differential(query=q)), tuple[regard.Differential, regard.Outputs]
)

regard.attention(q, q, q, casual=True)  # refused
regard.attention(q, q, q, layout="bshd")  # refused
regard.attention(q, q, q, dropout="much")  # refused
regard.attention_vjp(q, q, q, q, casual=True)  # refused
regard.attention([[1.0]], q, q)  # refused
