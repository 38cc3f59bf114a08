"""`flex_attention` of `torch.nn.attention.flex_attention`, and its replacement in PyTorch.

A `BlockMask` is a rule here: its function where its tables follow from it, else both.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard.ops.attention import attention
from regard.rules import EVERYTHING, NOTHING, Mask, Ranges, blocks, classify, mask, reads
from regard.torch.dropins.packages import Attribute, Shared, with_attributes
from regard.torch.tensors.arrays import values
from regard.torch.tensors.process_group import whole

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

MOST_BLOCKS = 2**20  # of a BlockMask whose tables are compared with its function
UNBOUNDED = 2**30  # the block size of the mask that PyTorch makes where it is given none


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute `torch.nn.attention.flex_attention.flex_attention` in O(n) memory, with all derivatives.

    The first query has index 0, whatever the number of keys. A query that may see nothing gives 0,
    and lse and max_scores of -inf. What a function cannot do in a rule raises, and is named.

    Args:
        query: (b, h, n_q, d).
        key: (b, h_kv, n_k, d); b may be 1 with a block_mask.
        value: (b, h_kv, n_k, d_v).
        score_mod: function of (score, b, h, q, kv). Floats that it captures have gradients.
        block_mask: a pair is visible if its block is listed as full, or is listed and its
            ``mask_mod`` holds.
        scale: factor of the products, by default 1/√d.
        enable_gqa: groups of h / h_kv query heads share a key-value head.
        return_lse: return lse too, the logarithm of the sum of exponentials (b, h, n_q); PyTorch is
            replacing it by return_aux.
        kernel_options: options of PyTorch's own kernels, without effect.
        return_aux: which of lse and max_scores to return as an `AuxOutput`.

    Raises ValueError, RuntimeError or NotImplementedError as PyTorch does, where shapes, devices or
    options do not fit.

    >>> import torch, regard.torch
    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> q, k, v = torch.randn(3, 1, 2, 256, 16, requires_grad=True)
    >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    >>> out = regard.torch.flex_attention(q, k, v, lambda s, b, h, i, j: s / (1 + h), causal)
    >>> out.sum().backward()
    """
    _check(query, key, value, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux exclude each other: give return_aux=AuxRequest(lse=True)")
    options: dict[str, Any] = {"offset": 0}
    if block_mask is not None:
        _check_mask(block_mask, query, key)
        options["mask"] = _visible(block_mask, query, key)
    elif query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query and key must have one batch size where block_mask is None, got {query.shape[0]} and {key.shape[0]}"
        )
    if score_mod is not None:
        options["score"] = score_mod
    if "mask" in options or "score" in options:  # as in PyTorch, a table may have more entries than the call
        options["origin"] = (0, 0, 0)
    if scale is not None:
        options["scale"] = scale
    lse, highest = (return_lse, False) if return_aux is None else (return_aux.lse, return_aux.max_scores)
    if not (lse or highest):
        out = attention(query, key, value, **options)
        return out if return_aux is None else (out, _aux(None, None))
    out, seen = attention(query, key, value, observe=["lse", "max"] if highest else ["lse"], **options)
    if return_aux is None:
        return out, seen["lse"]
    return out, _aux(seen["lse"] if lse else None, max_scores(seen) if highest else None)


