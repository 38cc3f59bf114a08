"""Which results have the same bits, whatever else a call holds.

out, lse and dq of a query depend on the keys that it sees and on its place alone: not on the batch, the other queries
(prefill or decode), the other heads, the layout, the number of threads or the run. What is summed over queries is the
same in every run and for any number of threads.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.runtime import threads

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = tuple[Array, Array, Array, Array]
Results = dict[str, Array]

N, LEAD, HEADS, KV_HEADS, D, D_V = 500, 2, 4, 2, 16, 12
GROUP = HEADS // KV_HEADS
FIRST = 700  # where the first query and key lie, so that spans of keys begin and end within the call
LAST = FIRST + N
BLOCKS = np.tril(np.random.default_rng(1).random((12, 12)) < 0.7) | np.eye(12, dtype=bool)
# Each is causal, so that a query sees the same keys whether or not later ones are there.
WISHES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"mask": regard.window(150)},
    "documents": {"mask": regard.documents(np.arange(LAST) // 90), "causal": True},
    "blocks": {"mask": regard.blocks(BLOCKS, 100), "causal": True},
    "scores": {"causal": True, "score": [regard.softcap(3.0), regard.alibi(np.array([0.5, 0.25, 0.1, 0.01]))]},
    "a rule for each head": {"mask": lambda b, h, i, j: (j <= i) & ((i - j) % (h + 1) == 0)},
    "a rule for each batch element": {"mask": regard.padding(np.array([LAST, LAST - 200])), "causal": True},
    "dropout": {"causal": True, "dropout": 0.2, "seed": 3},
    "sink": {"causal": True, "sink": np.array([0.5, -1.0, 2.0, 0.0]), "scale": 0.7},
}
CALLS = [(name, "float32") for name in WISHES] + [("causal", "float64"), ("causal", "bfloat16"), ("scores", "bfloat16")]
every_call = pytest.mark.parametrize(("name", "dtype"), CALLS)


@pytest.fixture(autouse=True)
def number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back what a test sets."""
    monkeypatch.setattr(threads, "_chosen", 2)


@cache
def inputs(dtype: str) -> Arrays:
    """query, key, value and a cotangent of the output."""
    rng = np.random.default_rng(0)
    shapes = ((HEADS, N, D), (KV_HEADS, N, D), (KV_HEADS, N, D_V), (HEADS, N, D_V))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, k, v, dout = (rng.standard_normal((LEAD, *shape)).astype(kind) for shape in shapes)
    return q, k, v, dout


def results(arrays: Iterable[Array], name: str, row: int = 0, b: int = 0, h: int = 0, **more: Any) -> Results:
    """What has the same bits whatever the other rows: out, lse and dq. The first query is `row` of the whole."""
    q, k, v, dout = arrays
    wishes = WISHES[name] | {"offset": FIRST + row, "origin": (b, h, FIRST), "engine": "tiled"} | more
    out, seen = regard.attention(q, k, v, observe=["lse"], **wishes)
    rows = q.swapaxes(-2, -3) if "layout" in more else q
    rows = rows[..., 0].astype(np.float64)  # a cotangent of lse and entropy that goes with the row
    g = regard.attention_vjp(q, k, v, dout, dlse=rows, dentropy=-rows, **wishes)
    return {"out": out, "lse": seen.lse, "dq": g.query}


@cache
def whole(name: str, dtype: str) -> Results:
    """The results of one call that holds everything."""
    return results(inputs(dtype), name)


def cut(x: Results, *place: Any) -> Results:
    """The results at some batch elements, heads and queries."""
    return {name: value[place] for name, value in x.items()}


def assert_same(got: Results, expected: Results) -> None:
    for name, x in expected.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape)
        values = got[name].astype(np.float64), x.astype(np.float64)
        difference = np.abs(values[0] - values[1]).max(initial=0)
        assert got[name].tobytes() == x.tobytes(), f"{name} differs by up to {difference}"


@every_call
@pytest.mark.parametrize("n", [1, 2, 68, 69, 324, 325, 400, N])
def test_a_decode_step_is_a_row_of_the_prefill(name: str, dtype: str, n: int) -> None:
    q, k, v, dout = inputs(dtype)
    row = slice(n - 1, n)
    step = results((q[:, :, row], k[:, :, :n], v[:, :, :n], dout[:, :, row]), name, row=n - 1)
    assert_same(step, cut(whole(name, dtype), slice(None), slice(None), row))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_decode_step_where_positions_follow_from_the_sizes(dtype: str) -> None:
    q, k, v, _ = inputs(dtype)
    prefill = regard.attention(q, k, v, causal=True, engine="tiled")
    for n in (1, 127, 128, 129, 300, N):
        step = regard.attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], causal=True, engine="tiled")
        assert_same({"out": step}, {"out": prefill[:, :, n - 1 : n]})


@every_call
@pytest.mark.parametrize("rows", [(0, 130), (1, 490), (67, 69), (400, N)], ids=str)
def test_queries_do_not_depend_on_the_others(name: str, dtype: str, rows: tuple[int, int]) -> None:
    q, k, v, dout = inputs(dtype)
    some = slice(*rows)
    part = results((q[:, :, some], k, v, dout[:, :, some]), name, row=rows[0])
    assert_same(part, cut(whole(name, dtype), slice(None), slice(None), some))


