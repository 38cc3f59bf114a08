"""`regard.attention` on JAX arrays: checked by shape, then bound to primitives."""

from dataclasses import fields
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

import jax
from regard.arguments.frameworks import Namespace
from regard.arguments.values import array_type
from regard.core import checks
from regard.core.options import ARRAYS, RULES
from regard.core.problem import Problem, compute_dtype
from regard.core.statistics import Profile, Seen, Statistic, Top, asked_for, of_engine
from regard.engines import engines
from regard.jax import primitives  # noqa: F401  # registers what `bind` binds
from regard.jax.binding import bind, varying_alike
from regard.jax.rules import JaxTable, constant, flags, narrow, sized, table, traced
from regard.jax.task import CARRIED, INPUTS, OUTPUTS, PrimitiveTask, StaticCall, places
from regard.jax.xla.values import promotion
from regard.ops import linear, merging, multihead, planning, retrieval, stepping
from regard.ops import metric as metrics
from regard.ops.normalization import problem_from
from regard.rules import as_mask, as_score, order, rule_text
from regard.rules.outside import lookups

__all__ = [
    "attention", "attention_jvp", "attention_vjp", "constant", "flags", "hopfield", "linear_attention", "merge",
    "multihead_attention", "plan", "steps", "table", "weights",
]  # fmt: skip

Options = dict[str, Any]
Operands = dict[str, Any]


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    metric: Any = None,
    seed: Any = None,
    offset: Any = None,
    origin: Any = None,
    return_weights: bool = False,
    engine: str | None = None,
    observe: Any = (),
    spread: tuple[tuple[str, ...], int] | None = None,
    **options: Any,
) -> Any:
    """Compute `regard.attention` on JAX arrays, under any of JAX's transformations.

    In addition to NumPy's options, `seed` may be a key of `jax.random`. `seed`, `offset`, the entries of `origin` and
    every array of a rule may be traced. `engine="xla"` computes by XLA instead of a CPU engine. spread: as in
    `StaticCall`; query, key and value are then a device's shards of the sequence.
    """
    operands: dict[str, Any] = {"query": query, "key": key, "value": value}
    for name, x in operands.items():
        ours(name, x)
    if metric is not None:
        query = operands["query"] = query_times(metric, query, options.get("layout"))
    for name in ARRAYS:
        x = options.pop(name, None)
        if x is not None:
            operands[name] = jnp.asarray(x) if type(x) is np.ndarray else x
    for name in RULES:
        if options.get(name) is not None:
            options[name] = (as_mask if name == "mask" else as_score)(options[name])
    if traced(offset) or (isinstance(origin, tuple) and any(map(traced, origin))):
        for rule in (options.get("mask"), options.get("score")):
            if rule is not None and lookups(rule.node):
                raise TypeError(f"{rule}: bounds='raise' of a table is not checked where offset or origin are traced")
    observed = checks.observe(observe)
    p = problem_from(
        **whole_operands(operands, options.get("layout"), 1 if spread is None else spread[1]),
        seed=0 if isinstance(seed, jax.Array) else seed,
        offset=plain_offset(offset),
        origin=plain_origin(origin),
        observe=of_engine(observed),
        **options,
    )
    numbers = {name: x for name in sorted(p.used) if isinstance(x := getattr(p, name), float)}
    lost = p.used - CARRIED - numbers.keys()
    if lost:
        raise NotImplementedError(f"on JAX arrays, attention does not know {', '.join(map(repr, sorted(lost)))}")
    return_weights = checks.boolean("return_weights", return_weights)
    if engine is not None and engine != "xla" and engine not in engines():
        raise ValueError(f"engine must be one of {', '.join(map(repr, [*engines(), 'xla']))}, got {engine!r}")
    if on_this_host(query):
        checks.fits(p, weights=p.pairs if return_weights else 0)
    matrices = query.ndim == 2
    if matrices:
        operands |= {name: operands[name][None] for name in ("query", "key", "value")}
    others: dict[str, Any] = {}
    texts: dict[str, str | None] = {"mask": None, "score": None}
    masses = {f"{s.name}{n}": rule for n, s in enumerate(p.observe) for rule in s.rules}
    for name, rule in {"score": p.score, "mask": p.mask, **masses}.items():
        if rule is not None:
            texts[name], tables, dense = rule_text(rule.node)
            for n, t in enumerate(tables):
                trains = name == "score" and t.kind == "float"
                (operands if trains else others)[f"{name}.table{n}"] = values_of(t)
            others |= {f"{name}.dense{n}": jnp.asarray(x) for n, x in enumerate(dense)}
    if traced(offset):
        others["offset"] = offset
    if any(traced(x) for x in origin or ()):
        others["origin"] = jnp.stack([jnp.asarray(x) for x in origin])
    if isinstance(seed, jax.Array) and p.dropout:
        others["seed"] = seed_operand(seed)
    call = StaticCall(
        inputs=(*operands, *others),
        varying=len(operands),
        mask=texts["mask"],
        score=texts["score"],
        scale=p.scale,
        numbers=tuple(numbers.items()),
        seed=None if "seed" in others else p.seed,
        offset=None if "offset" in others else shortest(p.offset),
        origin=None if "origin" in others else p.origin,
        layout="bnhd" if p.positions_first else "bhnd",
        observe=tuple((s.name, texts.get(f"{s.name}{n}", s.of)) for n, s in enumerate(p.observe)),
        engine=engine,
        spread=spread,
    )
    arrays = jax.lax.stop_gradient(tuple(others.values()))
    answer, seen = results(p, call, [*operands.values(), *arrays], return_weights, matrices)
    if observed:
        answer.append(asked_for(observed, seen, jnp.exp))
    return answer[0] if len(answer) == 1 else tuple(answer)


