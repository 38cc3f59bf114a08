"""Public functions made of PyTorch's own operations and of attention.

Functions differentiate as PyTorch's operations do. `torch.compile` cannot follow their checks, which see NumPy arrays:
in its graph each is one call, which is traced with its tensors afterwards.
"""

from typing import Any

import numpy as np
import torch

from regard.arguments.frameworks import Namespace
from regard.core.tensors import NUMPY
from regard.ops import linear, merging, metric, multihead, retrieval
from regard.torch.tensors import process_group
from regard.torch.tensors.arrays import autocast, autocasting, checked, hollow
from regard.torch.tensors.modes import allowed_in_graphs, example, sizes

TYPES = {same: kind for kind, same in NUMPY.items()}

SPACE = Namespace(
    xp=torch,
    hollow=lambda name, x: hollow(checked(name, x)),
    cast=lambda x, dtype: x.to(TYPES[np.dtype(dtype)]),
    constant=lambda x: x.detach(),
    like=lambda a, x: torch.as_tensor(a, device=x.device),
)


@allowed_in_graphs
def merge(*parts: Any, sink: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `regard.merge` on tensors.

    For symbolic sizes, checks use the sizes of the example.
    """
    seen = SPACE._replace(hollow=lambda name, x: hollow(checked(name, x), example(x)))
    return merging.combined(seen, parts, sink)


@allowed_in_graphs
def multihead_attention(query: Any, key: Any, value: Any, num_heads: int, **options: Any) -> Any:
    """Compute `regard.multihead_attention` on tensors."""
    return multihead.projected(SPACE, query, key, value, num_heads, **options)


@allowed_in_graphs
def linear_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.linear_attention` on tensors."""
    process_group.refuse("regard.linear_attention", "give it whole tensors outside")
    return linear.in_parallel(SPACE, query, key, value, **options)


@allowed_in_graphs
def hopfield(state: Any, patterns: Any, *, beta: Any = None, steps: Any = 1) -> Any:
    """Compute `regard.hopfield` on tensors."""
    process_group.refuse("regard.hopfield", "give it whole patterns outside")
    return retrieval.retrieved(SPACE, state, patterns, beta, steps)


def query_times(given: Any, query: Any, layout: Any) -> Any:
    """Return the product of a query and a metric, as PyTorch multiplies them.

    16-bit products are computed in float32, then rounded. PyTorch traces, batches and differentiates the product.
    """
    compiling = torch.compiler.is_compiling()
    for name, x in (("query", query), ("metric", given)):
        if not compiling:
            checked(name, x)
        elif not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor where others of the call are, got {type(x).__name__}")
    if query.ndim < 2:
        return query  # the call will be refused
    shapes = (given.shape, query.shape) if compiling else (sizes(given), sizes(query))
    metric.fits(shapes[0], shapes[1], layout)
    if autocasting(query):
        query = autocast(query)
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return metric.framework_product(query, given, layout, lambda x: x.to(wide)).to(query.dtype)
