"""Neighborhoods by enumeration, and random grids."""

import functools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st


def window(x: int, size: int, kernel: int, stride: int, dilation: int, causal: bool) -> set[int]:
    """The keys of the query at `x`, by the definition: windows are slid over the list of a group's places."""
    group = [y for y in range(size) if y % dilation == x % dilation]
    sharing = [group[at : at + stride] for at in range(0, len(group), stride)]
    (queries,) = [part for part in sharing if x in part]
    if causal:
        last = group.index(queries[-1])
        return {y for y in group[max(last - kernel + 1, 0) : last + 1] if y <= x}
    leader = min(group.index(queries[0]) + stride // 2, len(group) - 1)
    start = min(max(leader - kernel // 2, 0), len(group) - kernel)
    return set(group[start : start + kernel])


def dense(shape: Any, *arguments: Any) -> np.ndarray:
    """The mask (n, n) of a grid; each argument is one value for each axis."""
    axes = []
    for axis in zip(shape, *arguments, strict=True):
        windows = [window(x, *axis) for x in range(axis[0])]
        axes.append(np.array([[y in seen for y in range(axis[0])] for seen in windows]))
    return functools.reduce(np.kron, axes)


@st.composite
def grids(draw: Any, most: int = 150) -> tuple[Any, ...]:
    shape: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        shape.append(draw(st.integers(1, max(1, min(30, most // math.prod(shape))))))
    dilation = [draw(st.integers(1, size)) for size in shape]
    kernel = [draw(st.integers(1, size // d)) for size, d in zip(shape, dilation, strict=True)]
    stride = [draw(st.integers(1, k)) for k in kernel]
    return tuple(shape), kernel, stride, dilation, [draw(st.booleans()) for _ in shape]
