"""Attention as primitives of JAX: shapes, lowering, batching and derivatives.

Each primitive is differentiated into others:

    forward       O = f(x)                                       x: every input that may vary
    jvp           J(x) ẋ                 linear in ẋ              the tangent of forward
    backward      J(x)ᵀ ō                linear in ō              the transpose of jvp
    backward_jvp  d(J(x)ᵀ ō)             linear in ẋ and ō˙       the tangent of backward
    jvp_jvp       f″(x)[ẋ, ẍ]            linear in both           the tangent of jvp
    weights       exp(S − lse)

With u the cotangent of a gradient: Hessians are symmetric, so backward_jvp is its own transpose in ẋ, and its transpose
in ō˙ is jvp along u. The transpose of jvp_jvp in ẍ is backward_jvp. Outputs of forward are operands of the others, in
16 bits with low, what rounding took from out. They follow from x, so only x varies. On the CPU an engine computes all
but jvp_jvp through a foreign function. On other devices, and for derivatives beyond these, `regard.jax.xla.scan` does,
in plain JAX.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

import jax
from regard.core.statistics import INSTEAD
from regard.jax import ffi, sharding, shardmap
from regard.jax.binding import PRIMITIVES, bind, result_type
from regard.jax.private import ad, batching, given_devices, manual_axes, mlir, on_a_mesh
from regard.jax.task import Axes, PrimitiveTask, StaticCall, run
from regard.jax.xla import scan
from regard.runtime import memory

Values = Sequence[Any]
Operands = dict[str, tuple[Any, Axes]]  # values by name, with their axes of `vmap`


def task_of(kind: str, call: StaticCall, operands: Operands, **more: Any) -> tuple[PrimitiveTask, list[Any]]:
    """Return a task over operands, and their values."""
    axes = tuple(axes for _, axes in operands.values())
    return PrimitiveTask(kind, call, tuple(operands), axes, **more), [value for value, _ in operands.values()]


def given(task: PrimitiveTask, operands: Values, *prefixes: str) -> Operands:
    """Return inputs, outputs, low and operands with one of the prefixes, with their axes."""
    every = dict(zip(task.operands, zip(operands, task.axes, strict=True), strict=True))
    plain = {*task.call.inputs, *task.call.outputs, "low"}
    return {name: x for name, x in every.items() if name in plain or name.startswith(prefixes)}


def varying(x: Any) -> bool:
    """Return whether a tangent or cotangent is more than a symbolic zero."""
    return not isinstance(x, ad.Zero) and x is not None


# Shapes, lowering, evaluation


def abstract(*avals: Any, task: PrimitiveTask) -> list[Any]:
    if task.call.spread is not None:
        shardmap.check(task)
    index = jax.dtypes.canonicalize_dtype(np.int64)
    types = task.shapes({n: (a.shape, a.dtype) for n, a in zip(task.operands, avals, strict=True)})
    types = [(s, index if t == np.int64 else t) for s, t in types]
    like = avals[0]
    if like.sharding.mesh.empty:
        return [result_type(like, *each) for each in types]
    varies = {manual_axes(a) for a in avals}
    if len(varies) > 1:
        raise ValueError("attention under shard_map needs operands that vary over the same mesh axes: jax.lax.pcast")
    specs = sharding.specs(task, avals, [s for s, _ in types])
    return [result_type(like, *each, spec) for each, spec in zip(types, specs, strict=True)]


def lower_to_engine(ctx: Any, *operands: Any, task: PrimitiveTask) -> Any:
    if task.call.engine == "xla":
        return lower_elsewhere(ctx, *operands, task=task)
    if task.call.spread is not None:
        return lower_in_shard_map(ctx, *operands, task=task)
    if on_a_mesh(ctx):
        return lower_to_shards(ctx, *operands, task=task)
    return jax.ffi.ffi_lowering(ffi.TARGET)(ctx, *operands, task=ffi.attribute(task, ctx.avals_in, ctx.avals_out))


def scanned(*operands: Any, task: PrimitiveTask) -> list[Any]:
    return scan.run(task, operands)


def lower_elsewhere(ctx: Any, *operands: Any, task: PrimitiveTask) -> Any:
    if task.call.spread is not None:
        raise ValueError(f"{shardmap.NAME} runs on the CPU")
    if task.call.engine not in (None, "xla"):
        raise ValueError(f"engine {task.call.engine!r} runs on the CPU; on other devices give engine='xla', or none")
    return lower_plain(ctx, *operands, task=task)


def lower_plain(ctx: Any, *operands: Any, task: PrimitiveTask) -> Any:
    # The scan has no rules for explicit axes: each device runs it on its shard, which has none.
    explicit = any(x.sharding.mesh.explicit_axes for x in ctx.avals_in)
    if explicit and on_a_mesh(ctx):
        return lower_to_shards(ctx, *operands, task=task)
    return lower_to_scan(ctx, *operands, task=task)


lower_to_scan = mlir.lower_fun(scanned)
lower_in_shard_map = mlir.lower_fun(shardmap.compute)
lower_to_shards = mlir.lower_fun(lambda *operands, task: sharding.partitioned(task, *operands))


@lru_cache(maxsize=512)
def compiled(task: PrimitiveTask) -> Any:
    return jax.jit(lambda *operands: bind(task, operands))


def evaluate(*operands: Any, task: PrimitiveTask) -> Any:
    """Run an engine on the arrays in place; outside of jit nothing is compiled."""
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in operands]
    here = {x.sharding for x in arrays}
    device = next(iter(here))
    alone = len(here) == 1 and isinstance(device, jax.sharding.SingleDeviceSharding)
    on_cpu = alone and next(iter(device.device_set)).platform == "cpu"
    if task.call.engine == "xla" or task.kind == "jvp_jvp" or not on_cpu:
        with jax.disable_jit(False):  # else the program would call this function without end
            return compiled(task)(*arrays)
    # JAX takes over memory that begins on a cache line without a copy.
    results = [memory.empty(a.shape, a.dtype, aligned=True) for a in abstract(*map(jax.typeof, arrays), task=task)]
    run(task, [np.asarray(x) for x in arrays], results)
    # Results may move if the arrays may.
    where = device if any(x.committed for x in arrays) else None
    return [jax.device_put(x, where) for x in results]


# Batching


def batch(operands: Values, dims: Sequence[int | None], *, task: PrimitiveTask) -> tuple[list[Any], list[int]]:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}

    def add(axes: Axes, d: int | None) -> Axes:
        return (d, *(a if a is None or d is None or a < d else a + 1 for a in axes))

    results = bind(
        replace(
            task,
            axes=tuple(add(axes, d) for axes, d in zip(task.axes, dims, strict=True)),
            sizes=(size, *task.sizes),
            wrt=tuple((name, add(axes, 0)) for name, axes in task.wrt),
        ),
        operands,
    )
    return results, [0] * len(results)


# Derivatives


def tangents_of(task: PrimitiveTask, names: Sequence[str], tangents: Values, prefix: str) -> Operands:
    """Return the tangents of operands that vary, by name, with their axes."""
    every = zip(task.operands, tangents, task.axes, strict=True)
    return {prefix + n: (ad.instantiate_zeros(t), axes) for n, t, axes in every if n in names and varying(t)}


def zeros(results: Values) -> list[Any]:
    return [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def add(x: list[Any], y: list[Any]) -> list[Any]:
    return [ad.add_tangents(a, b) for a, b in zip(x, y, strict=True)]


def forward_jvp(primals: Values, tangents: Values, *, task: PrimitiveTask) -> tuple[list[Any], list[Any]]:
    t = tangents_of(task, task.call.differentiable, tangents, "t.")
    low = bool(t) and primals[0].dtype.itemsize == 2  # gradients of such calls are more exact with it
    computed = bind(replace(task, call=replace(task.call, low=True)) if low else task, primals)
    results = computed[: len(task.results)]
    dots = zeros(results)
    if t:
        first, count = tuple(range(len(task.sizes))), len(task.call.outputs)
        outputs = {name: (x, first) for name, x in zip(task.call.outputs, results, strict=False)}
        more = {"low": (computed[-1], first)} if low else {}
        call = replace(task.call, low=False)
        along = task_of("jvp", call, given(task, primals) | outputs | more | t, sizes=task.sizes)
        dots[:count] = bind(*along)
        for n, x in enumerate(results[count:], count):
            if jnp.issubdtype(x.dtype, jnp.floating) and task.results[n] != "low":
                dots[n] = underivable_p.bind(
                    *(x for x, _ in t.values()),
                    like=jax.typeof(x),
                    name=task.call.observe[int(task.results[n].partition(".")[0])][0],
                )
    return results, dots


def jvp_jvp(primals: Values, tangents: Values, *, task: PrimitiveTask) -> tuple[list[Any], list[Any]]:
    results = bind(task, primals)
    dots = zeros(results)
    t = tangents_of(task, [n for n in task.operands if n.startswith("t.")], tangents, "")
    if t:
        dots = add(dots, bind(*task_of("jvp", task.call, given(task, primals) | t, sizes=task.sizes)))
    s = tangents_of(task, task.call.differentiable, tangents, "s.")
    if s:
        dots = add(dots, bind(*task_of("jvp_jvp", task.call, given(task, primals, "t.") | s, sizes=task.sizes)))
    return results, dots


def backward_jvp(primals: Values, tangents: Values, *, task: PrimitiveTask) -> tuple[list[Any], list[Any]]:
    results = bind(task, primals)
    names = [*task.call.differentiable, *(n for n in task.operands if n.startswith("ct."))]
    t = tangents_of(task, names, tangents, "t.")
    if not t:
        return results, zeros(results)
    along = given(task, primals, "ct.") | t
    return results, bind(*task_of("backward_jvp", task.call, along, sizes=task.sizes, wrt=task.wrt))


def scan_jvp(primals: Values, tangents: Values, *, task: PrimitiveTask) -> tuple[list[Any], list[Any]]:
    """Differentiate the plain JAX form, for primitives without a tangent of their own."""
    if task.call.spread is not None:
        raise ValueError(f"{shardmap.NAME} has no third derivative")
    results = bind(task, primals)
    live = [n for n, t in enumerate(tangents) if varying(t) and jnp.issubdtype(primals[n].dtype, jnp.floating)]

    def function(*some: Any) -> list[Any]:
        operands = list(primals)
        for n, x in zip(live, some, strict=True):
            operands[n] = x
        values = scan.run(task, [sharding.replicated(x) for x in operands])
        return [sharding.resharded(x, jax.typeof(like)) for x, like in zip(values, results, strict=True)]

    _, dots = jax.jvp(function, [primals[n] for n in live], [ad.instantiate_zeros(tangents[n]) for n in live])
    return results, dots


def jvp_transpose(cotangents: Values, *operands: Any, task: PrimitiveTask) -> list[Any]:
    """Transpose jvp and jvp_jvp.

    ⟨ō, J ẋ⟩ = ⟨Jᵀ ō, ẋ⟩, and ⟨ō, f″[ẋ, ẍ]⟩ = ⟨d(Jᵀ ō) along one direction, the other⟩.
    """
    first = tuple(range(len(task.sizes)))
    ct = {f"ct.{n}": (x, first) for n, x in zip(task.results, cotangents, strict=True) if varying(x)}
    every = zip(task.operands, operands, task.axes, strict=True)
    wrt = [(n, axes) for n, x, axes in every if ad.is_undefined_primal(x)]
    (linear,) = {n[:2] for n, _ in wrt}
    shared = given(task, operands)
    if task.kind == "jvp_jvp":
        other = "t." if linear == "s." else "s."
        shared |= {f"t.{n[2:]}": x for n, x in given(task, operands, other).items() if n.startswith(other)}
    gradients = {}
    if ct:
        kind = "backward" if task.kind == "jvp" else "backward_jvp"
        inputs = tuple((n[2:], axes) for n, axes in wrt)
        back = bind(*task_of(kind, task.call, shared | ct, sizes=task.sizes, wrt=inputs))
        gradients = dict(zip((n for n, _ in wrt), back, strict=True))
    return cotangents_of(task, operands, gradients)


def backward_transpose(cotangents: Values, *operands: Any, task: PrimitiveTask) -> list[Any]:
    """Transpose backward in ō, and backward_jvp in ẋ and ō˙."""
    u = {f"t.{n}": (x, axes) for (n, axes), x in zip(task.wrt, cotangents, strict=True) if varying(x)}
    wrt = {n: axes for n, x, axes in zip(task.operands, operands, task.axes, strict=True) if ad.is_undefined_primal(x)}
    gradients: dict[str, Any] = {}
    if not u:
        return [None] * len(operands)
    prefix = "ct." if task.kind == "backward" else "t.ct."
    inputs = tuple((n.removeprefix("t."), axes) for n, axes in wrt.items() if not n.startswith(prefix))
    if inputs:
        along = given(task, operands, "ct.") | u
        back = bind(*task_of("backward_jvp", task.call, along, sizes=task.sizes, wrt=inputs))
        gradients |= {f"t.{n}": x for (n, _), x in zip(inputs, back, strict=True)}
    if len(wrt) > len(inputs):
        dots = bind(*task_of("jvp", task.call, given(task, operands) | u, sizes=task.sizes))
        every = {prefix + n: x for n, x in zip(task.call.outputs, dots, strict=True)}
        gradients |= {n: summed(every[n], axes) for n, axes in wrt.items() if n in every}
    return cotangents_of(task, operands, gradients)


def forward_transpose(cotangents: Values, *operands: Any, task: PrimitiveTask) -> list[Any]:
    """Transpose forward in value, the only input it is linear in.

    The result is the gradient, which is the same at any value, such as 0.
    """
    every = dict(zip(task.operands, operands, strict=True))
    if [n for n, x in every.items() if ad.is_undefined_primal(x)] != ["value"]:
        raise NotImplementedError("attention is linear in value alone; jax.vjp gives gradients of other arguments")
    ct = {n: x for n, x in zip(task.results, cotangents, strict=True) if varying(x)}
    if "out" not in ct:
        return [None] * len(operands)
    first = tuple(range(len(task.sizes)))
    value = every["value"].aval
    zero = ad.instantiate_zeros(ad.Zero(value))
    plain = [zero if n == "value" else x for n, x in every.items()]
    outputs = dict(zip(task.results, bind(task, plain), strict=True))
    outputs_given = {n: (outputs[n], first) for n in task.call.outputs}
    along = given(task, plain) | outputs_given | {"ct.out": (ct["out"], first)}
    wrt = (("value", task.axes_of["value"]),)
    (gradient,) = bind(*task_of("backward", task.call, along, sizes=task.sizes, wrt=wrt))
    return cotangents_of(task, operands, {"value": gradient})


def cotangents_of(task: PrimitiveTask, operands: Values, found: dict[str, Any]) -> list[Any]:
    """Return a cotangent or None for each operand, sharded as the operand is."""
    every = zip(task.operands, operands, strict=True)
    return [sharding.resharded(found[n], x.aval) if n in found else None for n, x in every]


def summed(x: Any, axes: Axes) -> Any:
    """Move an output's leading axes of `vmap` to `axes`; sum over those that are None."""
    x = x.sum(tuple(n for n, axis in enumerate(axes) if axis is None), dtype=x.dtype)
    there = [axis for axis in axes if axis is not None]
    return jnp.moveaxis(x, range(len(there)), there)


