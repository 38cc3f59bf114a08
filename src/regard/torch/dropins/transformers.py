"""transformers' models on `regard.attention`, with their masks as rules.

A model of transformers describes each mask as a function of the indices (b, h, q, k), before it makes an array of it.
Here that function is traced into a rule, which passes through the model in place of the array.
"""

import operator
import sys
from collections.abc import Callable
from functools import cache, lru_cache, partial, wraps
from inspect import signature, unwrap
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch

from regard import rules, warning
from regard.rules import Mask, Traced, as_mask, reads
from regard.torch.call.text import named, text_of
from regard.torch.compiled.traced import GraphRule, in_graph
from regard.torch.public.attention import heads_first
from regard.torch.public.padding import real_keys
from regard.torch.tensors import modes
from regard.torch.tensors.process_group import spread, whole

NAME = "regard"
TESTED = (5, 20), (5, 24)
READ = (
    "AttentionInterface.register", "AttentionMaskInterface.register", "masking_utils.bidirectional_mask_function",
    "masking_utils.causal_mask_function", "masking_utils.eager_mask", "masking_utils.prepare_padding_mask",
    "masking_utils.sdpa_mask",
    "PreTrainedModel._can_set_attn_implementation", "PreTrainedModel.get_correct_attn_implementation",
)  # fmt: skip
"""Names of transformers without which no model is served."""
MASK_ARGUMENTS = (
    "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask",
    "allow_is_causal_skip", "device",
)  # fmt: skip
"""Arguments of its mask functions, of which `mask` is one."""
OUTSIDE = (
    "with attn_implementation='regard' a mask that reads tensors, as that of packed sequences does, is made outside of "
    "the graph: give an attention_mask or a cache, without which transformers takes sequences as packed, or compile "
    "without fullgraph"
)
ELEMENTS = (
    "{} reads the elements of its attention mask, which is therefore no rule with attn_implementation='regard': "
    "masks of n_q × n_k are made for it"
)

HEADS = (
    "{} reads the elements of its attention mask, which are the same for all heads, but {} differs between heads: it "
    "serves models that only hand their mask to attention"
)