def _flatten_seen(seen: Seen) -> tuple[list[Any], tuple[Any, ...]]:
    return list(seen.values()), tuple(seen)


jax.tree_util.register_pytree_node(Seen, _flatten_seen, lambda keys, x: Seen(dict(zip(keys, x, strict=True))))
for holder in (Top, Profile):
    jax.tree_util.register_dataclass(holder, [field.name for field in fields(holder)], [])


def results(
    p: Problem, call: StaticCall, operands: list[Any], return_weights: bool, matrices: bool
) -> tuple[list[Any], dict[Statistic, Any]]:
    """Return the output, maybe the weights, and an engine's statistics."""
    operands = varying_alike(operands)
    computed = bind(PrimitiveTask("forward", call, call.inputs, ((),) * len(operands)), operands)
    if matrices:
        computed = [x[0] for x in computed]
    by_name = dict(zip(call.results, computed, strict=True))
    answer: list[Any] = [by_name["out"]]
    if return_weights:
        names = (*call.inputs, "lse")
        lse = by_name["lse"][None] if matrices else by_name["lse"]
        (w,) = bind(PrimitiveTask("weights", call, names, ((),) * len(names)), [*operands, lse])
        answer.append(w[0] if matrices else w)
    seen: dict[Statistic, Any] = {}
    for n, s in enumerate(p.observe):
        arrays = [by_name[place] for place in ((s.name,) if s.name in OUTPUTS else places(n, s.name))]
        seen[s] = s.result(arrays)
    return answer, seen


def ours(name: str, x: Any) -> Any:
    """Return x. Raises TypeError unless it is a JAX array."""
    if not isinstance(x, jax.Array):
        raise TypeError(f"{name} must be a jax.Array where others of the call are, got {array_type(x)}")
    return x


SPACE = Namespace(
    xp=jnp,
    hollow=lambda name, x: stand_in(name, ours(name, x)),
    cast=lambda x, dtype: x.astype(dtype),
    constant=jax.lax.stop_gradient,
    like=lambda a, x: jnp.asarray(a),
)


def query_times(metric: Any, query: Any, layout: Any) -> Any:
    """Return the product of a query and a metric, as JAX multiplies them.

    16-bit products are computed in float32, then rounded.
    """
    metric = jnp.asarray(metric) if type(metric) is np.ndarray else metric
    for name, x in (("query", query), ("metric", metric)):
        checks.array(name, stand_in(name, ours(name, x)))
    if query.ndim < 2:
        return query  # the call will be refused
    metrics.fits(metric.shape, query.shape, layout)
    wide = compute_dtype(np.dtype(query.dtype))
    product = metrics.framework_product(query, metric, layout, lambda x: x.astype(wide))
    return product.astype(query.dtype)


@promotion()
def merge(*parts: Any, sink: Any = None) -> Any:
    """Compute `regard.merge` on JAX arrays, under any of JAX's transformations."""
    return merging.combined(SPACE, parts, sink)


@promotion()
def multihead_attention(query: Any, key: Any, value: Any, num_heads: int, **options: Any) -> Any:
    """Compute `regard.multihead_attention` on JAX arrays, under any transformation."""
    return multihead.projected(SPACE, query, key, value, num_heads, **options)


