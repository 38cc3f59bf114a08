"""transformers' models on `regard.attention`: its attention interface, and its masks as rules.

A model of transformers describes each of its masks as a function of the indices (b, h, q, k) before it makes an array
of it. Here that function is traced into a rule instead, and the rule goes through the model in the place of the array.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

import torch

import regard
from regard.rules import Mask, Traced, as_mask
from regard.rules.expression import literal
from regard.torch.graph import InGraph, constant, in_graph
from regard.torch.short import positions_first
from regard.torch.texts import text_of

NAME = "regard"
TESTED = (5, 20), (5, 23)
OUTSIDE = (
    "with attn_implementation='regard' a mask that reads tensors, as that of packed sequences does, is made outside of "
    "the graph: give an attention_mask or a cache, without which transformers takes sequences as packed, or compile "
    "without fullgraph"
)


def register_transformers() -> None:
    """Make `attn_implementation="regard"` known to transformers, for every model that uses its attention interface.

        regard.torch.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="regard")
        model.set_attn_implementation("regard")         # or a model that is there already

    Causal, padded, packed, sliding-window and chunked masks, and those that a model composes of index functions, become
    rules; nothing of size n × n is made of them. Soft caps, sinks, grouped heads, cross-attention and caches, dynamic
    and static, are served, in training and generation. What a model or its caller makes as an array of n × n, such as
    T5's position bias or a mask of four dimensions, is read as it is. `output_attentions=True` in a call returns the
    weights, before dropout. `torch.compile(model, fullgraph=True)` makes one graph of a model that is given a cache or
    an attention_mask; without both, transformers looks for packed sequences, and attention runs between graphs.

    Raises ImportError if transformers is missing, or is of a version that this was not tested with.

    >>> register_transformers()                                               # doctest: +SKIP
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("register_transformers needs transformers: pip install 'regard[transformers]'") from None
    oldest, newest = TESTED
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not oldest <= version <= newest:
        raise ImportError(
            f"register_transformers serves transformers {'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}, "
            f"whose mask functions it reads, and {transformers.__version__} is installed"
        )
    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, mask)


