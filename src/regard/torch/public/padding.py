"""Padding masks as rules."""

from typing import Any

import torch

from regard import rules
from regard.rules import Mask
from regard.torch.tensors.arrays import concrete, values


def real_keys(flags: torch.Tensor) -> Mask | None:
    """Return the rule of a padding mask (batch, n_k) of booleans, True = a real key; None if every key is real.

    The flags are read now. Padding on the right alone is its lengths, whose bounds take no look at the flags; other
    padding, and flags without values yet, are a table.
    """
    if concrete(flags):
        real = values(flags)
        if real.all():
            return None
        if not (real[:, 1:] > real[:, :-1]).any():
            return rules.padding(real.sum(axis=1))
    table = rules.table(flags)

    def padding(b: Any, h: Any, i: Any, j: Any) -> Any:
        return table[b, j]

    return rules.mask(padding)