def undefined(*_: Any, name: str, **__: Any) -> Any:
    raise TypeError(
        f"the statistic {name!r} has no derivative; observe it of jax.lax.stop_gradient(query), key and value"
        + INSTEAD.get(name, "")
    )


RULES = {
    "forward": forward_jvp,
    "weights": scan_jvp,
    "backward": backward_jvp,
    "jvp": jvp_jvp,
    "backward_jvp": scan_jvp,
    "jvp_jvp": scan_jvp,
}
for kind, p in PRIMITIVES.items():
    p.multiple_results = True
    p.def_impl(evaluate)
    p.def_abstract_eval(abstract)
    mlir.register_lowering(p, lower_plain if kind == "jvp_jvp" else lower_elsewhere)
    batching.primitive_batchers[p] = batch
    ad.primitive_jvps[p] = RULES[kind]
    given_devices(p)
    if kind != "jvp_jvp":
        mlir.register_lowering(p, lower_to_engine, platform="cpu")
ad.primitive_transposes[PRIMITIVES["forward"]] = forward_transpose
ad.primitive_transposes[PRIMITIVES["jvp"]] = jvp_transpose
ad.primitive_transposes[PRIMITIVES["jvp_jvp"]] = jvp_transpose
ad.primitive_transposes[PRIMITIVES["backward"]] = backward_transpose
ad.primitive_transposes[PRIMITIVES["backward_jvp"]] = backward_transpose

# The tangent of a statistic without a derivative: an error once anything depends on it.
underivable_p = Primitive("attention_statistic_tangent")
underivable_p.def_impl(undefined)
underivable_p.def_abstract_eval(lambda *avals, like, name: like)
mlir.register_lowering(underivable_p, undefined)
ad.primitive_jvps[underivable_p] = undefined
ad.primitive_transposes[underivable_p] = undefined
batching.primitive_batchers[underivable_p] = undefined
