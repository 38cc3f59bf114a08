"""Calls on PyTorch tensors, as a user's type checker sees them. A line that must be refused says so."""

from typing import assert_type

import torch

import regard

q = torch.zeros(2, 8, 10, 64)

assert_type(regard.attention(q, q, q, bias=torch.zeros(8, 1, 10)), torch.Tensor)
assert_type(regard.attention(q, q, q, return_weights=True), tuple[torch.Tensor, torch.Tensor])
assert_type(regard.attention(q, q, q, observe=["lse"]), tuple[torch.Tensor, regard.Seen])
assert_type(regard.weights(q, q), torch.Tensor)
assert_type(regard.attention(q, q, q).sum(), torch.Tensor)

regard.attention(q, q, q, is_causal=True)  # refused
