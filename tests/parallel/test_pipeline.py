"""Tasks of backward: each once, in the order of sums of one process, evenly on all ranks."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.core.problem import Problem
from regard.ops.normalization import problem_from
from regard.parallel.dealing import Deal
from regard.parallel.pipeline import pipeline_of, slots_of


def call(n: int, **options: Any) -> Problem:
    x = np.broadcast_to(np.float32(0), (1, n, 64))
    return problem_from(x, x, x, **options)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_each_task_follows_those_that_it_waits_for(data: st.DataObject) -> None:
    runs, steps, ranks = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    live = np.array(
        data.draw(st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=runs, max_size=runs))
    )
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=runs, max_size=runs))
    slots = slots_of(live, owners)
    when = {tuple(task): n for n, slot in enumerate(slots) for task in slot}
    assert sorted(when) == [tuple(x) for x in np.argwhere(live).tolist()]
    assert sum(map(len, slots)) == len(when)
    for slot in slots:
        assert len({owners[task.run] for task in slot}) == len(slot)
    for run in range(runs):  # keys ascending
        assert all(when[run, a] < when[run, b] for a, b in pairwise(np.flatnonzero(live[run]).tolist()))
    for step in range(steps):  # rows descending
        assert all(when[b, step] < when[a, step] for a, b in pairwise(np.flatnonzero(live[:, step]).tolist()))


@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"mask": regard.window(256)}], ids=["causal", "all", "window"]
)
@pytest.mark.parametrize(("n", "ranks"), [(16384, 2), (65536, 8)])
def test_ranks_wait_little(n: int, ranks: int, options: Any) -> None:
    """Also where each has one long run of rows."""
    deal = Deal.contiguous(n, ranks)
    plan = pipeline_of(call(n, **options), deal, deal)
    assert plan.time <= 1.3 * plan.work / ranks
    assert (plan.row_deal.name == "contiguous") == ("mask" in options)


def test_keys_pass_by_once() -> None:
    deal = Deal.stripes(5000, 3, 384)
    plan = pipeline_of(call(5000, causal=True), deal, deal)
    for step in range(len(plan.key_steps)):
        moves = [x for moves in plan.moves for x in moves if x.step == step]
        kinds = [x.kind for x in moves]
        assert kinds == sorted(
            kinds, key=lambda kind: ["begin", "end"].index(kind) if kind in ("begin", "end") else 0.5
        )
        passing = [x for x in moves if x.kind in ("pass", "sums")]
        assert all(a.target == b.source for a, b in pairwise(passing))
        owners = [plan.owners[run] for run in np.flatnonzero(plan.live[:, step])]
        assert len(passing) == sum(a != b for a, b in pairwise(owners))


def test_blocks_of_rows_stay_whole() -> None:
    deal = Deal.stripes(5000, 4, 100).in_blocks(384, 2)
    assert sorted(i for run in deal.all_runs() for i in run) == list(range(5000))
    assert all(run.start % 384 == 0 and len(run) <= 768 for run in deal.all_runs())
    sizes = [deal.size(rank) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 384 + 384


@pytest.mark.parametrize(("n", "ranks"), [(5000, 3), (5000, 8), (16384, 2), (16384, 4), (65536, 8)])
@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=["causal", "all"])
def test_keys_are_where_they_are_used(n: int, ranks: int, options: Any) -> None:
    """Also those that are not sent again. A rank has the sums of one step, and keys of at most three."""
    deal = Deal.contiguous(n, ranks)
    plan = pipeline_of(call(n, **options), deal, deal)
    before: list[set[int]] = [set() for _ in range(ranks)]
    sums: dict[int, int] = {}
    for moves, kept, tasks in zip(plan.moves, plan.resident, [*plan.slots, []], strict=True):
        assert all(step in kept[plan.owners[run]] for run, step in tasks)
        for kind, step, source, target in moves:
            assert kind not in ("pass", "sums") or step in before[source]
            assert (kind == "sums") == (kind != "end" and step in before[target])
            sums[step] = target
        for move in moves:
            if move.kind == "end":
                sums.pop(move.step, None)
        assert len(set(sums.values())) == len(sums)
        assert max(map(len, kept)) <= 3
        before = kept
    assert not any(before)