class RuleMask(torch.Tensor):
    """A mask of shape (batch, 1, n_q, n_k) that is a rule, and a tensor without storage, as models hand masks on.

    rule: who may be attended to, None for everyone. offset, origin: as in `regard.attention`. Shape, dtype and device
    can be read, and it can be moved and copied; an operation on its elements, of which there are none, raises.
    """

    rule: Mask | None
    offset: int
    origin: tuple[int, int, int]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], rule: Mask | None, offset: int, origin: tuple[int, int, int], device: Any
    ) -> "RuleMask":
        self: RuleMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.rule, self.offset, self.origin = rule, offset, origin
        return self

    def __init__(self, *args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in _COPIES:
            (x, *_), options = args, kwargs or {}
            return cls(x.shape, x.rule, x.offset, x.origin, options.get("device", x.device))
        raise NotImplementedError(
            f"{function.overloadpacket} of an attention mask that attn_implementation='regard' keeps as a rule, "
            "without elements: give the model a mask of four dimensions, or use 'sdpa'"
        )

    def __repr__(self, **_: Any) -> str:
        return f"RuleMask({self.rule}, shape={tuple(self.shape)})"


_COPIES = {torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.alias}


class GraphMask:
    """The same in a graph that is being compiled: no tensor, but with what models ask of one."""

    ndim, dtype = 4, torch.bool

    def __init__(self, shape: tuple[int, ...], rule: InGraph | None, offset: Any, origin: tuple[int, int, int]) -> None:
        self.shape, self.rule, self.offset, self.origin = shape, rule, offset, origin

    def contiguous(self) -> "GraphMask":
        return self

    def to(self, *args: Any, **options: Any) -> "GraphMask":
        return self


class Index(Traced):
    """An index in a mask function of transformers, or what one makes of it: such a function expects tensors."""

    __slots__ = ()

    device = torch.device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Itself: only masks are moved, from one device to another."""
        return self

    def new_ones(self, shape: Any, **options: Any) -> "Index":
        return Index(literal(True, "bool"))

    def new_zeros(self, shape: Any, **options: Any) -> "Index":
        return Index(literal(False, "bool"))

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        x = self if min is None else regard.where(self < min, min, self)
        return x if max is None else regard.where(x > max, max, x)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[Any, Callable[..., Any]] = {torch.where: regard.where, torch.abs: abs, torch.clamp: cls.clamp}
        if function not in named:
            raise TypeError(f"{getattr(function, '__name__', function)} of an index cannot be made a rule")
        return named[function](*args, **(kwargs or {}))


class Lookups(torch.overrides.TorchFunctionMode):
    """Inside, a tensor that is indexed with an `Index` is a table, one for each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__:
            x, at = args
            at = at if isinstance(at, tuple) else (at,)
            if any(isinstance(index, Index) for index in at):
                if id(x) not in self.tables:
                    self.tables[id(x)] = x, regard.table(x.detach())
                return self.tables[id(x)][1][at]
        return function(*args, **(kwargs or {}))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    device: Any = "cpu",
    **options: Any,
) -> RuleMask | GraphMask:
    """transformers' mask interface: the mask that an index function and a padding mask (batch, keys) describe."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, prepare_padding_mask

    function = causal_mask_function if mask_function is None else mask_function
    shape = (batch_size, 1, q_length, kv_length)
    if torch.compiler.is_compiling():
        simple = options.get("allow_is_causal_skip") or options.get("allow_is_bidirectional_skip")
        if options.get("use_vmap") or not (simple or q_length < kv_length or q_length == 1):
            return outside_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device
            )
        found = None if function is bidirectional_mask_function else InGraph(name_of_mask(function), ())
        if attention_mask is not None:
            kept = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            flags = in_graph("mask", kept[:, None, None, :])
            found = flags if found is None else found & flags
        # A static cache counts on in the tensor that it hands out, before attention reads it.
        offset = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
        return GraphMask(shape, found, offset, (0, 0, kv_offset))
    first, last = int(q_offset), int(kv_offset) + kv_length - 1
    # In a step of decoding the query comes after every key; and the function of no mask looks at indices in vain.
    everyone = function is bidirectional_mask_function or (function is causal_mask_function and first >= last)
    rule = None if everyone else rule_of(function)
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None and not padding.all():
        keys = _real(regard.table(padding))
        rule = keys if rule is None else rule & keys
    return RuleMask(shape, rule, first, (0, 0, int(kv_offset)), device)


def rule_of(function: Callable[..., Any]) -> Mask:
    """The rule that a mask function computes; one that depends on nothing but its arguments is traced once."""
    return _traced_once(function) if getattr(function, "__closure__", function) is None else _traced(function)


def _traced(function: Callable[..., Any]) -> Mask:
    def traced(b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(*(Index(x.node) for x in (b, h, i, j)))

    traced.__name__ = getattr(function, "__name__", type(function).__name__)  # what the rule prints as
    with Lookups():
        return as_mask(traced)


def _real(table: Any) -> Mask:
    def padding(b: Any, h: Any, i: Any, j: Any) -> Any:
        return table[b, j]

    return regard.mask(padding)


outside_mask = torch.compiler.disable(mask, reason=OUTSIDE)


@constant
def name_of_mask(function: Callable[..., Any]) -> str:
    """The name of such a rule in a graph."""
    return text_of(rule_of(function), ())


_traced_once = lru_cache(_traced)
_softcap = lru_cache(regard.softcap)


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
    output_attentions: bool = False,
    cache: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface: out (batch, n_q, h, d_v), and the weights if they are asked for."""
    if isinstance(attention_mask, RuleMask) and torch.compiler.is_compiling():
        return outside_attention(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            softcap=softcap, position_bias=position_bias, s_aux=s_aux, output_attentions=output_attentions, cache=cache,
        )  # fmt: skip
    if cache is not None:
        raise NotImplementedError("attn_implementation='regard' has no paged cache, which continuous batching needs")
    wishes: dict[str, Any] = {
        "scale": scaling, "bias": position_bias, "sink": s_aux, "score": None if softcap is None else _softcap(softcap),
        "dropout": dropout or None, "return_weights": True if output_attentions else None,
    }  # fmt: skip
    n_q, n_k = query.shape[-2], key.shape[-2]
    if isinstance(attention_mask, RuleMask | GraphMask):
        if attention_mask.shape[-2:] != (n_q, n_k):
            raise ValueError(
                f"the mask is for {attention_mask.shape[-2]} queries and {attention_mask.shape[-1]} keys, "
                f"but the call has {n_q} and {n_k}"
            )
        if attention_mask.rule is not None:
            wishes["mask"] = attention_mask.rule
            moved = isinstance(attention_mask.offset, torch.Tensor) or attention_mask.offset != n_k - n_q
            if attention_mask.origin[2] or moved:  # elsewhere than a call begins anyway
                wishes |= {"offset": attention_mask.offset, "origin": attention_mask.origin}
    elif attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and n_q > 1:
            wishes |= {"causal": True, "offset": 0}
    elif attention_mask.is_floating_point():
        wishes["bias"] = attention_mask if position_bias is None else position_bias + attention_mask
    else:
        wishes["mask"] = attention_mask
    found = positions_first(*(x.transpose(1, 2) for x in (query, key, value)), **wishes)
    return found if output_attentions else (found, None)


outside_attention = torch.compiler.disable(attention, reason=OUTSIDE)
