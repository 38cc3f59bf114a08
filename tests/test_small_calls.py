"""What is remembered between calls is never stale, and lets go of arrays."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import regard
from regard.api import problem_from
from regard.rules import Program, causal, window

Array = np.ndarray[Any, np.dtype[Any]]
X = np.random.default_rng(0).standard_normal((2, 6, 4))
CAUSAL = np.tril(np.ones((6, 6), bool))


def call(**wishes: Any) -> Array:
    out: Array = regard.attention(X, X, X, **wishes)
    return out


@pytest.mark.parametrize("wrap", [lambda flags: flags, lambda flags: regard.window(None, None) & flags])
@pytest.mark.parametrize("more", [{}, {"causal": True}])
def test_a_mask_that_is_changed_in_place(wrap: Any, more: dict[str, Any]) -> None:
    flags = CAUSAL.copy()
    mask = wrap(flags)
    np.testing.assert_array_equal(call(mask=mask, **more), call(causal=True))
    flags[:] = np.eye(6, dtype=bool)
    np.testing.assert_allclose(call(mask=mask, **more), X, atol=1e-15)


def test_integers_are_looked_at_in_every_call() -> None:
    flags = CAUSAL.astype(int)
    np.testing.assert_array_equal(call(mask=flags), call(causal=True))
    flags[3, 4] = 2
    with pytest.raises(ValueError, match="mask must be booleans or 0/1 integers, got 2"):
        call(mask=flags)


def test_an_offset_that_is_changed_in_place() -> None:
    offset = np.array(0)
    assert not np.array_equal(call(causal=True, offset=offset), call())
    offset[...] = 5
    np.testing.assert_array_equal(call(causal=True, offset=offset), call())
    offset[...] = 2**62 + 1
    with pytest.raises(ValueError, match=r"offset must be within ±2\*\*62"):
        call(causal=True, offset=offset)


def test_a_number_that_a_rule_takes_from_elsewhere() -> None:
    reach = [0]

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return abs(i - j) <= reach[0]

    np.testing.assert_allclose(call(mask=near), X, atol=1e-15)
    reach[0] = 6
    np.testing.assert_array_equal(call(mask=near), call())


def test_the_same_rule_is_the_same_expression_in_every_call() -> None:
    """So that an engine knows it again without reading it."""

    def program(mask: Any = None) -> Program:
        node = problem_from(X, X, X, mask=mask, causal=True).mask_node
        assert node is not None
        return Program.of([node])

    mask = window(3)
    assert program(mask) is program(mask)
    assert program(mask) is not program(window(3))
    assert program() is Program.of([causal().node])


@pytest.mark.parametrize("more", [{}, {"causal": True}])
def test_what_is_remembered_of_a_rule_goes_with_it(more: dict[str, Any]) -> None:
    flags = CAUSAL.copy()
    table = regard.table(np.ones(2))
    alive = [weakref.ref(flags), weakref.ref(table)]
    gc.collect()
    gc.disable()
    try:
        mask, score = regard.window(None, None) & flags, regard.alibi(table)
        call(mask=mask, score=score, **more)
        assert [x() is None for x in alive] == [False, False]
        del flags, table, mask, score
        assert [x() is None for x in alive] == [True, True]
    finally:
        gc.enable()
