"""Drop-in for nested tensors, strided and jagged: each sequence by itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from regard.torch.public.packed import jagged_attention
from regard.torch.tensors.arrays import autocast
from regard.torch.tensors.modes import Jagged, outside_of_graphs

__all__ = ["Jagged", "attention", "multihead"]


@outside_of_graphs("the lengths of nested tensors are values that a graph does not have")
def attention(
    one: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any,
    dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute attention of nested tensors.

    one: the drop-in for dense tensors.

    As in PyTorch, errors are ValueError if a tensor is jagged, and RuntimeError if all are strided or sizes do not fit.
    """
    operands = {"query": query, "key": key, "value": value}
    layouts = {name: str(x.layout).removeprefix("torch.") if x.is_nested else "dense" for name, x in operands.items()}
    error = ValueError if "jagged" in layouts.values() else RuntimeError
    if len(set(layouts.values())) != 1:
        kinds = ", ".join(f"{name} {kind}" for name, kind in layouts.items())
        raise error(f"Expected query, key, and value to be nested tensors of one layout, but got {kinds}")
    if attn_mask is not None:
        raise error("Explicit attn_mask is not supported with nested tensors")
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = map(autocast, (query, key, value))
    if not query.dtype == key.dtype == value.dtype:
        raise error(
            "Expected query, key, and value to have the same dtype, "
            f"but got query.dtype: {query.dtype} key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if not query.size(0) == key.size(0) == value.size(0):
        raise RuntimeError(f"The batches differ: query {query.size(0)}, key {key.size(0)}, value {value.size(0)}")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if layouts["query"] == "jagged":
        return _jagged(one, query, key, value, options)
    parts = list(zip(query.unbind(), key.unbind(), value.unbind(), strict=True))
    if is_causal and any(q.shape[-2] != k.shape[-2] for q, k, _ in parts):
        raise _lengths_differ()
    outs = [one(*part, **options) for part in parts]
    nested: torch.Tensor = torch.nested.as_nested_tensor(outs) if outs else torch.zeros_like(query)
    return nested


def _jagged(
    one: Callable[..., torch.Tensor], query: Any, key: Any, value: Any, options: dict[str, Any]
) -> torch.Tensor:  # fmt: skip
    operands = query, key, value
    ragged = {x._ragged_idx for x in operands}
    if len(ragged) != 1:
        raise ValueError(f"Expected query, key, and value to be ragged on one dimension, but got {sorted(ragged)}")
    if ragged == {1} and min(x.dim() for x in operands) > 3:  # ragged on a batch axis: positions are dense
        ends = [(x.offsets(), x.lengths()) for x in operands]
        for other in ends[1:]:
            if not all(_same(a, b) for a, b in zip(ends[0], other, strict=True)):
                raise RuntimeError("query, key and value that are ragged on a batch must have the same lengths")
        dense = one(*(x.values() for x in operands), **options)
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(dense, *ends[0])
        return nested
    if ragged != {2} or not query.dim() == key.dim() == value.dim() == 4:
        raise ValueError(
            "Jagged tensors must be (sequences, heads, n*, d), or (sequences, batch*, ..., n, d), * where lengths "
            f"differ, but got query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
        )
    heads = query.size(1), key.size(1), value.size(1)
    if not options["enable_gqa"] and len(set(heads)) != 1:
        raise RuntimeError(f"The heads of nested tensors must be the same without enable_gqa, but got {heads}")
    if options["is_causal"] and not torch.equal(_lengths(query), _lengths(key)):
        raise _lengths_differ()
    p = options["dropout_p"]
    wanted = {"causal": options["is_causal"], "scale": options["scale"], "dropout": p if p < 1.0 else 0.0}
    try:
        out = jagged_attention(query, key, value, **wanted)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from None
    return out * 0.0 if p == 1.0 else out


def _lengths_differ() -> RuntimeError:
    return RuntimeError("is_causal needs the same lengths of query and key where they are nested tensors")


def _lengths(x: Any) -> torch.Tensor:
    recorded = x.lengths()
    lengths: torch.Tensor = x.offsets().diff() if recorded is None else recorded
    return lengths


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def multihead(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `MultiheadAttention.forward` to process nested tensors one by one."""

    @functools.wraps(forward)
    def each(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_padding_mask: Any = None,
        need_weights: bool = True, attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
    ) -> Any:  # fmt: skip
        operands = query, key, value
        plain = key_padding_mask is None and attn_mask is None and not is_causal and self.batch_first
        if not plain or any(not x.is_nested or x.layout is not torch.strided for x in operands):
            return forward(
                self, query, key, value, key_padding_mask=key_padding_mask, need_weights=need_weights,
                attn_mask=attn_mask, average_attn_weights=average_attn_weights, is_causal=is_causal,
            )  # fmt: skip
        options = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
        sequences = zip(*(x.unbind() for x in operands), strict=True)
        results = [forward(self, *(x[None] for x in sequence), **options) for sequence in sequences]
        out = torch.nested.as_nested_tensor([x[0] for x, _ in results])
        if not need_weights:
            return out, None
        weights = [w[0] for _, w in results]
        n_q, n_k = (max(w.shape[axis] for w in weights) for axis in (-2, -1))
        pad = torch.nn.functional.pad
        return out, torch.stack([pad(w, (0, n_k - w.shape[-1], 0, n_q - w.shape[-2])) for w in weights])

    return each