def _aux(lse: torch.Tensor | None, highest: torch.Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput  # in some versions with SymPy

    return AuxOutput(lse, highest)


def max_scores(seen: Any) -> torch.Tensor:
    """Return the largest scores, without a derivative as in PyTorch.

    The largest weight is exp(largest score - lse).
    """
    lse = seen["lse"].detach()
    return torch.where(lse > -torch.inf, seen["max"].detach().log() + lse, lse)


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    """Raise what PyTorch raises for operands that do not fit."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise NotImplementedError("flex_attention takes no nested tensors; see regard.torch.jagged_attention")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device}, {value.device}"
        )
    ranks = query.dim(), key.dim(), value.dim()
    if min(ranks) < 2:
        raise ValueError(f"query, key and value must have at least 2 dimensions, got {ranks}")
    if query.size(-1) != key.size(-1):
        raise ValueError(f"query and key must have one head dimension, got {query.size(-1)} and {key.size(-1)}")
    if ranks != (4, 4, 4):
        raise NotImplementedError(f"query, key and value must have 4 dimensions, got {ranks}")
    heads, shared = query.size(1), key.size(1)
    if enable_gqa and (not shared or heads % shared):
        raise ValueError(f"heads of query must be a multiple of those of key with enable_gqa, got {heads} and {shared}")
    if not enable_gqa and heads != shared:
        raise ValueError(f"query and key must have as many heads without enable_gqa=True, got {heads} and {shared}")


def _check_mask(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> None:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {type(block_mask).__name__}; see create_block_mask")
    if block_mask.kv_indices.dim() != 4:
        raise ValueError(
            f"block_mask must have batch and heads, got tables of shape {tuple(block_mask.kv_indices.shape)}"
        )
    batch = block_mask.kv_num_blocks.size(0)
    if query.size(0) != key.size(0) and batch != query.size(0):
        raise ValueError(
            f"query and key, or query and block_mask, must have one batch size, "
            f"got {query.size(0)}, {key.size(0)} and {batch}"
        )
    if query.device != block_mask.kv_num_blocks.device:
        raise RuntimeError(
            f"query and block_mask must be on one device, got {query.device} and {block_mask.kv_num_blocks.device}"
        )
    lengths, covered = lengths_of(query, key), tuple(block_mask.seq_lengths)
    if not _everything(block_mask) and lengths != covered:
        raise ValueError(
            f"block_mask was made for {covered[0]} queries and {covered[1]} keys, got {lengths[0]} and {lengths[1]}: "
            "make another with create_block_mask"
        )


def lengths_of(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Return the positions of query and key, over all processes inside of `context_parallel`."""
    return whole(query.size(-2)), whole(key.size(-2))


def _everything(block_mask: BlockMask) -> bool:
    """Return True if one block stands for all pairs, as where PyTorch is given no mask."""
    return bool(min(block_mask.BLOCK_SIZE) >= UNBOUNDED)


def _visible(block_mask: BlockMask, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Return the mask of a `BlockMask`: that of its function and, where they say less, of its tables."""
    from torch.nn.attention.flex_attention import noop_mask

    function = block_mask.mask_mod
    if _everything(block_mask):
        return function
    partial, full = _tables(block_mask)
    if not torch.compiler.is_compiling():
        rule = mask(function)
        if _follows(rule, partial, full, block_mask.BLOCK_SIZE, query, key):
            return rule
        function = rule
    repeat: Any = torch.repeat_interleave if torch.compiler.is_compiling() else np.repeat
    rows, columns = block_mask.BLOCK_SIZE
    size = math.gcd(rows, columns)

    def listed(table: Any) -> Mask:
        return blocks(repeat(repeat(table, rows // size, -2), columns // size, -1), size)

    rule = listed(partial) if block_mask.mask_mod is noop_mask else listed(partial) & function
    return rule if full is None else rule | listed(full)


def _tables(block_mask: BlockMask) -> Any:
    """Return which blocks are listed, and which as full: booleans (b, h, blocks of queries, blocks of keys).

    Booleans are tensors in a graph, and arrays elsewhere, as nothing in them has a derivative.
    """
    n = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])

    def table(counts: Any, indices: Any) -> Any:
        if counts is None:
            return None
        if torch.compiler.is_compiling():
            used = torch.arange(indices.size(-1), device=indices.device) < counts[..., None]
            empty = counts.new_zeros((*counts.shape, n + 1))
            return empty.scatter(-1, indices.where(used, n).long(), 1)[..., :n] != 0
        counts, indices = values(counts), values(indices)
        used, flags = np.arange(indices.shape[-1]) < counts[..., None], np.zeros((*counts.shape, n + 1), bool)
        np.put_along_axis(flags, np.where(used, indices, n), True, -1)  # entries that are not used are undefined
        return flags[..., :n]

    return (
        table(block_mask.kv_num_blocks, block_mask.kv_indices),
        table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )


def _follows(
    rule: Mask, partial: Any, full: Any, size: tuple[int, int], query: torch.Tensor, key: torch.Tensor
) -> bool:
    """Return True if the bounds of a mask prove that its tables add nothing to it.

    Then each block that is not listed has no visible pair, and each full one has all.
    """
    if rule.foreign or partial.size > MOST_BLOCKS:
        return False
    read, lengths = reads(rule.node), (query.size(0), query.size(1), *lengths_of(query, key))

    def ranges(axis: int) -> Any:
        n, length = partial.shape[axis], lengths[axis]
        whole = n == 1 or (axis < 2 and "bh"[axis] not in read)
        starts = np.arange(1 if whole else n) * (1 if axis < 2 else size[axis - 2])
        ends = np.full(1, length - 1) if whole else np.minimum(np.append(starts[1:], length), length) - 1
        shape = [-1 if at == axis else 1 for at in range(4)]
        return starts.reshape(shape), ends.reshape(shape)

    dtype = np.float64 if query.dtype is torch.float64 else np.float32
    b, h, i, j = map(ranges, range(4))
    kinds = classify(rule.node, None, Ranges(b=b, h=h, i=i, j=j, keys=lengths[3], dtype=dtype))
    every = np.False_ if full is None else full
    return bool(np.all(partial | every | (kinds == NOTHING)) and np.all(~every | (kinds == EVERYTHING)))


_shared = Shared()


@contextmanager
def flex() -> Iterator[None]:
    """Replace PyTorch's `flex_attention` inside of a `with`, also where it was compiled.

    The replacement reaches every loaded module that has the function, or
    ``torch.compile(flex_attention)``, by a name of its own, and models of transformers with
    ``attn_implementation="flex_attention"``. A model that was compiled as a whole keeps what it
    compiled.

    May be nested. The function belongs to the process: while one thread is inside, all threads call
    it. PyTorch's is restored when the last has left.

    >>> import torch, regard.torch
    >>> from torch.nn.attention import flex_attention as module
    >>> q = torch.randn(1, 2, 10, 16, requires_grad=True)
    >>> with regard.torch.flex():
    ...     module.flex_attention(q, q, q).sum().backward()
    """
    with _shared.held(lambda: with_attributes(list(_references()))):
        yield


def _references() -> Iterator[Attribute]:
    """Yield each place that holds PyTorch's function, with ours."""
    from torch.nn.attention.flex_attention import flex_attention as theirs

    for module in list(sys.modules.values()):
        for name, x in list(getattr(module, "__dict__", {}).items()):
            compiled = type(x) is types.FunctionType and vars(x).get("_torchdynamo_orig_callable") is theirs
            if x is theirs or compiled:
                yield module, name, flex_attention
    wrapped = getattr(sys.modules.get("transformers.integrations.flex_attention"), "WrappedFlexAttention", None)
    if wrapped is not None:  # holds a compiled one
        yield wrapped, "_instance", None
        yield wrapped, "__call__", lambda self: flex_attention
