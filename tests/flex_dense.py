"""FlexAttention's meaning over whole rows, for functions of (score, b, h, q, kv) and (b, h, q, kv) on tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dense import attend, scores

Function = Callable[..., Any]


class Indexing(TorchFunctionMode):
    """``tensor[b, i]`` of indices under `vmap`, by an operator that has all derivatives.

    ``x.float()`` is of PyTorch's default dtype, as it is of the call's in rules.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].to(torch.get_default_dtype())
        if function is torch.Tensor.__getitem__:
            x, given = args[0], list(args[1]) if isinstance(args[1], tuple) else [args[1]]
            if Ellipsis in [index for index in given if not isinstance(index, torch.Tensor)]:
                at = next(n for n, index in enumerate(given) if index is Ellipsis)
                given[at : at + 1] = [slice(None)] * (x.ndim - len(given) + 1)
            if any(isinstance(index, torch.Tensor) for index in given):
                entries = [None if isinstance(index, slice) else torch.as_tensor(index) for index in given]
                return torch.ops.aten.index(x, entries)
        return function(*args, **(kwargs or {}))


def vmapped(function: Function, *before: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The values of a function of 0-dimensional tensors at all indices of (b, h, q, kv)."""
    first = (0,) * len(before)
    for axis in reversed(range(4)):
        function = torch.vmap(function, (*first, *(0 if n == axis else None for n in range(4))))
    with Indexing():
        return function(*before, *(torch.arange(n) for n in shape))


def scores_of(
    q: torch.Tensor, k: torch.Tensor, score_mod: Function | None = None, mask_mod: Function | None = None,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The scores (b, h, n_q, n_k) after both functions, -inf where a key is hidden."""
    s = scores(q, k, scale)
    if score_mod is not None:
        s = vmapped(score_mod, s, shape=s.shape)
    if mask_mod is not None:
        s = torch.where(vmapped(mask_mod, shape=s.shape), s, -torch.inf)
    return s


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *functions: Function | None, **options: Any
) -> torch.Tensor:
    """The outputs of attention with both functions."""
    return attend(scores_of(q, k, *functions, **options), v)[0]
