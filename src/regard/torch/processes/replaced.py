"""Functions of PyTorch and transformers that are others inside of `context_parallel`."""

from __future__ import annotations  # so that `help` shows the names of types

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from regard.torch.dropins.activation import activate
from regard.torch.dropins.flex import flex
from regard.torch.dropins.functional import sdpa
from regard.torch.dropins.packages import Attribute, Shared, with_attributes
from regard.torch.tensors.process_group import refuse, spread

MASKS = "transformers.masking_utils"
PREPARE = "_preprocess_mask_arguments"  # each model asks it before it makes a mask
CHECK = "_validate_sdpa_input"  # PyTorch's flex_attention calls it first
SERVED = ("regard", "sdpa", "flex_attention")
_shared = Shared()


def held() -> ExitStack:
    """Have PyTorch's functions of attention be regard's, and refuse what would see one process alone, until closed."""
    stack = ExitStack()
    for replaced in (sdpa(), flex(), activate()):
        stack.enter_context(replaced)
    stack.enter_context(_shared.held(lambda: with_attributes(_attributes())))
    return stack


def _attributes() -> list[Attribute]:
    """Return the functions that are replaced for the whole process; each asks who is inside."""
    from torch.nn.attention import flex_attention as flex_module

    functional: Any = torch.nn.functional
    heads = functional.multi_head_attention_forward
    attributes: list[Attribute] = [(functional, "multi_head_attention_forward", without_weights(heads))]
    if hasattr(flex_module, CHECK):
        attributes.append((flex_module, CHECK, unreplaced(getattr(flex_module, CHECK))))
    masks = sys.modules.get(MASKS)
    if hasattr(masks, PREPARE):
        attributes.append((masks, PREPARE, prepared(getattr(masks, PREPARE))))
    return attributes


def unreplaced(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a check of PyTorch's flex_attention, of which a script that `runpy` runs has copies that nobody finds."""

    @wraps(check)
    def refused(*args: Any, **options: Any) -> Any:
        refuse("this copy of flex_attention", "import torch.nn.attention.flex_attention, and call it from there")
        return check(*args, **options)

    return refused


def without_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `F.multi_head_attention_forward`, which computes weights that are to be returned by itself."""

    @wraps(forward)
    def attend(*args: Any, need_weights: bool = True, **options: Any) -> Any:
        if need_weights and spread() is not None:
            raise ValueError("nn.MultiheadAttention inside of context_parallel has no weights: give need_weights=False")
        return forward(*args, need_weights=need_weights, **options)

    return attend


def prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap transformers' preparation of masks: positions and masks have to be those of the whole sequence.

    transformers takes a jump of positions, as stripes have them, for the start of another sequence. So they are
    compared here, and not handed on.
    """

    @wraps(prepare)
    def check(config: Any, inputs_embeds: Any, attention_mask: Any, past_key_values: Any, position_ids: Any,
              *others: Any, **options: Any) -> Any:  # fmt: skip
        parallel = spread()
        if parallel is not None:
            parallel.agreed(
                lambda: check_model(parallel, config, inputs_embeds.shape[1], attention_mask, position_ids),
                lambda _: {"model": type(config).__name__},
            )
            position_ids = None
        return prepare(config, inputs_embeds, attention_mask, past_key_values, position_ids, *others, **options)

    return check


def check_model(parallel: Any, config: Any, rows: int, attention_mask: Any, position_ids: Any) -> None:
    """Raise ValueError for a model of transformers that would not attend to the whole sequence."""
    name, n = config._attn_implementation, parallel.deal.n
    if name not in SERVED:
        raise ValueError(f"attn_implementation inside of context_parallel must be one of {SERVED}, got {name!r}")
    own = torch.from_numpy(parallel.deal.positions(parallel.rank))
    if rows != len(own):
        raise ValueError(f"the model must be given {len(own)} positions, those of this rank, got {rows}")
    whole_mask = attention_mask is None or tuple(attention_mask.shape[-1:]) == (n,)
    if not whole_mask:
        raise ValueError(f"attention_mask must be that of the whole, (batch, {n}), got {tuple(attention_mask.shape)}")
    if attention_mask is not None and attention_mask.ndim == 4:
        return  # of packed sequences, whose positions begin anew
    if position_ids is not None and not (position_ids.cpu() == own).all():
        raise ValueError(
            f"position_ids must be those of the whole sequence: give cp.shard(torch.arange({n})[None], 1); for packed "
            f"sequences, give attention_mask as booleans (batch, 1, {n}, {n}) too"
        )
