"""Calls on sharded arrays: each device computes its batch elements, heads and positions.

Elements of a `vmap`, the first leading dimension and heads are independent, so each may be sharded over axes of a mesh.
A device's shard is a call with an `origin`, so rules, tables and dropout are those of the whole. Gradients of shared
arrays are summed. The sequence may be sharded in forward and backward; `spreading` says how. Arrays sharded along other
dimensions are gathered first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax
from regard.core.statistics import GroupReceived
from regard.jax.binding import bind
from regard.jax.spreading import Ranks, base, computed, refusal, sequence_dim
from regard.jax.task import MATRICES, Axes, PrimitiveTask, Shape, transposed, without
from regard.jax.xla.values import promotion
from regard.warning import warn_once

MeshAxes = dict[str, tuple[str, ...]]
Factors = tuple[str | None, ...]
BATCH, HEAD, SEQUENCE = "b", "h", "s"
TRAILING = dict.fromkeys((*MATRICES, "bias", "weights"), 3) | {"lse": 2, "entropy": 2, "offset": 0}


class ShardedAxes:
    """The axes of a call that may be sharded, and the dimensions of arrays along them.

    typed: types are asked for, in which the sequence is an axis of tasks that gather it, too.
    """

    def __init__(self, task: PrimitiveTask, shapes: Sequence[Shape], typed: bool = False):
        self.task, self.shapes = task, task.named(shapes)
        self.swap = task.call.layout == "bnhd"
        q, k, v = (transposed(self.plain(name), self.swap) for name in ("query", "key", "value"))
        self.lead = np.broadcast_shapes(q[:-3], k[:-3], v[:-3])
        self.heads, self.kv_heads = q[-3], k[-3]
        self.sizes = {f"v{n}": size for n, size in enumerate(task.sizes)}
        self.sizes |= {BATCH: self.lead[0] if self.lead else 1}
        self.sizes |= {HEAD: self.heads if self.kv_heads == 1 else self.kv_heads}  # groups stay together
        self.rows, self.keys = q[-2], k[-2]
        self.sizes |= {SEQUENCE: math.gcd(self.rows, self.keys)}
        self.spreads = (typed or refusal(task) is None) and self.rows > 0 < self.keys

    def plain(self, name: str) -> Shape:
        """Return the shape of an operand without the axes of `vmap`."""
        return without(self.shapes[name], self.task.axes_of[name])

    @property
    def operands(self) -> list[Factors]:
        """The axis of the call along each dimension of each operand, or None."""
        return [self.of(n, self.shapes[n], axes) for n, axes in zip(self.task.operands, self.task.axes, strict=True)]

    def results(self, shapes: Sequence[Shape]) -> list[Factors]:
        axes = dict(self.task.wrt) or dict.fromkeys(self.task.results, tuple(range(len(self.task.sizes))))
        return [self.of(n, shape, axes[n]) for n, shape in zip(self.task.results, shapes, strict=True)]

    def of(self, name: str, shape: Shape, axes: Axes) -> Factors:
        inner = iter(self.inside(name, without(shape, axes)))
        outer = {axis: f"v{n}" for n, axis in enumerate(axes)}
        return tuple(outer[n] if n in outer else next(inner) for n in range(len(shape)))

    def inside(self, name: str, shape: Shape) -> Factors:
        """Return the axes of the call along the dimensions of an array without `vmap`."""
        name = base(name)
        factors: list[str | None] = [None] * len(shape)
        if ".table" in name or name in ("seed", "origin"):
            return tuple(factors)
        if name == "sink":
            return tuple(HEAD if size == self.heads > 1 else None for size in shape)
        trailing = 3 if ".dense" in name else TRAILING.get(name, len(shape) - len(self.lead))
        first = len(shape) - trailing - len(self.lead)  # the first leading dimension, negative if missing
        if self.lead and first >= 0 and shape[first] == self.lead[0] > 1:
            factors[first] = BATCH
        head = len(shape) - trailing + (1 if self.swap and name in MATRICES else 0)
        if trailing and head >= 0 and shape[head] in (self.heads, self.kv_heads) and shape[head] > 1:
            factors[head] = HEAD
        sequence = sequence_dim(self.task, name, len(shape)) if self.spreads else None
        if sequence is not None:
            factors[sequence] = SEQUENCE
        return tuple(factors)

    def mesh_axes(self, mesh: Any, given: Iterable[tuple[Factors, Any]]) -> MeshAxes:
        """Return the mesh axes of each axis of the call; the first array with any decides."""
        taken: MeshAxes = {}
        for factors, spec in given:
            for factor, names in zip(factors, spec, strict=False):
                axes = (names,) if isinstance(names, str) else tuple(names or ())
                if factor is None or factor in taken or not axes or any(set(axes) & set(x) for x in taken.values()):
                    continue
                if self.sizes[factor] % math.prod(mesh.shape[axis] for axis in axes) == 0:
                    taken[factor] = axes
        return taken

    def part(self, mesh_axes: MeshAxes, results: Sequence[Factors], mesh: Any) -> Any:
        """Return the function that one device applies to its shards of the operands."""
        task, call = self.task, self.task.call
        counts = {factor: math.prod(mesh.shape[axis] for axis in axes) for factor, axes in mesh_axes.items()}
        lead = tuple(n // counts.get(BATCH, 1) if axis == 0 else n for axis, n in enumerate(self.lead))
        flat = call.offset is not None and len(call.offset) > 1
        names = tuple(n for n, there in (("origin", call.origin), ("offset", flat or None)) if there is not None)
        local = replace(
            task,
            call=replace(
                call, inputs=(*call.inputs, *names), origin=None, offset=None if "offset" in names else call.offset
            ),
            operands=(*task.operands, *names),
            axes=(*task.axes, *((None,) * len(task.sizes) for _ in names)),
            sizes=tuple(size // counts.get(f"v{n}", 1) for n, size in enumerate(task.sizes)),
        )

        axes, ranks = mesh_axes.get(SEQUENCE, ()), None
        if axes:
            ranks = Ranks.of(task, self.plain("query"), self.plain("key"), axes, counts[SEQUENCE])

        @shard_alone()
        def compute(*operands: Any) -> list[Any]:
            def index(factor: str) -> Any:
                return jax.lax.axis_index(mesh_axes[factor]) if factor in mesh_axes else 0

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
            shards = computed(local, x, ranks) if ranks else bind(local, [x[name] for name in local.operands])
            grouped = {str(n) for n, (name, _) in enumerate(call.observe) if name == GroupReceived.name}
            for n, (name, factors) in enumerate(zip(task.results, results, strict=True)):
                shared = [axis for factor, axes in mesh_axes.items() if factor not in factors for axis in axes]
                if shared and (task.wrt or name in grouped):
                    shards[n] = jax.lax.psum(shards[n], tuple(shared))
            return shards

        return compute


@contextmanager
def shard_alone() -> Iterator[None]:
    """Set `promotion`, and no mesh: a device's program knows nothing of explicit axes."""
    with promotion(), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        yield


