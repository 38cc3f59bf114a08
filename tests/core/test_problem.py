"""Where the tiles of a call lie, in absolute indices."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.core.problem import Problem
from regard.ops.normalization import problem_from


def problem(n_q: int, n_k: int, **wishes: object) -> Problem:
    q, k = np.zeros((2, 3, 4, n_q, 8), np.float32), np.zeros((2, 3, 2, n_k, 8), np.float32)
    return problem_from(q, k, k, **wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "n_k", "edges"),
    [
        (0, 256, [0, 128, 256]),
        (0, 257, [0, 128, 256, 257]),
        (0, 1, [0, 1]),
        (130, 100, [130, 230]),
        (130, 127, [130, 256, 257]),
        (256, 128, [256, 384]),
        (0, 0, [0]),
        (130, 0, [130]),
    ],
)
def test_key_edges(first: int, n_k: int, edges: list[int]) -> None:
    assert problem(5, n_k, origin=(0, 0, first)).extents.key_edges(128).tolist() == edges


def test_ranges() -> None:
    offset = np.arange(6).reshape(2, 3) * 10
    p = problem(50, 60, origin=(7, 2, 100), offset=offset)
    ranges = p.extents.ranges(4, (1, 2), np.array([0, 20]), np.array([19, 49]))
    assert (ranges.b, ranges.h, ranges.keys, ranges.dtype) == ((11, 11), (3, 4), 160, np.float32)
    assert [x.tolist() for x in ranges.i] == [[40, 60], [59, 89]]
    assert p.extents.indices == {"b": (7, 13), "h": (2, 6), "i": (0, 100), "j": (100, 160)}


def test_rules_that_may_hide_a_tile() -> None:
    assert problem(5, 5).rules.hiding == ()
    assert problem(5, 5, score=regard.softcap(3.0)).rules.hiding == ()
    hides = regard.score(lambda s, b, h, i, j: regard.where(i > 3, s, -np.inf))
    p = problem(5, 5, score=hides, causal=True)
    assert p.rules.hiding == (p.mask_node, hides.node)


every_engine = pytest.mark.parametrize("engine", ["tiled", "cpu", "spec"])


@every_engine
def test_no_query_heads(engine: str) -> None:
    q, k = np.ones((0, 5, 4)), np.ones((2, 6, 4))
    out, seen = regard.attention(q, k, k, causal=True, engine=engine, observe=["received"])
    assert (out.shape, seen.received.shape) == ((0, 5, 4), (0, 6))
    g = regard.attention_vjp(q, k, k, q, engine=engine)
    assert g.query.shape == (0, 5, 4)
    assert not g.key.any()
    assert not g.value.any()
    _, tangent = regard.attention_jvp(q, k, k, q, k, k, engine=engine)
    assert tangent.out.shape == (0, 5, 4)


@every_engine
def test_no_keys_in_the_middle_of_a_tile(engine: str) -> None:
    q, k = np.ones((2, 300, 4)), np.ones((2, 0, 4))
    out, seen = regard.attention(
        q, k, k, causal=True, origin=(0, 0, 130), offset=200, engine=engine, observe=["lse"], sink=np.zeros(2)
    )
    assert not out.any()
    np.testing.assert_array_equal(seen.lse, 0)


CHOOSING: dict[str, tuple[Any, bool]] = {
    "a clipped index of a finite table": (lambda s, t, i, j: s + t[i, np.clip(j - i, -3, 3) + 3], False),
    "a smaller float": (lambda s, t, i, j: np.minimum(s, t[i, 0]), False),
    "a chosen number": (lambda s, t, i, j: regard.where(i > j, s, -1e9), False),
    "a chosen infinity": (lambda s, t, i, j: regard.where(i > j, s, -np.inf), True),
    "a table with an infinity": (lambda s, t, i, j: np.minimum(s, regard.table(t.array / [[0] + [1] * 6])[i, j]), True),
    "a quotient": (lambda s, t, i, j: regard.where(i > j, s, s / (i - 3)), True),
    "no choice": (lambda s, t, i, j: s - np.inf * (i < j), False),
}


@pytest.mark.parametrize("name", CHOOSING)
@np.errstate(divide="ignore")
def test_bounds_of_a_score_are_asked_for_where_it_may_hide(name: str) -> None:
    """A finite table hides nothing, so nobody summarizes it."""
    rule, hides = CHOOSING[name]
    q = np.ones((1, 9, 4), np.float32)
    table = regard.table(-np.ones((9, 7)))
    p = problem_from(q, q, q, score=lambda s, b, h, i, j: rule(s, table, i, j), offset=0)
    assert (p.rules.hiding_node is not None) == hides
