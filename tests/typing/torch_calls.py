"""Calls on PyTorch tensors, as a user's type checker sees them. A line that must be refused says so."""

from typing import assert_type

import torch

import regard
import regard.torch as rt

q = torch.zeros(2, 8, 10, 64)

assert_type(regard.attention(q, q, q, bias=torch.zeros(8, 1, 10)), torch.Tensor)
assert_type(regard.attention(q, q, q, return_weights=True), tuple[torch.Tensor, torch.Tensor])
assert_type(regard.attention(q, q, q, observe=["lse"]), tuple[torch.Tensor, regard.Seen])
assert_type(regard.weights(q, q), torch.Tensor)
assert_type(regard.attention(q, q, q, metric=torch.eye(64)), torch.Tensor)
assert_type(regard.attention(q, q, q).sum(), torch.Tensor)
assert_type(regard.multihead_attention(q, q, q, 8, causal=True), torch.Tensor)
assert_type(regard.linear_attention(q, q, q), torch.Tensor)
assert_type(regard.hopfield(q, q).states, torch.Tensor)
assert_type(regard.merge((q, q[..., 0])), tuple[torch.Tensor, torch.Tensor])

stack = rt.Transformer(2, 64, 8, causal=True, positions="rope", norm="rms", norm_first=True, mask=regard.window(8))
block = rt.TransformerBlock(64, 8, causal=True, num_kv_heads=2, cross_attention=True)
heads = rt.MultiHeadAttention(64, 8, causal=True, score=regard.softcap(5.0))
assert_type(
    rt.Transformer.from_torch(torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2), 1), causal=True),
    rt.Transformer,
)

regard.attention(q, q, q, is_causal=True)  # refused
rt.Transformer(2, 64, 8, casual=True)  # refused
rt.Transformer(2, 64, 8, norm="batch")  # refused
rt.TransformerBlock(64, 8, casual=True)  # refused
rt.TransformerBlock(64, 8, scale="1")  # refused
rt.MultiHeadAttention(64, 8, casual=True)  # refused
rt.MultiHeadAttention(64, 8, attn_mask=None)  # refused
heads.forward(q, is_causal=True)  # refused
stack.forward(q, maks=None)  # refused
block.forward(q, q, cache=3)  # refused
rt.MultiHeadAttention.from_torch(torch.nn.MultiheadAttention(8, 2), casual=True)  # refused