def axes_of(task: PrimitiveTask, arrays: Sequence[Any], typed: bool = False) -> ShardedAxes:
    return ShardedAxes(task, [tuple(x.shape) for x in arrays], typed)


def spec_of(factors: Factors, mesh_axes: MeshAxes) -> P:
    return P(*(mesh_axes.get(factor) if factor else None for factor in factors))


def specs(task: PrimitiveTask, avals: Sequence[Any], results: Sequence[Shape]) -> list[P]:
    """Return the sharding of results on explicit axes, from the types of operands."""
    sizes, mesh = axes_of(task, avals, typed=True), avals[0].sharding.mesh
    mesh_axes = sizes.mesh_axes(mesh, [(f, x.sharding.spec) for f, x in zip(sizes.operands, avals, strict=True)])
    return [spec_of(factors, mesh_axes) for factors in sizes.results(results)]


def resharded(x: Any, aval: Any) -> Any:
    """Return x with the sharding of type `aval`; they differ on explicit axes alone."""
    spec = aval.sharding.spec
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def replicated(x: Any) -> Any:
    """Return x replicated on every device, along explicit axes of the mesh."""
    aval = jax.typeof(x)
    return resharded(x, aval.update(sharding=aval.sharding.update(spec=P(*(None for _ in aval.shape)))))