@every_call
def test_other_queries_may_hold_anything(name: str, dtype: str) -> None:
    q, k, v, dout = (x.copy() for x in inputs(dtype))
    q[:, :, 129:400:3], dout[:, :, 130:400:3] = np.nan, np.inf
    kept = np.ones(N, bool)
    kept[129:400:3] = kept[130:400:3] = False
    got = results((q, k, v, dout), name)
    assert_same(cut(got, slice(None), slice(None), kept), cut(whole(name, dtype), slice(None), slice(None), kept))


@every_call
def test_masked_keys_may_hold_anything(name: str, dtype: str) -> None:
    q, k, v, dout = (x.copy() for x in inputs(dtype))
    n = 350  # the queries before it do not see it
    k[:, :, n:], v[:, :, n:] = np.nan, np.inf
    got = results((q[:, :, :n], k, v, dout[:, :, :n]), name)
    assert_same(got, cut(whole(name, dtype), slice(None), slice(None), slice(n)))


@pytest.mark.parametrize("first", [64, 128, 180])
@pytest.mark.parametrize(("name", "row"), [("window", 330), ("documents", 380)])
def test_keys_that_nothing_sees_may_be_absent(name: str, row: int, first: int) -> None:
    """As when a cache forgets what has left the window."""
    q, k, v, dout = inputs("float32")
    arrays = (q[:, :, row:], k[:, :, first:], v[:, :, first:], dout[:, :, row:])
    part = results(arrays, name, row=row, origin=(0, 0, FIRST + first))
    assert_same(part, cut(whole(name, "float32"), slice(None), slice(None), slice(row, None)))


@pytest.mark.parametrize(("row", "first"), [(1200, 130), (1300, 0), (1300, 200), (1399, 256), (1450, 300)])
def test_long_windows(row: int, first: int) -> None:
    """Over more keys than are merged at once, and none that the query does not see."""
    n = 1500
    q, k, v = np.random.default_rng(0).standard_normal((3, n, 8), dtype=np.float32)
    wish = {"mask": regard.window(1060), "engine": "tiled"}
    prefill = regard.attention(q, k, v, **wish)
    one, stop = slice(row, row + 1), row + 1
    step = regard.attention(q[one], k[first:stop], v[first:stop], offset=row, origin=(0, 0, first), **wish)
    assert_same({"out": step}, {"out": prefill[one]})


@every_call
def test_a_shard_of_the_batch(name: str, dtype: str) -> None:
    part = results((x[1:] for x in inputs(dtype)), name, b=1)
    assert_same(part, cut(whole(name, dtype), slice(1, None)))
    alone = results((x[0] for x in inputs(dtype)), name)
    assert_same(alone, cut(whole(name, dtype), 0))


@every_call
def test_a_shard_of_the_heads(name: str, dtype: str) -> None:
    q, k, v, dout = inputs(dtype)
    for heads, kv in ((slice(0, GROUP), slice(0, 1)), (slice(HEADS - 1, HEADS), slice(KV_HEADS - 1, KV_HEADS))):
        own = {"sink": WISHES[name]["sink"][heads]} if "sink" in WISHES[name] else {}  # rules see the absolute head
        part = results((q[:, heads], k[:, kv], v[:, kv], dout[:, heads]), name, h=heads.start, **own)
        assert_same(part, cut(whole(name, dtype), slice(None), heads))


