"""Public functions made of PyTorch's own operations and of attention.

They differentiate as those do.
"""

from typing import Any

import numpy as np
import torch

from regard.arguments.frameworks import Namespace
from regard.core.tensors import NUMPY
from regard.ops import linear, merging, multihead, retrieval
from regard.torch.arrays import checked, hollow
from regard.torch.graph.modes import example

TYPES = {same: kind for kind, same in NUMPY.items()}

SPACE = Namespace(
    xp=torch,
    hollow=lambda name, x: hollow(checked(name, x)),
    cast=lambda x, dtype: x.to(TYPES[np.dtype(dtype)]),
    constant=lambda x: x.detach(),
    like=lambda a, x: torch.as_tensor(a, device=x.device),
)


def merge(*parts: Any, sink: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `regard.merge` on tensors.

    Where sizes are symbols, the checks see those of the example.
    """
    seen = SPACE._replace(hollow=lambda name, x: hollow(checked(name, x), example(x)))
    return merging.combined(seen, parts, sink)


def multihead_attention(query: Any, key: Any, value: Any, num_heads: int, **options: Any) -> Any:
    """Compute `regard.multihead_attention` on tensors."""
    return multihead.projected(SPACE, query, key, value, num_heads, **options)


def linear_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.linear_attention` on tensors."""
    return linear.in_parallel(SPACE, query, key, value, **options)


def hopfield(state: Any, patterns: Any, *, beta: Any = None, steps: Any = 1) -> Any:
    """Compute `regard.hopfield` on tensors."""
    return retrieval.retrieved(SPACE, state, patterns, beta, steps)
