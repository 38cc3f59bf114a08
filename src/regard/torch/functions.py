"""Public functions made of PyTorch's own operations and of attention, which differentiate as those do."""

from typing import Any

import numpy as np
import torch

from regard import linear, merging, multihead
from regard.frameworks import Namespace
from regard.torch.arrays import NUMPY, checked

TYPES = {same: kind for kind, same in NUMPY.items()}


def hollow(x: torch.Tensor) -> Any:
    """An array of the shape and dtype of a tensor, to be checked in its place."""
    return np.broadcast_to(np.empty((), NUMPY[x.dtype]), tuple(x.shape))


SPACE = Namespace(
    xp=torch,
    hollow=lambda name, x: hollow(checked(name, x)),
    cast=lambda x, dtype: x.to(TYPES[np.dtype(dtype)]),
    constant=lambda x: x.detach(),
    like=lambda a, x: torch.as_tensor(a, device=x.device),
)


def merge(*parts: Any, sink: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """`regard.merge` on tensors."""
    return merging.combined(SPACE, parts, sink)


def multihead_attention(query: Any, key: Any, value: Any, num_heads: int, **options: Any) -> Any:
    """`regard.multihead_attention` on tensors."""
    return multihead.projected(SPACE, query, key, value, num_heads, **options)


def linear_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`regard.linear_attention` on tensors."""
    return linear.in_parallel(SPACE, query, key, value, **options)
