"""Calls whose arrays lie on several devices: each device computes its batch elements and heads, where they are.

Elements of a `vmap`, the first leading dimension and heads are independent, so each may be cut along axes of a mesh.
What a device has is then a call like any other, whose `origin` says where it lies, so that rules, tables and dropout
are those of the whole; gradients of what it shares with others are summed. Whatever else is cut is put together first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from regard.jax.binding import bind
from regard.jax.task import MATRICES, Axes, Shape, Task, turned, without
from regard.jax.xla.values import promotion

Cuts = dict[str, tuple[str, ...]]
Factors = tuple[str | None, ...]
BATCH, HEAD = "b", "h"
BEHIND = dict.fromkeys((*MATRICES, "bias", "weights"), 3) | {"lse": 2, "entropy": 2, "offset": 0}


class Sizes:
    """What of a call may be cut, and which dimensions of its arrays that is."""

    def __init__(self, task: Task, shapes: Sequence[Shape]):
        self.task, self.shapes = task, task.named(shapes)
        self.swap = task.call.layout == "bnhd"
        q, k, v = (turned(self.plain(name), self.swap) for name in ("query", "key", "value"))
        self.lead = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
        self.heads, self.kv_heads = q[-3], k[-3]
        self.sizes = {f"v{n}": size for n, size in enumerate(task.sizes)}
        self.sizes |= {BATCH: self.lead[0] if self.lead else 1}
        self.sizes |= {HEAD: self.heads if self.kv_heads == 1 else self.kv_heads}  # groups stay together

    def plain(self, name: str) -> Shape:
        """The shape of an operand without the axes of `vmap`."""
        return without(self.shapes[name], self.task.axes_of[name])

    @property
    def operands(self) -> list[Factors]:
        """For each dimension of each operand what may be cut along it."""
        return [self.of(n, self.shapes[n], axes) for n, axes in zip(self.task.operands, self.task.axes, strict=True)]

    def results(self, shapes: Sequence[Shape]) -> list[Factors]:
        axes = dict(self.task.wrt) or dict.fromkeys(self.task.results, tuple(range(len(self.task.sizes))))
        return [self.of(n, shape, axes[n]) for n, shape in zip(self.task.results, shapes, strict=True)]

    def of(self, name: str, shape: Shape, axes: Axes) -> Factors:
        inner = iter(self.inside(name, without(shape, axes)))
        outer = {axis: f"v{n}" for n, axis in enumerate(axes)}
        return tuple(outer[n] if n in outer else next(inner) for n in range(len(shape)))

    def inside(self, name: str, shape: Shape) -> Factors:
        """Those of an array without axes of `vmap`."""
        while name.startswith(("t.", "s.", "ct.")):
            name = name.partition(".")[2]
        found: list[str | None] = [None] * len(shape)
        if ".table" in name or name in ("seed", "origin"):
            return tuple(found)
        if name == "sink":
            return tuple(HEAD if size == self.heads > 1 else None for size in shape)
        behind = 3 if ".dense" in name else BEHIND.get(name, len(shape) - len(self.lead))
        first = len(shape) - behind - len(self.lead)  # where the first leading dimension is, if it is there
        if self.lead and first >= 0 and shape[first] == self.lead[0] > 1:
            found[first] = BATCH
        head = len(shape) - behind + (1 if self.swap and name in MATRICES else 0)
        if behind and head >= 0 and shape[head] in (self.heads, self.kv_heads) and shape[head] > 1:
            found[head] = HEAD
        return tuple(found)

    def cuts(self, mesh: Any, given: Iterable[tuple[Factors, Any]]) -> Cuts:
        """Along which axes of the mesh everything is cut, from how arrays are: the first that says so decides."""
        found: Cuts = {}
        for factors, spec in given:
            for factor, names in zip(factors, spec, strict=False):
                axes = (names,) if isinstance(names, str) else tuple(names or ())
                if factor is None or factor in found or not axes or any(set(axes) & set(x) for x in found.values()):
                    continue
                if self.sizes[factor] % math.prod(mesh.shape[axis] for axis in axes) == 0:
                    found[factor] = axes
        return found

    def part(self, cuts: Cuts, results: Sequence[Factors], mesh: Any) -> Any:
        """What one device computes from its parts of the operands."""
        task, call = self.task, self.task.call
        counts = {factor: math.prod(mesh.shape[axis] for axis in axes) for factor, axes in cuts.items()}
        lead = tuple(n // counts.get(BATCH, 1) if axis == 0 else n for axis, n in enumerate(self.lead))
        flat = call.offset is not None and len(call.offset) > 1
        names = tuple(n for n, there in (("origin", call.origin), ("offset", flat or None)) if there is not None)
        mine = replace(
            task,
            call=replace(
                call, inputs=(*call.inputs, *names), origin=None, offset=None if "offset" in names else call.offset
            ),
            operands=(*task.operands, *names),
            axes=(*task.axes, *((None,) * len(task.sizes) for _ in names)),
            sizes=tuple(size // counts.get(f"v{n}", 1) for n, size in enumerate(task.sizes)),
        )

        @promotion()
        def compute(*operands: Any) -> list[Any]:
            def index(factor: str) -> Any:
                return jax.lax.axis_index(cuts[factor]) if factor in cuts else 0

            x = task.named(operands)
            here = jnp.stack(
                [
                    jnp.asarray(index(BATCH) * math.prod(lead), np.int32),
                    jnp.asarray(index(HEAD) * (self.heads // counts.get(HEAD, 1)), np.int32),
                    jnp.asarray(0, np.int32),
                ]
            )
            if "origin" in x:
                there = [axis for axis in task.axes_of["origin"] if axis is not None]
                x["origin"] = x["origin"] + jnp.expand_dims(here, there).astype(x["origin"].dtype)
            else:
                x["origin"] = jnp.asarray(call.origin, np.int32) + here
            if "offset" in names:
                every = jnp.asarray(call.offset, np.int32).reshape(self.lead)
                x["offset"] = jax.lax.dynamic_slice_in_dim(every, index(BATCH) * lead[0], lead[0])
            found = bind(mine, [x[name] for name in mine.operands])
            grouped = {str(n) for n, (name, _) in enumerate(call.observe) if name == "group_received"}
            for n, (name, factors) in enumerate(zip(task.results, results, strict=True)):
                shared = [axis for factor, axes in cuts.items() if factor not in factors for axis in axes]
                if shared and (task.wrt or name in grouped):
                    found[n] = jax.lax.psum(found[n], tuple(shared))
            return found

        return compute


def sizes_of(task: Task, arrays: Sequence[Any]) -> Sizes:
    return Sizes(task, [tuple(x.shape) for x in arrays])


def spec_of(factors: Factors, cuts: Cuts) -> P:
    return P(*(cuts.get(factor) if factor else None for factor in factors))


def specs(task: Task, avals: Sequence[Any], results: Sequence[Shape]) -> list[P]:
    """How results lie on a mesh with explicit axes, from the types of operands."""
    sizes, mesh = sizes_of(task, avals), avals[0].sharding.mesh
    cuts = sizes.cuts(mesh, [(f, x.sharding.spec) for f, x in zip(sizes.operands, avals, strict=True)])
    return [spec_of(factors, cuts) for factors in sizes.results(results)]


def resharded(x: Any, aval: Any) -> Any:
    """Return x with the sharding that its type `aval` names, which differs on meshes with explicit axes alone."""
    spec = aval.sharding.spec
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def replicated(x: Any) -> Any:
    """Return x, whole on every device where axes of the mesh are explicit."""
    aval = jax.typeof(x)
    return resharded(x, aval.update(sharding=aval.sharding.update(spec=P(*(None for _ in aval.shape)))))


def partition(task: Task, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """What `custom_partitioning` asks for: how a device computes, and how results and operands have to lie for that."""
    sizes = sizes_of(task, operands)
    ins, outs = sizes.operands, sizes.results([tuple(x.shape) for x in results])
    every = (*zip(ins, operands, strict=True), *zip(outs, results, strict=True))
    known = [(factors, x.sharding.spec) for factors, x in every if isinstance(x.sharding, NamedSharding)]
    cuts = sizes.cuts(mesh, known)

    def lie(factors: Iterable[Factors]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(x, cuts)) for x in factors]

    return mesh, sizes.part(cuts, outs, mesh), lie(outs), tuple(lie(ins))


def infer(task: Task, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
    """How results lie, where GSPMD and not Shardy asks."""
    sizes = sizes_of(task, operands)
    cuts = sizes.cuts(mesh, [(f, x.sharding.spec) for f, x in zip(sizes.operands, operands, strict=True)])
    return [NamedSharding(mesh, spec_of(x, cuts)) for x in sizes.results([tuple(x.shape) for x in results])]


def rule(task: Task, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """The same for Shardy: a letter for what may be cut, and one of its own for every other dimension."""
    sizes = sizes_of(task, operands)
    others: list[str] = []
    group = sizes.heads // sizes.kv_heads if sizes.kv_heads else 1
    compound = group > 1 and sizes.kv_heads > 1

    def letters(factors: Factors, shape: Shape) -> ArrayMapping:
        found: list[Any] = []
        for factor, size in zip(factors, shape, strict=True):
            if factor is None:
                others.append(f"x{len(others)}")
                factor = others[-1]
            if factor == HEAD and compound and size == sizes.heads:
                if "g" not in others:  # they are listed in the order in which they come
                    others.append("g")
                found.append(CompoundFactor(HEAD, "g"))
            else:
                found.append(factor)
        return ArrayMapping(*found)

    shapes = [[tuple(x.shape) for x in arrays] for arrays in (operands, results)]
    every = (sizes.operands, sizes.results(shapes[1]))
    ins, outs = (tuple(map(letters, f, s)) for f, s in zip(every, shapes, strict=True))
    more: dict[str, Any] = {"g": group} if compound else {}
    return SdyShardingRule(ins, outs, need_replication_factors=tuple(others), **more)


def whole(task: Task, *operands: Any) -> list[Any]:
    return bind(task, operands)


partitioned = custom_partitioning(whole, static_argnums=(0,))
partitioned.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
