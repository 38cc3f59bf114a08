"""Batches without their padding, and with it again, as `flash_attn.bert_padding`."""

from __future__ import annotations  # so that `help` shows the names of types

import torch
import torch.nn.functional as F
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return the rows `indices` (m,) of `input` (n, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Put `values` (m, ...) into the rows `indices` of zeros (first_axis_dim, ...)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows `indices` of `input`, and `input` for a residual connection."""
    return index_first_axis(input, indices), input


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch.

    Args:
        hidden_states: (batch, n, ...).
        attention_mask: (batch, n), booleans or 0/1 integers, 1 for a token.
        unused_mask: the same for rows that are packed too, but are not used.

    Returns the packed rows (total, ...), their indices (total,) in the flattened batch, the ends of
    sequences (batch + 1,) int32, the length of the longest, and the number of tokens in each
    (batch,), of attention_mask alone.

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, ends, longest, used = unpad_input(torch.arange(12.0).reshape(2, 3, 2), mask)
    >>> indices.tolist(), ends.tolist(), longest
    ([0, 1, 3], [0, 2, 3], 2)
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = packed.sum(-1, dtype=torch.int32)
    indices = packed.flatten().nonzero().flatten()
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_ends(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the tokens of a padded batch whose rows hold several sequences.

    Args:
        hidden_states: (batch, n, ...).
        attention_mask_in_length: (batch, n) integers, in each row first the lengths of its
            sequences, then zeros.

    Returns the packed rows, their indices, the ends of sequences and the length of the longest, as
    `unpad_input` does.
    """
    rows = attention_mask_in_length.sum(-1, keepdim=True)
    n = attention_mask_in_length.shape[-1]
    indices = (torch.arange(n, device=rows.device) < rows).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_ends(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put packed rows (total, ...) back into a batch (batch, seqlen, ...), with zeros as padding.

    indices: those that `unpad_input` returned.
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _ends(lengths: Tensor) -> tuple[Tensor, int]:
    """Return the ends of sequences, (batch + 1,) int32, and the length of the longest."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
