"""`F.scaled_dot_product_attention`, and its replacement in PyTorch."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from regard.arguments.frameworks import imported
from regard.ops.attention import attention
from regard.ops.callcache import entries, signature
from regard.rules import type_name
from regard.torch.autograd.functions import AttentionFunction
from regard.torch.call.prepared import tensor_operands, with_tensor
from regard.torch.dropins import modules, nested
from regard.torch.dropins.packages import Shared, with_attributes
from regard.torch.public.attention import watching
from regard.torch.tensors import modes
from regard.torch.tensors.arrays import autocast, changes_nothing

Tensor = torch.Tensor
KNOWN = {torch.Tensor, torch.nn.Parameter, nested.Jagged, type(None)}
DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


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
    """Compute `torch.nn.functional.scaled_dot_product_attention` in O(n) memory.

    Its arguments, conventions and errors are the same. It differs from `regard.attention` in what
    PyTorch does otherwise:

                               here, as in PyTorch           regard.attention
        three dimensions       (batch, n, d)                 (heads, n, d)
        is_causal, n_q ≠ n_k   from the top left: j ≤ i      bottom right: j ≤ i + n_k − n_q
        a float as the mask    is added                      an error: give bias=
        grouped heads          only with enable_gqa          wherever heads are a multiple
        dropout                from the default generator    that, or from seed=

    True means attend in both, and a query that may see nothing gives 0 in both. In PyTorch, NaN in
    a hidden key or value reaches the output of some or all queries, depending on its kernel. Here
    it reaches none.

    Args:
        query: (..., h, n_q, d); leading dimensions and heads broadcast.
        key: (..., h_kv, n_k, d).
        value: (..., h_kv, n_k, d_v).
        attn_mask: booleans, True = attend, or floats that are added to the scores (and have a
            gradient), of the dtype of query or float32; they broadcast to (..., h, n_q, n_k). Or a
            `CausalBias` of `torch.nn.attention.bias`.
        dropout_p: share of the weights that is dropped, always: pass 0 in evaluation.
        is_causal: query i sees the keys j ≤ i; not together with attn_mask.
        scale: factor of the products, by default 1/√d.
        enable_gqa: groups of h / h_kv query heads share a key-value head.

    Nested tensors of both layouts are attention of each sequence by itself, of the layout and
    lengths of query. Arguments with `__torch_function__`, and a `TorchFunctionMode`, are handed
    this function, as PyTorch hands them its.

    Raises TypeError, RuntimeError or ValueError as PyTorch does, where types, shapes or values do
    not fit.

    >>> import torch, regard.torch
    >>> q, k, v = torch.randn(3, 2, 8, 10, 16)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> out = regard.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, expected, atol=1e-5)
    True
    """
    if has_torch_function_variadic(query, key, value, attn_mask):
        given = query, key, value, attn_mask
        others = modes.functions_overridden() and not all(type(x) in KNOWN or _is_causal_bias(x) for x in given)
        if others or modes.any_function_mode():
            return _handed_over(given, dropout_p, is_causal, scale, enable_gqa)
    return attended(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float,
    is_causal: bool, *, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute `scaled_dot_product_attention`, whatever modes there are."""
    if type(dropout_p) is float and not dropout_p and not torch.compiler.is_compiling():
        out = _cached(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    if not type(query) is type(key) is type(value) is Tensor:
        query, key, value = _tensor("query", query), _tensor("key", key), _tensor("value", value)
    if type(dropout_p) is not float:
        dropout_p = _number("dropout_p", dropout_p)
    if scale is not None and type(scale) is not float:
        scale = _number("scale", scale)
    if type(is_causal) is not bool:
        is_causal = _boolean("is_causal", is_causal)  # type: ignore[unreachable]
    if type(enable_gqa) is not bool:
        enable_gqa = _boolean("enable_gqa", enable_gqa)  # type: ignore[unreachable]
    causal_bias = _is_causal_bias(attn_mask)
    if attn_mask is not None and not causal_bias:
        attn_mask = _tensor("attn_mask", attn_mask)
    if query.is_nested or key.is_nested or value.is_nested:
        return nested.attention(
            scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    ranks = query.ndim, key.ndim, value.ndim
    if min(ranks) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, "
            f"but got query.dim: {ranks[0]} key.dim: {ranks[1]} and value.dim: {ranks[2]} instead."
        )
    if not query.dtype == key.dtype == value.dtype:
        query, key, value = _of_one_dtype(query, key, value)
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    options: dict[str, Any] = {}
    if causal_bias:
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        options.update(causal=True, offset=_offset(attn_mask, query, key))
    elif attn_mask is not None:
        if is_causal:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        options["mask" if attn_mask.dtype is torch.bool else "bias"] = _mask(attn_mask, query)
    elif is_causal:
        options.update(CAUSAL)
    if scale is not None:
        options["scale"] = scale
    if 0.0 < dropout_p < 1.0:
        options["dropout"] = dropout_p
    heads = _heads(query, key, value, enable_gqa)
    try:
        out = attention(*heads, **options)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None
    return torch.nn.functional.dropout(out, 1.0) if dropout_p == 1.0 else out


def _cached(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> torch.Tensor | None:  # fmt: skip
    """Return the output of a cached call of `regard.attention`, or None."""
    if type(is_causal) is not bool or type(enable_gqa) is not bool or watching():
        return None
    dense: tuple[Any, ...] = ()
    if attn_mask is None:
        operands = tensor_operands(query, key, value, steps=not is_causal)
    elif is_causal or not isinstance(attn_mask, Tensor):
        return None
    else:
        name = "mask" if attn_mask.dtype is torch.bool else "bias"
        operands = with_tensor(tensor_operands(query, key, value, steps=False), name, attn_mask)
        dense = (attn_mask,)
    entry = entries().get(signature(operands, _options(is_causal, scale)))
    if entry is None or entry.call is None or (entry.call.cached.grouped and not enable_gqa):
        return None
    out: torch.Tensor | None = entry.call.cached.result(
        entry.call, (query, key, value, *dense), 0, AttentionFunction.apply
    )
    return out


CAUSAL = {"causal": True, "offset": 0}


def _options(is_causal: bool, scale: float | None) -> dict[str, Any]:
    """Return the options of a call, in the order in which its signature has them."""
    options: dict[str, Any] = CAUSAL if is_causal else {}
    return options if scale is None else options | {"scale": scale}


def _handed_over(
    given: tuple[Any, ...], dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any
) -> Any:  # fmt: skip
    """Call the first `TorchFunctionMode` or `__torch_function__` of an argument."""
    query, key, value, attn_mask = given
    options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
    options |= {"scale": scale, "enable_gqa": enable_gqa}
    named = {name: x for name, x in options.items() if x is not DEFAULTS[name]}
    theirs = [x for x in given if type(x) is not Tensor]
    return handle_torch_function(scaled_dot_product_attention, theirs, query, key, value, **named)


def _wrong(name: str, expected: str, x: Any) -> TypeError:
    return TypeError(f"scaled_dot_product_attention(): argument '{name}' must be {expected}, not {type_name(x)}")


def _tensor(name: str, x: Any) -> torch.Tensor:
    """Check a tensor, and unwrap a subclass that changes no operations.

    The plain tensor shares its memory and its gradient.
    """
    if not isinstance(x, Tensor):
        raise _wrong(name, "Tensor", x)
    return x if torch.compiler.is_compiling() or not changes_nothing(x) else x.as_subclass(Tensor)


def _number(name: str, x: Any) -> float:
    """Check what PyTorch takes as a float: a number, or a 0-d tensor without grad."""
    if isinstance(x, torch.SymFloat | torch.SymInt):
        return x
    if isinstance(x, Tensor):
        if x.ndim or x.requires_grad or x.is_complex():
            raise _wrong(name, "float", x)
    elif not isinstance(x, int | float | np.integer | np.floating):
        raise _wrong(name, "float", x)
    return float(x)


def _boolean(name: str, x: Any) -> bool:
    if isinstance(x, torch.SymBool):
        return bool(x)
    raise _wrong(name, "bool", x)


def _of_one_dtype(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast query, key and value by autocast; RuntimeError if their dtypes differ."""
    if torch.is_autocast_enabled(given[0].device.type):
        given = tuple(map(autocast, given))
    query, key, value = given
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, "
            f"but got query.dtype: {query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    return given


def _mask(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Check that a mask has a dtype that PyTorch takes."""
    fits = x.dtype in (torch.bool, torch.float32, query.dtype)
    if not fits and not (x.is_floating_point() and torch.is_autocast_enabled(query.device.type)):
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, "
            f"but got attn_mask.dtype: {x.dtype} and query.dtype: {query.dtype} instead."
        )
    return x


def _is_causal_bias(x: Any) -> bool:
    return type(x) not in KNOWN and type(x) is imported("torch.nn.attention.bias", "CausalBias")


def _offset(bias: Any, query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the position of the first query under a `CausalBias`.

    PyTorch aligns at the top left, except for a rectangular bias of the lower right.
    """
    n_q, n_k = bias.seq_len_q, bias.seq_len_kv
    if n_q == n_k or bias.variant.name == "UPPER_LEFT":
        return 0
    if (query.shape[-2], key.shape[-2]) != (n_q, n_k):
        raise RuntimeError(
            f"attn_mask is a CausalBias of {n_q} queries and {n_k} keys, but got {query.shape[-2]} and {key.shape[-2]}"
        )
    return n_k - n_q


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, ...]:
    """Return operands with heads grouped as in `regard.attention`.

    They are views, except where PyTorch repeats heads unevenly.
    """
    ranks = q.ndim, k.ndim, v.ndim
    if max(ranks) == 2:
        return q, k, v
    if min(ranks) == 2:
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
    h, h_k, h_v = q.shape[-3], k.shape[-3], v.shape[-3]
    if h == h_k == h_v:
        return q, k, v
    if grouped:
        if h_k == 0 or h_v == 0 or h % h_k or h % h_v:
            raise RuntimeError("Number of heads in key and value must divide the number of heads in query.")
        if h_k == h_v:
            return q, k, v
        shared = h_k if h_k % h_v == 0 else h_v if h_v % h_k == 0 else h
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


scaled_dot_product_attention.__prepare_scriptable__ = modules.refuse_script  # type: ignore[attr-defined]
_shared = Shared()


@contextmanager
def sdpa() -> Iterator[None]:
    """Replace `F.scaled_dot_product_attention` inside of a `with`.

    For models that cannot be edited. It reaches everything that looks the function up in
    `torch.nn.functional` when calling it, such as `torch.nn.MultiheadAttention` and the Transformer
    layers. Their fused inference path is off meanwhile. Nested tensors, which PyTorch takes on that
    path alone, are attended to one sequence after the other. Code that imported the function itself
    keeps PyTorch's, and a compiled model what it compiled.

    May be nested. The function belongs to the process: while one thread is inside, all threads call
    it. PyTorch's is restored when the last has left.

    >>> import torch, regard.torch
    >>> q = torch.randn(2, 8, 10, 16)
    >>> with regard.torch.sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(out, regard.attention(q, q, q))
    True
    """
    with _shared.held(_replaced):
        yield


def _replaced() -> ExitStack:
    """Replace PyTorch's function, and what modules do, until the returned stack is closed."""
    stack = modules.held()
    stack.enter_context(
        with_attributes([(torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention)])
    )
    return stack