@promotion()
def linear_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.linear_attention` on JAX arrays, under any transformation."""
    return linear.in_parallel(SPACE, query, key, value, **options)


@promotion()
def hopfield(state: Any, patterns: Any, *, beta: Any = None, steps: Any = 1) -> Any:
    """Compute `regard.hopfield` on JAX arrays, under any transformation.

    `beta` and `steps` are not traced.
    """
    return retrieval.retrieved(SPACE, state, patterns, beta, steps)


def steps(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Compute `regard.steps` of JAX arrays with values; its results are NumPy arrays."""
    arguments = {"query": query, "key": key, "value": value} | options
    return stepping.steps(**{name: in_numpy("steps", name, x) for name, x in arguments.items()})


def plan(query: Any = None, key: Any = None, value: Any = None, **options: Any) -> Any:
    """Compute `regard.plan` of JAX arrays.

    Query, key, value, bias, sink and metric may be traced, since only their shapes are read.
    """
    arguments = {"query": query, "key": key, "value": value} | options
    arrays = {name: x for name, x in arguments.items() if name in (*INPUTS, "metric")}
    hollow = {n: planning._array(n, sized(n, x).shape, x.dtype) for n, x in arrays.items() if isinstance(x, jax.Array)}
    return planning.plan(**{name: in_numpy("plan", name, x) for name, x in (arguments | hollow).items()})


def in_numpy(function: str, name: str, x: Any) -> Any:
    """Convert the JAX arrays of an argument to NumPy.

    Raises TypeError for traced arrays.
    """
    if name in RULES and x is not None and not isinstance(x, jax.Array):
        x = (as_mask if name == "mask" else as_score)(x)
        read = (y.payload for y in order([x.node]) if y.op in ("gather", "dense"))
        hidden = any(traced(getattr(y, "source", y)) for y in read)
    else:
        hidden = any(map(traced, x)) if isinstance(x, tuple) else traced(x)
    if hidden:
        raise TypeError(f"regard.{function} reads the values of {name}, which has none while it is traced")
    if name == "seed" and isinstance(x, jax.Array):
        halves = np.asarray(seed_operand(x))
        return int(halves[0]) << 32 | int(halves[1]) if halves.ndim else int(halves)
    if isinstance(x, tuple):
        return tuple(int(y) if isinstance(y, jax.Array) else y for y in x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def stand_in(name: str, x: Any) -> Any:
    """Return an array with a JAX array's shape and dtype, without memory, for checks."""
    if not isinstance(x, jax.Array) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    sized(name, x)
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


def whole_operands(operands: Operands, layout: Any, count: int) -> Operands:
    """Return stand-ins of the operands, with `count` times the positions of query, key and value."""
    whole = {name: stand_in(name, x) for name, x in operands.items()}
    for name in ("query", "key", "value") if count > 1 else ():
        x = whole[name]
        dim = x.ndim - (3 if layout == "bnhd" and x.ndim > 2 else 2)
        if dim >= 0:
            shape = tuple(n * count if axis == dim else n for axis, n in enumerate(x.shape))
            whole[name] = np.broadcast_to(np.zeros((), x.dtype), shape)
    return whole


def on_this_host(x: Any) -> bool:
    """Return whether results of `x` take this machine's memory.

    Traced calls may run elsewhere, or on several devices.
    """
    return not traced(x) and {device.platform for device in x.devices()} == {"cpu"} and x.is_fully_addressable


def plain_offset(offset: Any) -> Any:
    if not isinstance(offset, jax.Array):
        return offset
    if not traced(offset):
        return np.asarray(offset)
    if offset.dtype.kind not in "iu":
        raise TypeError(f"offset must be an int or an integer array, got {offset.dtype}")
    return np.zeros(offset.shape, np.int64)


def plain_origin(origin: Any) -> Any:
    return tuple(0 if traced(x) else x for x in origin) if isinstance(origin, tuple) else origin


def shortest(offset: Any) -> tuple[int, ...]:
    numbers = offset.tolist()
    return tuple(numbers) if len(set(numbers)) > 1 else tuple(numbers[:1]) or (0,)


def values_of(t: Any) -> Any:
    """Return the operand for a table: its traced array, or its values as a constant."""
    return t.operand if isinstance(t, JaxTable) else narrow(t.array)


def seed_operand(seed: jax.Array) -> jax.Array:
    """Return an integer seed, or the two 32-bit integers of a key of `jax.random`."""
    if jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key) or (seed.dtype == np.uint32 and seed.ndim == 1):
        return jax.random.bits(seed, (2,), np.uint32)
    if seed.ndim or seed.dtype.kind not in "iu":
        raise TypeError(f"seed must be an int or one key of jax.random, got {seed.dtype} of shape {seed.shape}")
    return seed


def _not_here(name: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise TypeError(f"regard.{name} is for NumPy arrays; on JAX arrays use {instead}")

    return refuse


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return _not_here(name, "np.asarray of them")


weights = _not_here("weights", "regard.attention(..., return_weights=True)")
attention_vjp = _not_here("attention_vjp", "jax.vjp of regard.attention")
attention_jvp = _not_here("attention_jvp", "jax.jvp of regard.attention")
