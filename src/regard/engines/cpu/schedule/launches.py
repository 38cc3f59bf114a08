"""Launches of work groups on threads.

Python answers signals between launches alone, so long calls are launched in portions.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.engines.cpu.spec.operands import BLOCKS, COUNT, SCRATCH, TAKEN, TILE_LIST, WORK_GROUPS
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, chosen
from regard.runtime.memory import address_of
from regard.runtime.threads import Scratch, ThreadTeam, spread, team_for

Array = np.ndarray[Any, np.dtype[Any]]

PORTION = 2**28  # products of a portion: about 0.1 s on a slow machine, between which Python answers signals


@dataclass(frozen=True, eq=False)
class LaunchStage:
    """Query blocks with offsets from each array's base, and their work groups.

    bounds: each work group's first block, and the one after its last. scratch: bytes for each thread. split_state:
    bytes of the key splits that its blocks write or merge. portions: the work groups, divided where signals are
    answered.
    """

    tiles: Array
    blocks: Array
    bounds: Array
    scratch: int
    split_state: int
    portions: list[Array]


def launch(kernel: Callable[[int], None], fields: "array[int]", stage: LaunchStage, threads: int) -> None:
    """Run the work groups of a stage."""
    fields[BLOCKS], fields[TILE_LIST] = address_of(stage.blocks), address_of(stage.tiles)
    scratch, threads = Scratch(stage.scratch), min(threads, len(stage.bounds))
    team, members = team_for(threads)
    if team is not None and len(stage.portions) == 1:
        launch_on_team(kernel, fields, stage, scratch, team, members)
        return
    shared = [(bounds, array("q", [0])) for bounds in stage.portions]

    def some(portion: tuple[Array, "array[int]"]) -> None:
        run_work_groups(kernel, fields[:], portion[0], scratch, portion[1])

    # All threads work on a portion, and none waits there for the others.
    spread(some, [portion for portion in shared for _ in range(threads)], threads)


def launch_on_team(
    kernel: Any, fields: "array[int]", stage: LaunchStage, scratch: Scratch, team: ThreadTeam, members: int
) -> None:
    """Run the work groups of a stage on a team, without the GIL."""
    taken, every, data = array("q", [0]), [], array("Q", [0, members, kernel.address])
    for address in scratch.addresses(members):
        own = fields[:]
        set_work(own, stage.bounds, taken, address)
        every.append(own)
        data.append(address_in(own))
    team.call(member(chosen()).address, address_in(data), members)


def set_work(fields: "array[int]", bounds: Array, taken: "array[int]", scratch: int) -> None:
    """Set the work groups of a thread, their counter and its scratch memory."""
    fields[WORK_GROUPS], fields[COUNT], fields[TAKEN] = address_of(bounds), len(bounds), address_in(taken)
    fields[SCRATCH] = scratch


def member(target: Target) -> cache.Compiled:
    """Return the code of a team's members: each runs the kernel with the next fields.

    The code's data: the number of fields that are taken, their total, the kernel, and the addresses of the fields.
    """
    return cache.kernel("member", "member", target, lambda: MEMBER.format(triple=target.triple))


MEMBER = """
target triple = "{triple}"

define void @member(ptr %words) {{
  %taken = atomicrmw add ptr %words, i64 1 monotonic
  %count_at = getelementptr i64, ptr %words, i64 1
  %count = load i64, ptr %count_at
  %is_there = icmp ult i64 %taken, %count
  br i1 %is_there, label %run, label %done
run:
  %kernel_at = getelementptr i64, ptr %words, i64 2
  %kernel = load ptr, ptr %kernel_at
  %first_at = getelementptr i64, ptr %words, i64 3
  %fields_at = getelementptr i64, ptr %first_at, i64 %taken
  %fields = load ptr, ptr %fields_at
  call void %kernel(ptr %fields)
  br label %done
done:
  ret void
}}
"""


def run_work_groups(
    kernel: Callable[[int], None], fields: "array[int]", bounds: Array, scratch: Scratch, taken: "array[int]"
) -> None:
    """Run work groups with a thread's own fields.

    Threads share work groups by a common counter `taken`, 0 at first: each takes the next when it is done, without the
    GIL.
    """
    set_work(fields, bounds, taken, scratch.address)
    kernel(address_in(fields))


def in_work_groups(first: Any, stop: Any, size: int) -> Array:
    """Divide ranges of query blocks into work groups (first block, the one after the last) of at most `size` blocks.

    first, stop: the ends of each range.
    """
    first, stop = np.asarray(first), np.asarray(stop)
    count = -(-(stop - first) // size)
    number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    starts = np.repeat(first, count) + size * number
    return np.stack([starts, np.minimum(starts + size, np.repeat(stop, count))], axis=1)


def in_portions(bounds: Array, tiles: Array, products: int) -> list[Array]:
    """Divide work groups, in their order, into portions of about PORTION products.

    Python answers signals only between launches. tiles: those of each query block. products: of a query block and a
    tile.
    """
    if len(bounds) < 2 or int(tiles.sum()) * products <= PORTION:
        return [bounds]
    before = np.append(0, np.cumsum(tiles)) * products
    total = np.cumsum(before[bounds[:, 1]] - before[bounds[:, 0]])
    return np.split(bounds, np.flatnonzero(np.diff(total // PORTION)) + 1)


class RepeatedStage:
    """A stage for repeated launches by one thread or a team, without allocation.

    fields: a copy for each member, in which the caller may change what differs from call to call.
    """

    def __init__(self, kernel: Any, fields: "array[int]", stage: LaunchStage, members: int):
        self.kernel, self.stage, self.scratch = kernel, stage, Scratch(stage.scratch)
        self.taken, self.members = array("q", [0]), min(members, len(stage.bounds))
        self.fields, self.data = [], array("Q", [0, self.members, kernel.address])
        for address in self.scratch.addresses(self.members):
            own = fields[:]
            own[BLOCKS], own[TILE_LIST] = address_of(stage.blocks), address_of(stage.tiles)
            set_work(own, stage.bounds, self.taken, address)
            self.fields.append(own)
            self.data.append(address_in(own))
        self.member, self.address = member(chosen()).address, address_in(self.data)

    def __call__(self, team: ThreadTeam | None) -> None:
        self.taken[0] = self.data[0] = 0
        if team is None or self.members == 1:
            self.kernel(self.data[3])
        else:
            team.call(self.member, self.address, self.members)


def address_in(numbers: "array[int]") -> int:
    return numbers.buffer_info()[0]
