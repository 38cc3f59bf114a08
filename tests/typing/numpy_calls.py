"""Calls on NumPy arrays, as a user's type checker sees them. A line that must be refused says so."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import regard
from regard.ops.planning import Plan
from regard.ops.stepping import Steps

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


assert_type(regard.plan(q, q, q, causal=True), Plan)
assert_type(regard.plan((8, 10, 64), (8, 10, 64), (8, 10, 64), dtype="float16", engine="tiled"), Plan)
assert_type(regard.plan(n=10, d=64, heads=8, kv_heads=2, causal=True), Plan)
assert_type(regard.steps(q, q, q, causal=True), Steps)
assert_type(regard.steps(q, q, q, dout=q), Steps)
assert_type(regard.hopfield(q, q, beta=2.0, steps=3), regard.Retrieval[NDArray[np.float32]])
assert_type(regard.attention(q, q, q, observe=[regard.renyi(2)])[1], regard.Seen)
assert_type(regard.merge((q, q[..., 0]), (q, q[..., 0])), tuple[NDArray[np.float32], NDArray[np.float32]])
assert_type(regard.linear_attention(q, q, q, feature_map="relu", causal=True), NDArray[np.float32])
assert_type(regard.multihead_attention(q, q, q, 8, w_o=q[0], causal=True), NDArray[np.float32])
assert_type(
    regard.multihead_attention(q, q, q, 8, return_weights=True), tuple[NDArray[np.float32], NDArray[np.float32]]
)
assert_type(regard.multihead_attention(q, q, q, 8, observe=["lse"]), tuple[NDArray[np.float32], regard.Seen])

assert_type(regard.attention(q, q, q, metric=q[0, :2, :2]), NDArray[np.float32])
g, (primal, tangent) = regard.attention_vjp(q, q, q, q, metric=q), regard.attention_jvp(q, q, q, dquery=q)
assert_type((g.query.shape, g.metric.shape, primal.out.shape), tuple[Any, Any, Any])
assert_type(regard.plan(n=10, d=64, ranks=2).ranks.deal, str | Any)
assert_type(regard.weights(q, q, metric=q), NDArray[np.float32])

regard.attention(q, q, q, metric="identity")  # refused
regard.attention(q, q, q, observe=["entropi"])  # refused
regard.multihead_attention(q, q, q, 8, observe=["entropi"])  # refused
regard.export_wasm("attention", statistics=["entropi"])  # refused
regard.attention_jvp(q, q, q, dmetric=1)  # refused
regard.attention(q, q, q, casual=True)  # refused
regard.attention(q, q, q, layout="bshd")  # refused
regard.attention(q, q, q, dropout="much")  # refused
regard.attention_vjp(q, q, q, q, casual=True)  # refused
regard.attention([[1.0]], q, q)  # refused
regard.attention(q, q, q, scale="1")  # refused
regard.attention_vjp(q, q, q, q, outputs=q)  # refused
regard.attention_jvp(q, q, q, dquery=q, is_causal=True)  # refused
regard.attention_vjp_jvp(q, q, q, q, scale="1")  # refused
regard.weights(q, q, dropout=0.1)  # refused
regard.weights(q, q, rows=3)  # refused
regard.plan(n=10)  # refused
regard.plan(q, q, q, n=10, d=64)  # refused
regard.plan(n=10, d=64, casual=True)  # refused
regard.steps(q, q, q, casual=True)  # refused
regard.hopfield(q, q, beta="1")  # refused
regard.renyi("2")  # refused
regard.merge(q, q)  # refused
regard.linear_attention(q, q, q, casual=True)  # refused
regard.multihead_attention(q, q, q, 8, casual=True)  # refused
regard.multihead_attention(q, q, q, 8, layout="bnhd")  # refused
regard.multihead_attention(q, q, q, "8")  # refused
