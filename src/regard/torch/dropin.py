"""PyTorch's own function with PyTorch's conventions, and a way to put it in the place of PyTorch's."""

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from regard.api import attention
from regard.forks import renewed
from regard.torch.varlen import jagged_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, its arguments, conventions and errors, in O(n) memory.

    It differs from `regard.attention` in what PyTorch does otherwise:

                                     here, as in PyTorch                  regard.attention
        three dimensions             (batch, n, d)                        (heads, n, d)
        is_causal, n_q ≠ n_k         from the top left: j ≤ i             bottom right: j ≤ i + n_k − n_q
        a float as the mask          is added                             an error: give bias=
        grouped heads                only with enable_gqa                 wherever heads are a multiple
        dropout                      from the default generator           that, or from seed=

    True means attend in both, and a query that may see nothing gives 0 in both. In PyTorch, NaN in a key or value that
    the mask hides reaches the output of some queries or of all, depending on the kernel it takes; here it reaches none.

    Args:
        query: (..., h, n_q, d); leading dimensions and heads broadcast.
        key: (..., h_kv, n_k, d).
        value: (..., h_kv, n_k, d_v).
        attn_mask: booleans, True = attend, or floats that are added to the scores (and have a gradient), of the dtype
            of query or float32; they broadcast to (..., h, n_q, n_k).
        dropout_p: share of the weights that is dropped, always: pass 0 in evaluation.
        is_causal: query i sees the keys j ≤ i; not together with attn_mask.
        scale: of the products, 1/√d unless given.
        enable_gqa: groups of h / h_kv query heads share a key-value head.

    Raises RuntimeError as PyTorch does, where shapes, dtypes or arguments do not fit.

    >>> import torch, regard.torch
    >>> q, k, v = torch.randn(3, 2, 8, 10, 16)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(regard.torch.scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-5)
    True
    """
    if query.is_nested:
        if attn_mask is not None:
            raise RuntimeError("Explicit attn_mask is not supported with nested tensors")
        if is_causal and not torch.equal(query.offsets(), key.offsets()):
            raise RuntimeError("is_causal needs the same lengths of query and key where they are nested tensors")
        given = {"causal": is_causal, "scale": scale, "dropout": dropout_p}
        return jagged_attention(query, key, value, **given)
    dtypes = query.dtype, key.dtype, value.dtype
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, "
            f"but got query.dim: {query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, "
            f"but got query.dtype: {dtypes[0]} key.dtype: {dtypes[1]} and value.dtype: {dtypes[2]} instead."
        )
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    options: dict[str, Any] = {}
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        options.update(causal=True, offset=0)
    if attn_mask is not None:
        if attn_mask.dtype is not torch.bool and attn_mask.dtype not in (query.dtype, torch.float32):
            raise RuntimeError(
                "Expected attn_mask dtype to be bool or float or to match query dtype, "
                f"but got attn_mask.dtype: {attn_mask.dtype} and query.dtype: {query.dtype} instead."
            )
        options["mask" if attn_mask.dtype is torch.bool else "bias"] = attn_mask
    if scale is not None:
        options["scale"] = scale
    if 0.0 < dropout_p < 1.0:
        options["dropout"] = dropout_p
    try:
        out: torch.Tensor = attention(*_heads(query, key, value, enable_gqa), **options)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None
    return torch.nn.functional.dropout(out, 1.0) if dropout_p == 1.0 else out


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, ...]:
    """Operands whose heads are as `regard.attention` has them; views but where PyTorch repeats heads unevenly."""
    ranks = q.dim(), k.dim(), v.dim()
    if max(ranks) == 2:
        return q, k, v
    q, k, v = (x if x.dim() > 2 else x[None] for x in (q, k, v))
    h, h_k, h_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if h == h_k == h_v:
        return q, k, v
    if grouped:
        if h_k == 0 or h_v == 0 or h % h_k or h % h_v:
            raise RuntimeError("Number of heads in key and value must divide the number of heads in query.")
        shared = math.lcm(h_k, h_v)
        return q, *(x if n == shared else x.repeat_interleave(shared // n, -3) for x, n in ((k, h_k), (v, h_v)))
    most = max(h, h_k, h_v)
    for n in (h, h_k, h_v):
        if n not in (1, most):
            raise RuntimeError(f"The heads of query, key and value must broadcast, but got {h}, {h_k} and {h_v}.")
    single = h_k == h_v == 1
    return tuple(
        x if x.shape[-3] == most or (single and x is not q) else x.expand(*x.shape[:-3], most, *x.shape[-2:])
        for x in (q, k, v)
    )


_lock = renewed(sys.modules[__name__], "_lock", threading.Lock)
_depth = 0
_original: Any = None


@contextmanager
def sdpa() -> Iterator[None]:
    """`F.scaled_dot_product_attention` is `regard.torch.scaled_dot_product_attention` inside of this `with`.

    For models that cannot be edited: everything that looks the function up in `torch.nn.functional` when it calls it,
    `torch.nn.MultiheadAttention` and the Transformer layers among them, whose fused inference path is off meanwhile.
    Code that has imported the function itself keeps PyTorch's, and a compiled model what it compiled.

    May be nested. The function belongs to the process: while one thread is inside, all threads call it, and PyTorch's
    is back when the last has left.

    >>> import torch, regard.torch
    >>> q = torch.randn(2, 8, 10, 16)
    >>> with regard.torch.sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(out, regard.attention(q, q, q))
    True
    """
    global _depth, _original
    functional: Any = torch.nn.functional
    with _lock:
        if _depth == 0:
            _original = functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            functional.scaled_dot_product_attention = scaled_dot_product_attention
            torch.backends.mha.set_fastpath_enabled(False)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                functional.scaled_dot_product_attention = _original[0]
                torch.backends.mha.set_fastpath_enabled(_original[1])
                _original = None