def partition(task: PrimitiveTask, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return a device's function and its shardings, for `custom_partitioning`."""
    sizes = axes_of(task, operands)
    sizes.spreads &= mesh.devices.flat[0].platform == "cpu"
    warn_of_gathering(task, operands)
    ins, outs = sizes.operands, sizes.results([tuple(x.shape) for x in results])
    every = (*zip(ins, operands, strict=True), *zip(outs, results, strict=True))
    specs = [(factors, x.sharding.spec) for factors, x in every if isinstance(x.sharding, NamedSharding)]
    mesh_axes = sizes.mesh_axes(mesh, specs)

    def shardings(factors: Iterable[Factors]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(x, mesh_axes)) for x in factors]

    return mesh, sizes.part(mesh_axes, outs, mesh), shardings(outs), tuple(shardings(ins))


def warn_of_gathering(task: PrimitiveTask, operands: Sequence[Any]) -> None:
    """Warn once for each reason that makes a device take the whole of a sequence that is sharded."""
    reason = refusal(task)
    if reason is None:
        return
    for factors, x in zip(axes_of(task, operands, typed=True).operands, operands, strict=True):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
        if any(axes and factor == SEQUENCE for factor, axes in zip(factors, spec, strict=False)):
            instead = "leave it out, or call it for fewer queries"
            warn_once(f"a sequence that is sharded is gathered on every device: {reason} needs it whole; {instead}")
            return


def infer(task: PrimitiveTask, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
    """Return the shardings of results, for GSPMD."""
    sizes = axes_of(task, operands)
    mesh_axes = sizes.mesh_axes(mesh, [(f, x.sharding.spec) for f, x in zip(sizes.operands, operands, strict=True)])
    return [NamedSharding(mesh, spec_of(x, mesh_axes)) for x in sizes.results([tuple(x.shape) for x in results])]


def rule(task: PrimitiveTask, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> SdyShardingRule:
    """Return the sharding rule for Shardy.

    Each axis that may be sharded has a letter; every other dimension has one of its own.
    """
    sizes = axes_of(task, operands)
    others: list[str] = []
    group = sizes.heads // sizes.kv_heads if sizes.kv_heads else 1
    compound = group > 1 and sizes.kv_heads > 1

    def letters(factors: Factors, shape: Shape) -> ArrayMapping:
        factors_of: list[Any] = []
        for factor, size in zip(factors, shape, strict=True):
            if factor is None:
                others.append(f"x{len(others)}")
                factor = others[-1]
            elif factor == SEQUENCE and size != sizes.rows:
                factor = "k"
            if factor == HEAD and compound and size == sizes.heads:
                if "g" not in others:  # letters are listed in order of appearance
                    others.append("g")
                factors_of.append(CompoundFactor(HEAD, "g"))
            else:
                factors_of.append(factor)
        return ArrayMapping(*factors_of)

    shapes = [[tuple(x.shape) for x in arrays] for arrays in (operands, results)]
    every = (sizes.operands, sizes.results(shapes[1]))
    ins, outs = (tuple(map(letters, f, s)) for f, s in zip(every, shapes, strict=True))
    more: dict[str, Any] = {"g": group} if compound else {}
    return SdyShardingRule(ins, outs, need_replication_factors=tuple(others), **more)


def whole(task: PrimitiveTask, *operands: Any) -> list[Any]:
    return bind(task, operands)


partitioned = custom_partitioning(whole, static_argnums=(0,))
partitioned.def_partition(partition, infer_sharding_from_operands=infer, sharding_rule=rule)