def register_transformers() -> None:
    """Make `attn_implementation="regard"` known to transformers.

    It serves every model that uses their attention interface.

        regard.torch.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard")
        model.set_attn_implementation("regard")         # or for a loaded model

    Causal, padded, packed, sliding-window and chunked masks become rules, as do those that a model
    composes of index functions; nothing of size n × n is made of them. Soft caps, sinks, grouped
    heads, cross-attention and caches, dynamic and static, are served, in training and generation.
    Arrays of n × n from a model or its caller, such as T5's position bias or a mask of four
    dimensions, are read as they are. `output_attentions=True` in a call returns the weights, before
    dropout. `torch.compile(model, fullgraph=True)` makes one graph of a model that is given a cache
    or an attention_mask. Without both, transformers looks for packed sequences, and attention runs
    between graphs.

    Raises ImportError if transformers is missing or lacks what is read here. With a version that is
    not tested, it warns once.

    >>> register_transformers()                                               # doctest: +SKIP
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("register_transformers needs transformers: pip install 'regard[transformers]'") from None
    unknown = lacking(transformers)
    if unknown:
        raise ImportError(
            f"register_transformers reads names that transformers {transformers.__version__} does not have: "
            f"{', '.join(unknown)}; pip install 'regard[transformers]'"
        )
    oldest, newest = TESTED
    if not oldest <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= newest:
        warn_once(
            f"register_transformers is tested with transformers {'.'.join(map(str, oldest))} to "
            f"{'.'.join(map(str, newest))}, and {transformers.__version__} is installed: compare results with those of "
            "attn_implementation='eager'"
        )
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)
    chosen = transformers.PreTrainedModel.get_correct_attn_implementation
    if not hasattr(chosen, "__wrapped__"):
        transformers.PreTrainedModel.get_correct_attn_implementation = _answering(chosen)


def lacking(transformers: Any) -> list[str]:
    """Return the names and arguments read here that transformers does not have."""
    unknown = []
    for path in READ:
        try:
            attrgetter(path)(transformers)
        except AttributeError:
            unknown.append(path)
    if not unknown:
        given = signature(transformers.masking_utils.sdpa_mask).parameters
        unknown = [f"{name}= of masking_utils.sdpa_mask" for name in MASK_ARGUMENTS if name not in given]
    return unknown


def _answering(chosen: Callable[..., str]) -> Callable[..., str]:
    """Wrap transformers' choice of an implementation to accept "regard" with advice.

    transformers itself takes every registered name for every model.
    """
    import transformers

    @wraps(chosen)
    def choose(self: Any, *args: Any, **options: Any) -> str:
        found = chosen(self, *args, **options)
        if found != NAME:
            return found
        family = next(x for x in type(self).__mro__ if transformers.PreTrainedModel in x.__bases__).__name__
        if not self._can_set_attn_implementation():
            warn_once(
                f"{family} computes its attention itself, without transformers' attention interface: "
                "it runs with attn_implementation='eager', not on regard"
            )
            return "eager"
        _fill_tables(sys.modules[type(self).__module__])
        declaring = next(x for x in type(self).__mro__ if "_supports_attention_backend" in vars(x))
        silent = declaring is transformers.PreTrainedModel and self._supports_sdpa  # the default is False
        if not self._supports_attention_backend and not silent:
            warn_once(
                f"{family} does not support other attention implementations, by its _supports_attention_backend and "
                "_supports_sdpa: compare its results on regard with those of 'eager'"
            )
        return found

    return choose


def _fill_tables(module: ModuleType) -> None:
    """Add a class for "regard" to a model's tables of layer classes.

    Such tables map the name of an implementation to a class.
    """
    for name, table in vars(module).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict):
            own = "sdpa" if "sdpa" in table else "eager"
            if table.setdefault(NAME, table[own]) is not table[own]:
                continue
            warn_once(
                f"{table[own].__name__} computes attention itself, without transformers' attention interface: layers "
                f"of this class run with attn_implementation={own!r}, not on regard"
            )


class Combining:
    """The operators ``&`` and ``|`` of masks that are rules.

    With a rule, or a function of (b, h, i, j), they give a mask that is a rule; with a tensor, elements.
    """

    # Leaves the operators of ``rule & mask`` to the mask.
    __array_ufunc__ = None

    def __and__(self, other: Any) -> Any:
        return combined(operator.and_, self, other)

    def __or__(self, other: Any) -> Any:
        return combined(operator.or_, self, other)

    __rand__, __ror__ = __and__, __or__


class RuleMask(Combining, torch.Tensor):
    """A rule as a mask of shape (batch, 1, n_q, n_k): a tensor without storage.

    rule: the pairs that may attend, None for all. offset, origin: as in `regard.attention`. dtype: of its elements,
    which are booleans, or 0 and the least number where eager attention would add them. Its shape, dtype and device
    can be read, and it can be moved and copied, as models do with masks; ``&`` and ``|`` with a rule change its rule.
    An operation on its elements computes them by `make`, with a warning that names `model`. From then on those elements
    are the mask, since the model may have changed them.
    """

    rule: Mask | None
    offset: int
    origin: tuple[int, int, int]
    make: Callable[[], torch.Tensor]
    model: str
    made: torch.Tensor | None

    __torch_function__ = modes.no_torch_function

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        rule: Mask | None,
        offset: int,
        origin: tuple[int, int, int],
        device: Any,
        make: Callable[[], torch.Tensor],
        model: str,
        dtype: torch.dtype,
    ) -> "RuleMask":
        self: RuleMask = modes.tensor_without_storage(cls, shape, dtype=dtype, device=device)
        self.rule, self.offset, self.origin, self.make, self.model, self.made = rule, offset, origin, make, model, None
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @property
    def elements(self) -> torch.Tensor:
        """The mask as an array of n_q × n_k."""
        if self.made is None:
            warn_once(ELEMENTS.format(self.model))
            self.made = self.make().to(self.device)
        return self.made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        x = args[0] if function.overloadpacket in _COPIES else None
        if x is not None and x.made is None and options.get("dtype") in (None, x.dtype):
            return cls(x.shape, x.rule, x.offset, x.origin, options.get("device", x.device), x.make, x.model, x.dtype)
        args, options = modes.map_tensors(cls, lambda x: x.elements, (args, options))
        return function(*args, **options)

    def __repr__(self, **_: Any) -> str:
        return f"RuleMask({self.rule}, shape={tuple(self.shape)})"


_COPIES = {torch.ops.aten.detach, torch.ops.aten.clone, modes.to_copy, torch.ops.aten.alias}


class GraphMask(Combining):
    """A `RuleMask` in a graph that is being compiled.

    It is no tensor, but has the members that models use.
    """

    ndim = 4
    made: torch.Tensor | None

    def __init__(
        self,
        shape: tuple[int, ...],
        rule: GraphRule | None,
        offset: Any,
        origin: tuple[int, int, int],
        make: Callable[[], torch.Tensor],
        model: str,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.rule, self.offset, self.origin = shape, rule, offset, origin
        self.make, self.model, self.dtype, self.made = make, model, dtype, None

    def contiguous(self) -> "GraphMask":
        return self

    def to(self, *args: Any, **options: Any) -> Any:
        """Return the mask itself if it is only moved, else its elements in `dtype`."""
        dtype = next((x for x in (*args, *options.values()) if isinstance(x, torch.dtype)), self.dtype)
        return self if dtype is self.dtype else self.elements.to(dtype)

    @property
    def elements(self) -> torch.Tensor:
        if self.made is None:
            warn_once(ELEMENTS.format(self.model))
            self.made = self.make()
        return self.made

    def __getattr__(self, name: str) -> Any:
        return getattr(self.elements, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.elements[at]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, options = modes.map_tensors(cls, lambda x: x.elements, (args, kwargs or {}))
        return function(*args, **options)


MASKS = RuleMask, GraphMask


def combined(join: Callable[[Any, Any], Any], mask: Any, other: Any) -> Any:
    """Join a mask that is a rule with another rule.

    join: `operator.and_` or `operator.or_`. Both see the absolute indices of the call. A rule may differ between heads,
    which the elements of one mask for all heads cannot: only attention reads such a mask.
    """
    if not (isinstance(other, Mask | GraphRule) or callable(other)):
        return join(mask.elements, other)
    as_rule = partial(in_graph, "mask") if isinstance(mask, GraphMask) else as_mask
    rule = as_rule(other)
    if mask.made is not None and mask.dtype.is_floating_point:
        return elements_of_both(join, mask, rule)
    known = mask.rule if mask.made is None else as_rule(mask.made, frozen=True)
    if known is None and join is operator.or_:  # every pair, and more
        return mask
    both: Any = rule if known is None else join(known, rule)
    make = partial(elements_of_both, join, mask, rule)
    if isinstance(mask, GraphMask):
        return GraphMask(mask.shape, both, mask.offset, mask.origin, make, mask.model, mask.dtype)
    return RuleMask(mask.shape, both, mask.offset, mask.origin, mask.device, make, mask.model, mask.dtype)


def elements_of_both(join: Callable[[Any, Any], Any], mask: Any, rule: Any) -> torch.Tensor:
    """Return the elements of a mask, joined with those of a rule."""
    if differs_by_head(rule.name if isinstance(rule, GraphRule) else rule):
        raise NotImplementedError(HEADS.format(mask.model, rule))
    elements = mask.make() if mask.made is None else mask.made
    batch, _, n_q, n_k = mask.shape
    q, k = (elements.new_zeros((batch, 1, n, 1), dtype=torch.float32) for n in (n_q, n_k))
    _, weights = heads_first(q, k, k, mask=rule, offset=mask.offset, origin=mask.origin, return_weights=True)
    if not mask.dtype.is_floating_point:
        return join(elements, weights > 0)
    hidden = elements if join is operator.or_ else torch.finfo(mask.dtype).min
    return torch.where(weights > 0, 0.0 if join is operator.or_ else elements, hidden)


@modes.constant
def differs_by_head(rule: Mask | str) -> bool:
    return "h" in reads((named(rule).rule if isinstance(rule, str) else rule).node)


@modes.constant
def supports(config: type, implementation: str) -> bool:
    """Return whether a model of a class of configurations supports "sdpa" or "flex_attn", by its `_supports_…`.

    Without "sdpa" it may compute scores + mask itself, and has no attention that is causal without a mask. With
    "flex_attn" it takes masks that are no tensors. What is no configuration of a model supports both.
    """
    return _supports(config, implementation)


@cache
def _supports(config: type, implementation: str) -> bool:
    from transformers import PreTrainedModel

    classes = [PreTrainedModel]
    for x in classes:
        classes += x.__subclasses__()
    for base in config.__mro__:
        models = [x for x in classes if x.config_class is base]
        if models:
            return any(getattr(x, f"_supports_{implementation}") for x in models)
    return True


class MaskIndex(Traced):
    """An index, or a result of indices, in a mask function of transformers, which asks for its device."""

    __slots__ = ()

    device = torch.device("cpu")


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **options: Any,
) -> RuleMask | GraphMask | torch.Tensor | None:
    """Make a mask, as transformers' mask interface.

    mask_function: True if a query index may attend to a key index. attention_mask: padding (batch,
    keys), True = a token. dtype: of the model, and of the mask if the model knows eager's masks
    alone: then the mask is None where eager's is. In a graph such a model gets eager's mask itself,
    unless it takes masks that are no tensors.
    """
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        eager_mask,
        prepare_padding_mask,
        sdpa_mask,
    )

    function = causal_mask_function if mask_function is None else mask_function
    shape = (batch_size, 1, q_length, kv_length if spread() is None else q_length)
    kv_length = whole(kv_length)
    as_eager, local = not supports(type(config), "sdpa"), options.get("local_size")
    make = partial(
        eager_mask if as_eager else sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
        q_offset=q_offset, kv_offset=kv_offset, mask_function=function, attention_mask=attention_mask,
        allow_is_causal_skip=False, device=device, dtype=dtype,
    )  # fmt: skip
    dtype = dtype if as_eager else torch.bool
    none_if_full = as_eager and options.get("allow_is_bidirectional_skip") and (local is None or kv_length < local)
    model = getattr(config, "model_type", None) or "the model"
    if torch.compiler.is_compiling():
        if as_eager and not supports(type(config), "flex_attn"):
            return make(**options)
        simple = options.get("allow_is_causal_skip") or options.get("allow_is_bidirectional_skip")
        if options.get("use_vmap") or not (simple or q_length < kv_length or q_length == 1):
            return outside_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device, dtype,
                config, **options,
            )  # fmt: skip
        if none_if_full and attention_mask is None:
            return None
        found = None if function is bidirectional_mask_function else GraphRule(name_of_mask(function), ())
        if attention_mask is not None:
            padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            # A cache of a sliding window holds the last keys, which are the columns of a mask in a graph.
            flags = in_graph("mask", padding[:, None, None, kv_offset : kv_offset + kv_length])
            found = flags if found is None else found & flags
        # A static cache updates its offset tensor in place, before attention reads it.
        offset = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
        return GraphMask(shape, found, offset, (0, 0, kv_offset), make, model, dtype)
    first, last = int(q_offset), int(kv_offset) + kv_length - 1
    # In a decode step the query comes after every key, so causal hides nothing.
    everyone = function is bidirectional_mask_function or (function is causal_mask_function and first >= last)
    rule = None if everyone else rule_of(function)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    keys = None if padding is None else real_keys(padding)
    if none_if_full and keys is None:
        return None
    if keys is not None:
        rule = keys if rule is None else rule & keys
    return RuleMask(shape, rule, first, (0, 0, int(kv_offset)), device, make, model, dtype)


def rule_of(function: Callable[..., Any]) -> Mask:
    """Trace a mask function into a rule; once, if it has no closure."""
    return _traced_once(function) if getattr(function, "__closure__", function) is None else _traced(function)


def _traced(function: Callable[..., Any]) -> Mask:
    def traced(b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(*(MaskIndex(x.node) for x in (b, h, i, j)))

    traced.__name__ = getattr(function, "__name__", type(function).__name__)  # the text of the rule
    return as_mask(traced)


outside_mask = modes.outside_of_graphs(OUTSIDE)(mask)


@modes.constant
def name_of_mask(function: Callable[..., Any]) -> str:
    """Write the rule of a mask function as text."""
    return text_of(rule_of(function), ())


_traced_once = lru_cache(_traced)
_softcap = lru_cache(rules.softcap)


@modes.constant
def warn_once(message: str) -> None:
    """Warn once in a process, also while a graph is traced."""
    warning.warn_once(message)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    output_attentions: bool = False,
    cache: Any = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, as transformers' attention interface.

    Returns out (batch, n_q, h, d_v), and the weights if requested, else None. s_aux: sinks (h,).
    sinks: one for each query, (batch, h, n_q, 1). indices: of the keys that the mask allows, those
    that each query sees, (batch, n_q, k); -1 is none. position_ids, cu_seq_lens_q, cu_seq_lens_k: of
    flash attention, which has no masks; the mask says as much.
    """
    compiling = torch.compiler.is_compiling()
    output_attentions = output_attentions or weights_are_recorded(compiling)
    for name, x in options.items():
        if isinstance(x, torch.Tensor) and is_given(type(module), name):
            raise NotImplementedError(
                f"attn_implementation='regard' does not know the keyword {name!r}, a tensor that "
                f"{type(module).__name__} gives to its attention: use 'eager' for this model"
            )
    if compiling and isinstance(attention_mask, RuleMask):
        return outside_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            softcap=softcap, position_bias=position_bias, s_aux=s_aux, sinks=sinks, indices=indices,
            output_attentions=output_attentions, cache=cache,
        )  # fmt: skip
    if cache is not None:
        raise NotImplementedError("attn_implementation='regard' has no paged cache, which continuous batching needs")
    made = rules.softcap if compiling else _softcap
    call_options: dict[str, Any] = {
        "scale": scaling, "bias": position_bias, "sink": s_aux, "score": None if softcap is None else made(softcap),
        "dropout": dropout or None, "return_weights": True if output_attentions else None,
        "observe": None if sinks is None else ("lse",),
    }  # fmt: skip
    n_q, n_k = query.shape[-2], key.shape[-2]
    if isinstance(attention_mask, MASKS):
        rows, columns = attention_mask.shape[-2:]
        if rows not in (1, n_q) or columns not in (1, n_k):
            raise ValueError(f"the mask is for {rows} queries and {columns} keys, but the call has {n_q} and {n_k}")
        if attention_mask.made is not None:
            attention_mask = attention_mask.made
        elif (rows, columns) != (n_q, n_k):  # it broadcasts, which a rule cannot
            attention_mask = attention_mask.make()
    if isinstance(attention_mask, MASKS):
        if attention_mask.rule is not None:
            call_options["mask"] = attention_mask.rule
            moved = isinstance(attention_mask.offset, torch.Tensor) or attention_mask.offset != n_k - n_q
            if attention_mask.origin[2] or moved:  # other than the default of a call
                call_options |= {"offset": attention_mask.offset, "origin": attention_mask.origin}
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and whole(n_q) > 1 and supports(type(getattr(module, "config", None)), "sdpa"):
            call_options |= {"causal": True, "offset": 0}
    elif attention_mask.is_floating_point():
        call_options["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    else:
        call_options["mask"] = attention_mask
    if indices is not None:
        chosen = chosen_keys(indices, n_k)
        call_options["mask"] = call_options["mask"] & chosen if "mask" in call_options else chosen
    found = heads_first(query, key, value, **call_options)
    if not isinstance(found, tuple):
        return found, None
    out, *others = found
    weights = others[0] if output_attentions else None
    lse = None if call_options["observe"] is None else others[-1].lse[..., None]
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)): the share that a sink of each query leaves to the keys.
        left = torch.sigmoid(lse - sinks)
        out = out * left.transpose(1, 2).to(out.dtype)
        weights = None if weights is None else weights * left.to(weights.dtype)
    return out, weights


