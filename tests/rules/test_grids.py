"""Neighborhoods on grids: windows by enumeration, bounds, and messages."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from grids import dense, grids
from regard.rules import At, Ranges, evaluate, key_tiles, neighborhood


def values(mask: regard.Mask, n: int) -> np.ndarray:
    zero = np.zeros(1, np.int64)
    return np.broadcast_to(evaluate([mask.node], At(zero, zero, np.arange(n)[:, None], np.arange(n)))[0], (n, n))


@settings(deadline=None, max_examples=60)
@given(grids())
def test_the_windows_are_those_of_the_definition(grid: tuple[Any, ...]) -> None:
    np.testing.assert_array_equal(values(neighborhood(*grid), math.prod(grid[0])), dense(*grid))


@settings(deadline=None, max_examples=60)
@given(grids())
def test_queries_that_are_not_causal_see_whole_windows(grid: tuple[Any, ...]) -> None:
    shape, kernel, stride, dilation, _ = grid
    seen = values(neighborhood(shape, kernel, stride, dilation), math.prod(shape)).sum(1)
    assert set(seen.tolist()) == {math.prod(kernel)}


@settings(deadline=None, max_examples=40)
@given(grids(), st.integers(1, 20), st.integers(1, 20))
def test_bounds_skip_nothing_that_is_visible(grid: tuple[Any, ...], rows: int, columns: int) -> None:
    n = math.prod(grid[0])
    visible, edges = dense(*grid), np.append(np.arange(0, n, columns), n)
    for first in range(0, n, rows):
        last = min(first + rows, n)
        tiles, _ = key_tiles(neighborhood(*grid).node, None, Ranges(i=(first, last - 1)), edges)
        columns_seen = np.flatnonzero(visible[first:last].any(0))
        assert set(np.searchsorted(edges, columns_seen, "right") - 1) <= set(tiles.tolist())


def test_bounds_skip_what_lies_off_the_rows_of_a_window() -> None:
    tiles = regard.plan(n=56 * 56, d=32, mask=neighborhood((56, 56), 7)).tiles
    assert tiles.skipped > 0.8 * tiles.total


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((9, 3), "neighborhood(9, 3)"),
        (((9,), (3,), 2), "neighborhood(9, 3, stride=2)"),
        (((9, 8), [3, 3]), "neighborhood((9, 8), 3)"),
        (((8, 8), 3, 1, (2, 1), [False, True]), "neighborhood((8, 8), 3, dilation=(2, 1), causal=(False, True))"),
    ],
)
def test_the_text(arguments: Any, text: str) -> None:
    assert neighborhood(*arguments).text == text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((), 3), ValueError, "shape of neighborhood must have 1 to 3 sizes, got 0"),
        (((4, 4, 4, 4), 3), ValueError, "shape of neighborhood must have 1 to 3 sizes, got 4"),
        (((4, 0), 3), ValueError, "shape of neighborhood must be at least 1, got 0"),
        (((4, 4), 0), ValueError, "kernel_size of neighborhood must be at least 1, got 0"),
        (((4, 4), 2.0), TypeError, "kernel_size of neighborhood must be an integer, got 2.0"),
        (
            ((4, 4), (3,)),
            ValueError,
            "kernel_size of neighborhood must be one value, or one for each of 2 axes, got 1",
        ),
        ((4, 3, (1, 1)), ValueError, "stride of neighborhood must be one value, or one for each of 1 axis, got 2"),
        (((4, 4), 3, 0), ValueError, "stride of neighborhood must be at least 1, got 0"),
        (((4, 4), 3, 1, 0), ValueError, "dilation of neighborhood must be at least 1, got 0"),
        (((4, 4), 3, 1, 1, 1), TypeError, "causal of neighborhood must be a bool, got 1"),
        (
            ((7, 5), (3, 3), 1, 2),
            ValueError,
            "kernel_size of neighborhood times dilation must be at most shape, 5 on axis 1, got 3 · 2",
        ),
        (((7, 7), (5, 3), 4), ValueError, "stride of neighborhood must be at most kernel_size, 3 on axis 1, got 4"),
        (((2**31,) * 3, 1), ValueError, "product of shape of neighborhood must be below"),
    ],
)
def test_bad_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        neighborhood(*arguments)


def test_a_call_beyond_the_grid_is_refused() -> None:
    x = np.zeros((1, 26, 4), np.float32)
    with pytest.raises(ValueError, match="shape of neighborhood covers query index 0 to 24, but this call reaches"):
        regard.attention(x, x, x, mask=neighborhood((5, 5), 3))
