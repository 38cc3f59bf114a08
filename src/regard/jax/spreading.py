"""A call whose sequence lies on several devices: its steps, and what passes from device to device.

Each device has equal, contiguous shards of queries and keys. A device's program is unrolled: in each step the owners of
some positions send them along a binary tree to the devices that see them, and every device computes its part
(`regard.jax.parts`). A step's sends wait for the result of the step before the last, so a device holds its own shards
and those of two steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from regard.core.problem import KEY_STEP, ROW_STEP, Problem
from regard.jax import ffi, parts
from regard.jax.binding import result_type, varying_alike
from regard.jax.task import (
    MATRICES,
    OUTPUTS,
    SUM,
    Axes,
    PrimitiveTask,
    SequenceStep,
    Shape,
    outline,
    transposed,
    without,
)
from regard.parallel.dealing import Deal, steps
from regard.parallel.sight import TILE, Sight, sight_of
from regard.rules import Mask, reads

Array = np.ndarray[Any, np.dtype[Any]]
Operands = dict[str, Any]

ENGINES = (None, "cpu", "tiled")  # that compute parts
STATISTICS = ("lse", "entropy")
WHOLE = {"weights": "return_weights", "jvp_jvp": "forward over forward mode"}
"""Names of the tasks whose kind has no parts, for errors and warnings."""
FIRST = np.zeros((), np.int32)
"""The turn of what waits for no step."""
KEYS = ("key", "value")
EMPTY: Mapping[str, Axes] = MappingProxyType({})


def refusal(task: PrimitiveTask) -> str | None:
    """Return the reason why a task needs its queries and keys whole, or None."""
    others = [name for name, _ in task.call.observe if name not in STATISTICS]
    if task.kind in WHOLE:
        return WHOLE[task.kind]
    if 0 in task.sizes:
        return "vmap of no elements"
    if others:
        return f"the statistic {others[0]!r}"
    return None if task.call.engine in ENGINES else f"engine={task.call.engine!r}"


def base(name: str) -> str:
    """Return the input or output that a tangent or cotangent belongs to."""
    while name.startswith(("t.", "s.", "ct.")):
        name = name.partition(".")[2]
    return name


def sequence_dim(task: PrimitiveTask, name: str, ndim: int) -> int | None:
    """Return the dimension of an operand or a result that is its sequence, None if it has none."""
    name = base(name)
    if name in MATRICES:
        return ndim - (3 if task.call.layout == "bnhd" else 2)
    return ndim - 1 if name in OUTPUTS else None


def dim_of(task: PrimitiveTask, name: str, x: Any) -> int:
    """Return `sequence_dim` of an array that has one."""
    rest = [n for n in range(x.ndim) if n not in task.axes_of[name]]
    dim = sequence_dim(task, name, len(rest))
    assert dim is not None
    return rest[dim]


@dataclass(frozen=True)
class Ranks:
    """The devices along some axes of a mesh, and the tiles that each sees; None for all.

    rows, keys: the numbers of the whole call. first_key: the absolute position of its first key.
    """

    axes: tuple[str, ...]
    count: int
    rows: int
    keys: int
    first_key: int
    sight: Sight | None

    @staticmethod
    def of(task: PrimitiveTask, query: Shape, key: Shape, axes: tuple[str, ...], count: int) -> "Ranks":
        """Return the ranks of a call with these shapes of the whole query and key."""
        q, k = (transposed(x, task.call.layout == "bnhd") for x in (query, key))
        origin = task.call.origin
        return Ranks(axes, count, q[-2], k[-2], origin[2] if origin else 0, static_sight(task, q, k, count))

    def seen(self, gradients: str) -> Array | None:
        """Return the tiles of what passes by that each rank sees, None for all."""
        if self.sight is None:
            return None
        return self.sight.rows if gradients == "key" else self.sight.keys

    def passes(self, gradients: str) -> list[range]:
        """Return the positions of each step that any rank sees, in order; at least one step."""
        if gradients == "key":
            every = list(reversed(steps(self.rows, ROW_STEP)))
        else:
            every = list(steps(self.keys, KEY_STEP, first=self.first_key))  # key splits begin there
        seen = self.seen(gradients)
        live = [x for x in every if seen is None or seen[:, x.start // TILE : -(-x.stop // TILE)].any()]
        return live or every[:1]

    def sent(self, x: Any, dim: int, rows: range, seen: Array | None, turn: Any) -> Any:
        """Return some rows of an array on every rank that sees them; on others they may be any."""
        deal = Deal.contiguous(x.shape[dim] * self.count, self.count)
        pieces = []
        for owner in range(self.count):
            for own, into in deal.pieces(owner, rows):
                piece = after(turn, jax.lax.slice_in_dim(x, own.start, own.stop, axis=dim))
                places = range(rows.start + into.start, rows.start + into.stop)
                pieces.append(self.broadcast(piece, dim, owner, *wanting(seen, self.count, owner, places)))
        return jnp.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]

    def gathered(self, task: PrimitiveTask, name: str, shape: Shape, sums: Any) -> Any:
        """Return the sums of all devices for a gradient without a sequence; for a table one after the other.

        A bias with rows and keys has its sums where they are.
        """
        if ".table" in name:
            return jax.lax.all_gather(sums, self.axes, axis=0 if task.merged else len(task.sizes))
        rows, keys = bias_axes(task, shape) if name == "bias" else (False, False)
        if rows and keys:
            return sums
        dim = sums.ndim - (2 if name == "bias" and not keys else 1)
        return jax.lax.all_gather(sums, self.axes, axis=dim, tiled=True)

    def broadcast(self, x: Any, dim: int, owner: int, ranks: list[int], rows: slice) -> Any:
        """Send some rows of a piece from its owner to other ranks: each that has them sends them to one more."""
        have, part = [owner], jax.lax.slice_in_dim(x, rows.start, rows.stop, axis=dim)
        while ranks:
            pairs = list(zip(have, ranks, strict=False))
            arrived = jax.lax.ppermute(part, self.axes, pairs)
            receives = np.isin(np.arange(self.count), [to for _, to in pairs])
            part = jnp.where(jnp.asarray(receives)[jax.lax.axis_index(self.axes)], arrived, part)
            have, ranks = have + ranks[: len(pairs)], ranks[len(pairs) :]
        return jax.lax.dynamic_update_slice_in_dim(x, part, rows.start, dim)


def after(turn: Any, x: Any) -> Any:
    """Return x once a step is done: its turn is 0, which XLA does not know."""
    return jnp.where(turn == 0, x, jnp.zeros((), x.dtype))


def wanting(seen: Array | None, count: int, owner: int, places: range) -> tuple[list[int], slice]:
    """Return the other ranks that see some of a piece, and the rows of it that are sent."""
    others = [rank for rank in range(count) if rank != owner]
    if seen is None:
        return others, slice(0, len(places))
    first = places.start // TILE
    tiles = seen[:, first : -(-places.stop // TILE)]
    ranks = [rank for rank in others if tiles[rank].any()]
    if not ranks:
        return [], slice(0, 0)
    live = np.flatnonzero(tiles[ranks].any(axis=0)) + first
    start, stop = int(live[0]) * TILE - places.start, int(live[-1] + 1) * TILE - places.start
    return ranks, slice(max(0, start), min(stop, len(places)))


def static_sight(task: PrimitiveTask, q: Shape, k: Shape, count: int) -> Sight | None:
    """Return the tiles that ranks see by a mask that is known before the program runs, else None."""
    call = task.call
    if call.mask is None or call.offset is None or call.origin is None:
        return None
    if any(name.startswith("mask.") for name in call.inputs):
        return None
    node, _, _ = outline(call.mask)
    lead = np.broadcast_shapes(q[:-3], k[:-3])
    alike = len(call.offset) == 1 and "b" not in reads(node)
    lead = () if alike else lead
    query, key = (np.broadcast_to(np.zeros((), np.float32), (*lead, *x[-3:-1], 1)) for x in (q, k))
    batch = int(np.prod(lead))
    p = Problem(
        query=query,
        key=key,
        value=key,
        lead=lead,
        scale=1.0,
        seed=0,
        offset=np.array(call.offset * (batch // len(call.offset)), np.int64),
        origin=call.origin,
        mask=Mask(node, "mask"),
    )
    return sight_of(p, Deal.contiguous(q[-2], count), Deal.contiguous(k[-2], count))


def computed(task: PrimitiveTask, x: Operands, ranks: Ranks) -> list[Any]:
    """Return the results of a task on this device, from its shards of the operands.

    Gradients of inputs without a sequence are those of all devices once they are added.
    """
    if task.kind in ("forward", "jvp"):
        results = passed(task, x, ranks, "")
        return [results[name] for name in task.results]
    results = Operands(turn=FIRST)
    if task.kind == "backward_jvp":
        task, x, results["turn"] = along(task, x, ranks)
    if task.kind == "backward":
        results["turn"] = checked(task, x, ranks)
    for gradients in ("query", "key"):
        own = replace(task, wrt=tuple(y for y in task.wrt if pass_of(task, y[0], x[y[0]].shape) == gradients))
        if own.wrt:
            results |= passed(own, x, ranks, gradients, results["turn"])
    return [results[name] for name, _ in task.wrt]


def checked(task: PrimitiveTask, x: Operands, ranks: Ranks) -> Any:
    """Return the turn after a step in which all devices raise if one has an lse that gradients cannot start from.

    Nothing is sent before: a device that waits for one that raised would wait forever.
    """
    size = jnp.abs(x["lse"])
    largest = jax.lax.pmax(jnp.where(jnp.isfinite(size), size, 0).max(initial=0), ranks.axes)
    step = SequenceStep(ranks.rows, ranks.keys, 0, 0, True, True, "check")
    rank = jax.lax.axis_index(ranks.axes).astype(np.int32)
    return called(task, step, x | {"rank": rank, "largest": largest}, {})["turn"]


def pass_of(task: PrimitiveTask, name: str, shape: Shape) -> str:
    """Return the pass that sums the gradient of an input: "query", in which keys pass by, or "key"."""
    return "key" if name in KEYS or (name == "bias" and bias_axes(task, shape) == (False, True)) else "query"


def bias_axes(task: PrimitiveTask, shape: Shape) -> tuple[bool, bool]:
    """Return whether a bias has rows, and whether it has keys."""
    rows, keys = (1, 1, *without(shape, task.axes_of["bias"]))[-2:]
    return rows != 1, keys != 1


def along(task: PrimitiveTask, x: Operands, ranks: Ranks) -> tuple[PrimitiveTask, Operands, Any]:
    """Return the task of gradients' tangents with those of the outputs, its operands, and the turn after that.

    Gradients are linear in the cotangents: without tangents of inputs they are the gradients along those.
    """
    inputs = {name: a for name, a in x.items() if "ct." not in name}
    if not any(name.startswith("t.") for name in inputs):
        moving = {name: name.removeprefix("t.") for name in x if name.startswith("t.ct.")}
        axes = {to: task.axes_of[name] for name, to in moving.items()}
        x = inputs | {to: x[name] for name, to in moving.items()}
        return over(task, x, "backward", axes), x, FIRST
    results = passed(replace(over(task, inputs, "jvp"), wrt=()), inputs, ranks, "")
    d = {f"t.{name}": results[name] for name in task.call.outputs}
    first = tuple(range(len(task.sizes)))
    return over(task, x | d, task.kind, dict.fromkeys(d, first)), x | d, results["turn"]


def over(task: PrimitiveTask, x: Operands, kind: str, axes: Mapping[str, Axes] = EMPTY) -> PrimitiveTask:
    """Return a task of a kind over other operands.

    axes: those of `vmap` of operands, where they are not the task's.
    """
    every = {**task.axes_of, **axes}
    return replace(task, kind=kind, operands=tuple(x), axes=tuple(every.get(name, ()) for name in x))


def passing(task: PrimitiveTask, x: Operands, gradients: str) -> list[str]:
    """Return the names of the operands that pass by: those of keys, or of rows for the gradients of keys."""
    with_sequence = [name for name, a in x.items() if sequence_dim(task, name, a.ndim) is not None]
    return [name for name in with_sequence if (base(name) in KEYS) != (gradients == "key")]


def passed(task: PrimitiveTask, x: Operands, ranks: Ranks, gradients: str, turn: Any = FIRST) -> Operands:
    """Return the results by name after all steps in which operands pass by.

    turn: of the step after which they begin.
    """
    passes, seen, names = ranks.passes(gradients), ranks.seen(gradients), passing(task, x, gradients)
    returns = tuple(name for name in task.results if sequence_dim(task, name, 3) is not None)
    turns, sums, results = [turn, turn], Operands(), Operands()
    x = x | {"rank": jax.lax.axis_index(ranks.axes).astype(np.int32)}
    for n, rows in enumerate(passes):
        last = n == len(passes) - 1
        step = SequenceStep(
            ranks.rows, ranks.keys, rows.start, rows.stop, n == 0, last, gradients, returns=returns if last else ()
        )
        sent = {name: ranks.sent(x[name], dim_of(task, name, x[name]), rows, seen, turns[n]) for name in names}
        results = called(task, step, x | sent, sums)
        sums = {name: a for name, a in results.items() if name.startswith(SUM)}
        turns.append(results["turn"])
    if len(returns) < len(task.results):
        results |= shared(task, x, ranks, gradients, sums)
    return results


def shared(task: PrimitiveTask, x: Operands, ranks: Ranks, gradients: str, sums: Operands) -> Operands:
    """Return the gradients of inputs that have no sequence by name, from the sums of this device and others.

    Only the first device has them, others have 0.
    """
    names = tuple(name for name in task.results if sequence_dim(task, name, 3) is None)
    whole = {SUM + name: ranks.gathered(task, name, x[name].shape, sums[SUM + name]) for name in names}
    step = SequenceStep(ranks.rows, ranks.keys, 0, 0, True, True, "whole", returns=names)
    results = called(task, step, x, whole)
    return {name: results[name] for name in names}


def called(task: PrimitiveTask, step: SequenceStep, x: Operands, sums: Operands) -> Operands:
    """Return the results of a step by name, from its operands and the sums of the step before."""
    every = x | sums
    operands = dict(zip(every, varying_alike([jnp.asarray(a) for a in every.values()]), strict=True))
    types = {name: (operands[name].shape, np.dtype(operands[name].dtype)) for name in x}
    shapes = dict(zip(task.results, task.shapes(types), strict=True))
    task = replace(over(task, operands, task.kind), step=step)
    carried = parts.carried(task, types)
    task = replace(task, step=replace(step, sums=tuple(carried)))
    like = jax.typeof(operands["rank"])
    every_shape = (*carried.values(), ((), np.dtype(np.int32)), *(shapes[name] for name in step.returns))
    results = [result_type(like, *shape) for shape in every_shape]
    aliases = {list(operands).index(name): n for n, name in enumerate(task.results[: len(carried)]) if name in sums}
    text = ffi.attribute(task, list(operands.values()), results)
    values = jax.ffi.ffi_call(ffi.TARGET, results, input_output_aliases=aliases)(*operands.values(), task=text)
    return dict(zip(task.results, values, strict=True))
