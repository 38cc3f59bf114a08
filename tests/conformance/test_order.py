"""Sums over queries have one order: of rows and heads, however the engine divides a call."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.core import rowsums
from regard.runtime import threads

Array = np.ndarray[Any, np.dtype[Any]]
ENGINES = pytest.mark.parametrize("engine", ["cpu", "tiled"])


def inputs(n: int, heads: int, kv_heads: int, d: int = 16) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(0)
    shapes = (heads, n, d), (kv_heads, n, d), (kv_heads, n, d), (heads, n, d)
    q, k, v, dout = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return q, k, v, dout


@ENGINES
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": regard.window(90)}, {}], ids=["causal", "window", "all"]
)
@pytest.mark.parametrize("heads", [2, 6])
def test_shards_of_one_tile(engine: str, options: Any, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rules are not read tile by tile, those of the whole are."""
    monkeypatch.setattr(rowsums, "require", lambda *a, **k: None)  # the lse of all keys
    n = 1300
    q, k, v, dout = inputs(n, heads, 1)
    out, seen = regard.attention(q, k, v, observe=["lse"], engine=engine, **options)
    options = options | {"outputs": regard.Outputs(out, seen.lse, None), "offset": 0, "engine": engine}
    whole = regard.attention_vjp(q, k, v, dout, **options)
    for first in (0, 384, 1152, 1280):
        part = slice(first, first + 128)
        g = regard.attention_vjp(q, k[:, part], v[:, part], dout, origin=(0, 0, first), **options)
        np.testing.assert_array_equal(g.key, whole.key[:, part])
        np.testing.assert_array_equal(g.value, whole.value[:, part])


@pytest.mark.parametrize("score", [None, "table"])
def test_grouped_heads_on_any_number_of_threads(score: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over more query blocks than are scheduled together."""
    monkeypatch.setattr(threads, "_chosen", 1)
    q, k, v, dout = inputs(9000, 6, 3, d=8)
    table = regard.table(np.array([0.5, 0.1, 0.2, 0.3, 0.7, 0.4]))
    options: Any = {"mask": regard.window(300)}
    if score is not None:
        options["score"] = regard.alibi(table)
    alone = regard.attention_vjp(q, k, v, dout, **options)
    for n in (2, 3):
        regard.set_num_threads(n)
        g = regard.attention_vjp(q, k, v, dout, **options)
        for name in ("query", "key", "value"):
            np.testing.assert_array_equal(getattr(g, name), getattr(alone, name), err_msg=name)
        if score is not None:
            np.testing.assert_array_equal(g.tables[table], alone.tables[table])