@every_call
def test_grouped_heads_are_repeated_heads(name: str, dtype: str) -> None:
    q, k, v, dout = inputs(dtype)
    k, v = (x.repeat(GROUP, axis=1) for x in (k, v))
    assert_same(results((q, k, v, dout), name), whole(name, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_layouts_and_strides(dtype: str) -> None:
    arrays = inputs(dtype)
    swapped = results((np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays), "causal", layout="bnhd")
    assert_same({n: x if n == "lse" else x.swapaxes(1, 2) for n, x in swapped.items()}, whole("causal", dtype))
    for again in (
        [np.asfortranarray(x) for x in arrays],
        [np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1] for x in arrays],
        [np.repeat(x, 2, axis=-1)[..., ::2] for x in arrays],
        [np.concatenate([x, x], axis=-1)[..., : x.shape[-1]] for x in arrays],
    ):
        assert_same(results(again, "causal"), whole("causal", dtype))


def everything(name: str, dtype: str) -> Results:
    """Every result of a call of many wishes, those that are sums over queries too."""
    n = 400
    q, k, v, dout = (x[:, :, :n] for x in inputs(dtype))
    table, bias = regard.table(np.linspace(-1, 1, HEADS * 9).reshape(HEADS, 9)), np.linspace(-1, 1, n)
    rules = [*WISHES[name].get("score", []), regard.relative(table)]
    wishes = WISHES[name] | {"score": rules, "bias": bias, "sink": np.linspace(-1, 1, HEADS), "engine": "tiled"}
    maps = {s.of[2]: s for s in (regard.pooled(9, 7), regard.pooled(9, 7, "max"))}
    statistics = ["lse", "entropy", "max", "argmax", "received", "profile", "visible", regard.top(3), *maps.values()]
    out, seen = regard.attention(q, k, v, observe=statistics, **wishes)
    ones = np.ones(seen.lse.shape)
    g = regard.attention_vjp(q, k, v, dout, dlse=ones, dentropy=ones, **wishes)
    _, tangent = regard.attention_jvp(q, k, v, q, k, v, dsink=wishes["sink"], **wishes)
    gradients = {"dq": g.query, "dk": g.key, "dv": g.value, "dbias": g.bias, "dsink": g.sink, "dtable": g.tables[table]}
    tangents = {"t_out": tangent.out, "t_lse": tangent.lse, "t_entropy": tangent.entropy}
    moving = regard.Differential(q, k, v, bias, wishes["sink"], {table: table.array})
    second, _ = regard.attention_vjp_jvp(q, k, v, dout, moving, dlse=ones, dentropy=ones, **wishes)
    names = {"query": "q", "key": "k", "value": "v", "bias": "bias", "sink": "sink"}
    seconds = {f"t_d{short}": getattr(second, name) for name, short in names.items()}
    seconds["t_dtable"] = second.tables[table]
    top = seen[regard.top(3)]
    found = {"values": top.values, "indices": top.indices, "profile": seen.profile.values}
    found |= {s: seen[s] for s in statistics if isinstance(s, str) and s != "profile"}
    found |= {f"{kind} map": seen[s] for kind, s in maps.items()}
    return {"out": out} | found | gradients | tangents | seconds


def large(dtype: str) -> Results:
    """Gradients of a call with products large enough for BLAS to part, and one key head that four query heads share."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q, dout = rng.standard_normal((2, 4, 300, 64)).astype(kind)
    k, v = rng.standard_normal((2, 1, 1100, 64)).astype(kind)
    g = regard.attention_vjp(q, k, v, dout, causal=True, engine="tiled")
    second, _ = regard.attention_vjp_jvp(q, k, v, dout, regard.Differential(q, k, v), causal=True, engine="tiled")
    seconds = {"t_dq": second.query, "t_dk": second.key, "t_dv": second.value}
    return {"dq": g.query, "dk": g.key, "dv": g.value} | seconds


@pytest.mark.parametrize(("name", "dtype"), [("scores", "float32"), ("dropout", "float64"), ("window", "bfloat16")])
def test_any_number_of_threads_and_every_run(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wake = Mock(wraps=threads._wake)
    monkeypatch.setattr(threads, "_wake", wake)
    regard.set_num_threads(1)
    alone = everything(name, dtype), large(dtype)
    wake.assert_not_called()
    for n in (2, 3, 3):
        regard.set_num_threads(n)
        assert_same(everything(name, dtype), alone[0])
        assert_same(large(dtype), alone[1])
    assert {call.args for call in wake.mock_calls} == {(1,), (2,)}
    assert wake.call_count >= 12  # forward, `received`, forward mode


def digest() -> str:
    """A hash of every result of a call."""
    found = hashlib.sha256()
    for x in (*everything("dropout", "float32").values(), *large("float32").values()):
        found.update(x.tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("blas", ["1", "2"])
def test_any_number_of_threads_of_the_library_below(blas: str) -> None:
    counts = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), blas)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | counts | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", "import test_bits; print(test_bits.digest())"]
    assert subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip() == digest()


def test_dropout_drops_the_same_in_every_shard() -> None:
    """With the identity for value, the output is the dropped weights."""
    rng, n = np.random.default_rng(0), 300
    q, k = rng.standard_normal((2, 2, 2, n, 8), dtype=np.float32)
    v = np.broadcast_to(np.eye(n, dtype=np.float32), (2, 2, n, n))
    wish = {"dropout": 0.3, "seed": 9, "engine": "tiled"}
    dropped = regard.attention(q, k, v, **wish) == 0
    share, weights = dropped.mean(), dropped.size
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / weights)
    for b, h, i, j in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 77, 0), (0, 0, 0, 130), (1, 1, 200, 299)):
        part = regard.attention(
            q[b:, h:, i:], k[b:, h:, j:], v[b:, h:, j:, j:], offset=i, origin=(b, h, j), **wish
        )  # fmt: skip
        np.testing.assert_array_equal(part == 0, dropped[b:, h:, i:, j:])
    other = regard.attention(q, k, v, **(wish | {"seed": 10})) == 0
    assert abs((other == dropped).mean() - (0.3**2 + 0.7**2)) < 5 * np.sqrt(0.25 / weights)


def test_these_tests_can_fail() -> None:
    expected = whole("causal", "float32")
    changed = {name: x.copy() for name, x in expected.items()}
    changed["dq"][0, 0, 0, 0] = np.nextafter(changed["dq"][0, 0, 0, 0], np.float32(np.inf))
    with pytest.raises(AssertionError, match="dq differs by up to"):
        assert_same(changed, expected)
