"""A call whose sequence lies on several devices: its steps, and what passes from device to device.

Each device has equal, contiguous shards of queries and keys. A device's program is unrolled: in each step the owners of
some positions send them along a binary tree to the devices that see them, and every device computes its part
(`regard.jax.parts`). A step's sends wait for the result of the step before the last, so a device holds its own shards
and those of two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from regard.core.problem import KEY_STEP, ROW_STEP, Problem
from regard.jax import ffi, parts
from regard.jax.binding import result_type, varying_alike
from regard.jax.task import MATRICES, OUTPUTS, PrimitiveTask, SequenceStep, Shape, outline, transposed
from regard.parallel.dealing import Deal, steps
from regard.parallel.sight import TILE, Sight, sight_of
from regard.rules import Mask, reads

Array = np.ndarray[Any, np.dtype[Any]]
Operands = dict[str, Any]

ENGINES = (None, "cpu", "tiled")  # that compute parts
STATISTICS = ("lse", "entropy")
WHOLE = {"weights": "return_weights", "jvp": "forward mode"} | dict.fromkeys(
    ("backward_jvp", "jvp_jvp"), "a second derivative"
)
"""Names of the tasks whose kind has no parts, for errors and warnings."""
FIRST = np.zeros((), np.int32)
"""The turn of what waits for no step."""
GRADIENTS = {"query": ("query", "sink"), "key": ("key", "value")}


def refusal(task: PrimitiveTask) -> str | None:
    """Return the reason why a task needs its queries and keys whole, or None."""
    others = [name for name, _ in task.call.observe if name not in STATISTICS]
    untrained = [name for name, _ in task.wrt if name not in (*GRADIENTS["query"], *GRADIENTS["key"])]
    if task.kind in WHOLE:
        return WHOLE[task.kind]
    if task.sizes:
        return "vmap"
    if others:
        return f"the statistic {others[0]!r}"
    if untrained:
        return f"the gradient of {untrained[0]}"
    return None if task.call.engine in ENGINES else f"engine={task.call.engine!r}"


def sequence_dim(task: PrimitiveTask, name: str, ndim: int) -> int | None:
    """Return the dimension of an operand or a result that is its sequence, None if it has none."""
    name = name.removeprefix("ct.")
    if name in MATRICES:
        return ndim - (3 if task.call.layout == "bnhd" else 2)
    return ndim - 1 if name in OUTPUTS else None


def dim_of(task: PrimitiveTask, name: str, x: Any) -> int:
    """Return `sequence_dim` of an array that has one."""
    dim = sequence_dim(task, name, x.ndim)
    assert dim is not None
    return dim


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
        every = list(reversed(steps(self.rows, ROW_STEP))) if gradients == "key" else self.key_steps()
        seen = self.seen(gradients)
        live = [x for x in every if seen is None or seen[:, x.start // TILE : -(-x.stop // TILE)].any()]
        return live or every[:1]

    def key_steps(self) -> list[range]:
        """Return the steps of keys, which begin at key splits: multiples of KEY_STEP in absolute positions."""
        shift = self.first_key % KEY_STEP
        every = (range(max(0, x.start - shift), x.stop - shift) for x in steps(self.keys + shift, KEY_STEP))
        return [x for x in every if len(x)]

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
    """Return the results of a task on this device, from its shards of the operands."""
    if task.kind == "forward":
        found = passed(task, x, ranks, "", ("key", "value"))
        return [found[name] for name in task.results]
    found = Operands(turn=FIRST)
    for gradients, names in GRADIENTS.items():
        own = replace(task, wrt=tuple(y for y in task.wrt if y[0] in names))
        if own.wrt:
            passing = ("key", "value") if gradients == "query" else row_names(task, x)
            found |= passed(own, x, ranks, gradients, passing, found["turn"])
    return [found[name] for name, _ in task.wrt]


def row_names(task: PrimitiveTask, x: Operands) -> list[str]:
    """Return the names of the operands that have the rows of queries."""
    return [name for name in x if sequence_dim(task, name, 3) is not None and name not in ("key", "value")]


def passed(
    task: PrimitiveTask, x: Operands, ranks: Ranks, gradients: str, names: Sequence[str], turn: Any = FIRST
) -> Operands:
    """Return the results by name after all steps in which arrays of these names pass by.

    turn: of the step after which they begin.
    """
    passes, seen = ranks.passes(gradients), ranks.seen(gradients)
    turns, sums = [turn, turn], Operands()
    rank = jax.lax.axis_index(ranks.axes).astype(np.int32)
    found: Operands = {}
    for n, rows in enumerate(passes):
        step = SequenceStep(ranks.rows, ranks.keys, rows.start, rows.stop, n == 0, n == len(passes) - 1, gradients)
        given = {name: ranks.sent(x[name], dim_of(task, name, x[name]), rows, seen, turns[n]) for name in names}
        found = called(task, step, {**x, **given, "rank": rank}, sums)
        sums = {name: a for name, a in found.items() if name.startswith(parts.SUM)}
        turns.append(found["turn"])
    return found


def called(task: PrimitiveTask, step: SequenceStep, x: Operands, sums: Operands) -> Operands:
    """Return the results of a step by name, from its operands and the sums of the step before."""
    every = {**x, **sums}
    operands = dict(zip(every, varying_alike([jnp.asarray(a) for a in every.values()]), strict=True))
    types = {name: (operands[name].shape, np.dtype(operands[name].dtype)) for name in x}
    last = task.shapes(types) if step.last else []
    task = replace(task, operands=tuple(operands), axes=((),) * len(operands), step=step)
    carried = parts.carried(task, types)
    task = replace(task, step=replace(step, sums=tuple(carried)))
    like = jax.typeof(operands["rank"])
    results = [result_type(like, *shape) for shape in (*carried.values(), ((), np.dtype(np.int32)), *last)]
    aliases = {list(operands).index(name): n for n, name in enumerate(task.results[: len(carried)]) if name in sums}
    text = ffi.attribute(task, list(operands.values()), results)
    values = jax.ffi.ffi_call(ffi.TARGET, results, input_output_aliases=aliases)(*operands.values(), task=text)
    return dict(zip(task.results, values, strict=True))
