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
        assert kinds == sorted(kinds, key=["begin", "pass", "end"].index)
        passing = [x for x in moves if x.kind == "pass"]
        assert all(a.target == b.source for a, b in pairwise(passing))
        assert len(passing) == plan.live[:, step].sum() - 1


@pytest.mark.parametrize(("n", "ranks"), [(16384, 2), (65536, 8)])
@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=["causal", "all"])
def test_few_keys_wait_at_a_rank(n: int, ranks: int, options: Any) -> None:
    """No more than a quarter more than its own."""
    deal = Deal.stripes(n, ranks, 384)
    plan = pipeline_of(call(n, **options), deal, deal)
    at: dict[int, int] = {}
    for moves in plan.moves:
        at |= {x.step: x.target for x in moves if x.kind != "end"}
        for x in moves:
            if x.kind == "end":
                at.pop(x.step, None)
        sizes = [sum(len(plan.key_steps[step]) for step in at if at[step] == rank) for rank in range(ranks)]
        assert max(sizes) <= 1.25 * n / ranks


def test_blocks_of_rows_stay_whole() -> None:
    deal = Deal.stripes(5000, 4, 100).in_blocks(384, 2)
    assert sorted(i for run in deal.all_runs() for i in run) == list(range(5000))
    assert all(run.start % 384 == 0 and len(run) <= 768 for run in deal.all_runs())
    sizes = [deal.size(rank) for rank in range(4)]
    assert max(sizes) - min(sizes) <= 384 + 384
