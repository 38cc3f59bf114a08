"""Plan of the gradients over ranks: rows stay, and keys pass by with the sums of dK and dV.

A task is a run of rows against a step of keys. dQ is summed over keys in ascending order, dK and dV over rows in
descending order: so a task waits for that of the same rows and earlier keys, and for that of the same keys and later
rows. Each costs five products, where two passes of queries and of keys cost seven together.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from regard.core.problem import ROW_BLOCK, Problem
from regard.parallel.dealing import Deal
from regard.parallel.sight import TILE, sight_of

Array = np.ndarray[Any, np.dtype[Any]]
LONGEST = 2  # blocks of rows of a task, for which rows are computed where they are
STRIPES = 2, 3, 4  # blocks of rows of the stripes that are tried
HOP = 120  # rows whose products with some keys take as long as to send and to receive these with their sums
MOVED = 1.02  # most time over the ideal, and over that of stripes, for which rows are computed where they are
PASSES = 3  # least steps of keys, for each rank
BUFFERS = 3  # steps whose keys are at a rank: with the sums of one of them as much as two steps with their sums


class RankTask(NamedTuple):
    """A run of rows, of those of all ranks in ascending order, and a step of keys."""

    run: int
    step: int


class Move(NamedTuple):
    """A step of keys on its way.

    kind: "begin" to the rank that computes its first task, "pass" to the next, "sums" if that has the keys, "end" home.
    source, target: ranks.
    """

    kind: str
    step: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class GradientPipeline:
    """The tasks of all ranks.

    row_deal: the rows that each rank computes, in whole query blocks. runs: those of all ranks, ascending; owners:
    their ranks. key_deal, key_steps: as in `Sight`. live: (runs, steps), True for a task. slots: tasks that are
    computed at the same time, at most one of each rank. moves: those before each slot, and after the last.
    resident: the steps whose keys each rank has from then on.
    """

    row_deal: Deal
    key_deal: Deal
    key_steps: tuple[range, ...]
    runs: list[range]
    owners: list[int]
    live: Array
    slots: list[list[RankTask]]
    moves: list[list[Move]]
    resident: list[list[set[int]]]

    def pairs(self, task: RankTask) -> int:
        return len(self.runs[task.run]) * len(self.key_steps[task.step])

    @property
    def work(self) -> int:
        """The pairs of rows and keys of all tasks."""
        return sum(self.pairs(task) for slot in self.slots for task in slot)

    @property
    def time(self) -> float:
        """The same of the rank of each slot that takes longest, with what it sends and is sent."""
        shares = {"pass": HOP / 2, "sums": HOP / 4}
        total = 0.0
        for slot, moves in zip([*self.slots, []], self.moves, strict=True):
            computed, sent = np.zeros((2, self.key_deal.ranks))
            for task in slot:
                computed[self.owners[task.run]] = self.pairs(task)
            for kind, step, *ends in moves:
                sent[ends] += shares.get(kind, 0) * len(self.key_steps[step])
            total += (computed + sent).max()
        return total

    def neighbour(self, task: RankTask, runs: int = 0, steps: int = 0) -> RankTask | None:
        """Return the next task with the same keys (runs = 1 or -1), or rows (steps = 1 or -1)."""
        line, at = (self.live[:, task.step], task.run) if runs else (self.live[task.run], task.step)
        forward = runs + steps > 0
        others = np.flatnonzero(line[at + 1 :] if forward else line[:at])
        if not len(others):
            return None
        n = int(others[0]) + at + 1 if forward else int(others[-1])
        return RankTask(n, task.step) if runs else RankTask(task.run, n)


def pipeline_of(p: Problem, row_deal: Deal, key_deal: Deal) -> GradientPipeline:
    """Return the tasks of a whole call.

    Long runs of rows make ranks wait for each other, and short ones send keys many times. If another deal takes less
    time, rows are computed in its stripes, and move there and back.
    """
    own = tasks_of(p, row_deal, key_deal)
    if own.time <= MOVED * own.work / row_deal.ranks:
        return own
    others = [(Deal.stripes(p.n_q, row_deal.ranks, blocks * ROW_BLOCK), blocks) for blocks in STRIPES]
    best = min((tasks_of(p, rows, key_deal, blocks) for rows, blocks in others), key=lambda x: x.time)
    return own if own.time <= MOVED * best.time else best


def tasks_of(p: Problem, row_deal: Deal, key_deal: Deal, longest: int = LONGEST) -> GradientPipeline:
    """Return the tasks of a call whose rows are computed as they are dealt, in whole query blocks.

    longest: blocks of rows of a task.
    """
    whole = not (p.offset % TILE).any()  # else blocks of rows that engines compute together begin anywhere
    row_deal = row_deal.in_blocks(ROW_BLOCK if whole else max(1, p.n_q), longest)
    sight = sight_of(p, row_deal, key_deal, PASSES * row_deal.ranks)
    every = list(row_deal.all_runs())
    order = np.argsort([x.start for x in every])
    runs, live = [every[n] for n in order], sight.key_runs[order]
    owners = row_deal.owners()[order].tolist()
    slots = slots_of(live, owners)
    plan = GradientPipeline(row_deal, key_deal, sight.key_steps, runs, owners, live, slots, [], [])
    plan.moves.extend(moves_of(plan))
    keep(plan)
    return plan


def slots_of(live: Array, owners: list[int]) -> list[list[RankTask]]:
    """Return tasks that are computed at the same time: of each rank the one that most others wait for, if any.

    Tasks of some steps come before those of others, or keys would wait at a rank that is ahead of the next.
    """
    height, waits, ranks = chains(live), waiting(live), max(owners, default=0) + 1
    ready: list[list[tuple[int, int, RankTask]]] = [[] for _ in range(ranks)]

    def release(task: RankTask) -> None:
        heappush(ready[owners[task.run]], (task.step // ranks, -int(height[task]), task))

    for task in map(RankTask._make, np.argwhere(live & (waits == 0)).tolist()):
        release(task)
    slots: list[list[RankTask]] = []
    while any(ready):
        slots.append([heappop(tasks)[-1] for tasks in ready if tasks])
        for run, step in slots[-1]:
            lower, later = np.flatnonzero(live[:run, step])[-1:], np.flatnonzero(live[run, step + 1 :])[:1] + step + 1
            for task in (*(RankTask(int(n), step) for n in lower), *(RankTask(run, int(n)) for n in later)):
                waits[task] -= 1
                if not waits[task]:
                    release(task)
    return slots


def waiting(live: Array) -> Array:
    """Return the number of tasks, 0 to 2, that each task waits for."""
    earlier = np.cumsum(live, axis=1) > 1
    later = np.cumsum(live[::-1], axis=0)[::-1] > 1
    return np.where(live, earlier.astype(np.int8) + later, 0)


def chains(live: Array) -> Array:
    """Return the tasks of the longest chain that begins with each task."""
    height = np.zeros(live.shape, np.int64)
    below = np.zeros(live.shape[1], np.int64)
    for run in range(len(live)):
        after = 0
        for step in np.flatnonzero(live[run])[::-1].tolist():
            after = below[step] = height[run, step] = 1 + max(after, below[step])
    return height


def moves_of(x: GradientPipeline) -> list[list[Move]]:
    """Return the moves before each slot, and those after the last."""
    moves: list[list[Move]] = [[] for _ in range(len(x.slots) + 1)]
    for n, slot in enumerate(x.slots):
        for task in slot:
            before, target = x.neighbour(task, runs=1), x.owners[task.run]
            if before is None:
                moves[n] += [Move("begin", task.step, source, target) for source in owners_of(x, task.step)]
            elif x.owners[before.run] != target:
                moves[n].append(Move("pass", task.step, x.owners[before.run], target))
            if x.neighbour(task, runs=-1) is None:
                moves[n + 1] += [Move("end", task.step, target, home) for home in owners_of(x, task.step)]
    return moves


def keep(x: GradientPipeline) -> None:
    """Let ranks keep the keys of steps that come back to them, and send those the sums alone.

    A rank keeps those that it needs first, as long as it has no more than BUFFERS steps.
    """
    later: list[dict[int, list[int]]] = [{} for _ in range(x.key_deal.ranks)]  # slots of a rank's tasks, by step
    for n, slot in enumerate(x.slots):
        for task in slot:
            later[x.owners[task.run]].setdefault(task.step, []).append(n)
    here: list[set[int]] = [set() for _ in later]  # with their sums
    idle: list[set[int]] = [set() for _ in later]
    for n, moves in enumerate(x.moves):
        for number, (kind, step, source, target) in enumerate(moves):
            if kind != "begin":
                here[source].discard(step)
            if kind == "pass" and step in idle[target]:
                moves[number] = Move("sums", step, source, target)
            if kind == "pass" and later[source][step][-1] >= n:
                idle[source].add(step)
            if kind != "end":
                idle[target].discard(step)
                here[target].add(step)
        for rank, steps in enumerate(idle):
            slots = {next(slot for slot in later[rank][step] if slot >= n): step for step in steps}
            first = sorted(slots)[: max(0, BUFFERS - len(here[rank]))]
            idle[rank] = {slots[slot] for slot in first}
        x.resident.append([a | b for a, b in zip(here, idle, strict=True)])


def owners_of(x: GradientPipeline, step: int) -> list[int]:
    """Return the ranks that have keys of a step."""
    return [rank for rank in range(x.key_deal.ranks) if x.key_deal.pieces(rank, x.key_steps[step])]