def weights_are_recorded(compiling: bool) -> bool:
    """Return whether a model must return weights, since transformers records them."""
    collector = active_collector() if compiling else _active_collector_once()
    if collector is None:
        return False
    wanted = collector.global_var if compiling else collector.get()
    return wanted is not None and any("attentions" in name for name in wanted)


def active_collector() -> Any:
    """Return transformers' context variable of recorded outputs.

    None if this version has none.
    """
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return None
    return _active_collector


_active_collector_once = cache(active_collector)  # an import statement in each layer takes microseconds


def chosen_keys(indices: torch.Tensor, n_k: int) -> torch.Tensor:
    """Turn indices (batch, n_q, k) into a mask (batch, 1, n_q, n_k); -1 is no key."""
    found = indices.new_zeros((*indices.shape[:-1], n_k + 1), dtype=torch.bool)
    at = torch.where(indices < 0, n_k, indices).long()
    return found.scatter(-1, at, True)[:, None, :, :n_k]


@modes.constant
def is_given(module: type, keyword: str) -> bool:
    """Return whether a keyword is meant for attention, and does not merely pass through ``**kwargs``.

    A class of modules means it if its `forward` names it, or the eager attention of its file takes it.
    """
    return _is_given(module, keyword)


@cache
def _is_given(module: Any, keyword: str) -> bool:
    forward = unwrap(module.forward)
    named = (x if isinstance(x, tuple) else (x,) for x in forward.__code__.co_consts)
    eager = (x for name, x in forward.__globals__.items() if "eager_attention" in name)
    return any(keyword in names for names in (*named, *(signature(x).parameters for x in eager)))


outside_attention = modes.outside_of_graphs(OUTSIDE)(attention)
