"""The same bits for a query whatever the batch, the other queries, the threads, and the tiles that are skipped."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

import regard
from regard.engines.cpu.schedule import forward_spec, stages, work
from regard.engines.cpu.target.instructions import Target, chosen, targets
from regard.ops.normalization import problem_from

RNG = np.random.default_rng(0)
H, N, D = 4, 1300, 24  # more than one split of 1024 keys
Q, K, V = (RNG.standard_normal((2, H, N, D)).astype(np.float32) for _ in range(3))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"mask": regard.window(300)},
    "score": {"score": [regard.softcap(5.0), regard.alibi(np.full(H, 0.1))], "causal": True},
    "dropout and sink": {"dropout": 0.2, "seed": 7, "sink": np.full(H, 0.3), "causal": True},
}


def run(q: Any, k: Any, v: Any, **options: Any) -> tuple[bytes, bytes]:
    """The bits of out and lse."""
    out, seen = regard.attention(q, k, v, **options, observe=["lse"], engine="cpu")
    return out.tobytes(), seen.lse.tobytes()


def both(x: Any, rows: slice) -> tuple[bytes, bytes]:
    """Those of some rows of (out, lse)."""
    return x[0][..., rows, :].tobytes(), x[1][..., rows].tobytes()


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


@pytest.fixture
def whole(option: dict[str, Any]) -> Any:
    out, seen = regard.attention(Q, K, V, **option, observe=["lse"], engine="cpu")
    return out, seen.lse


@pytest.mark.parametrize("rows", [slice(N - 1, N), slice(1000, 1003), slice(31, 150), slice(0, 1299)])
def test_any_rows_alone(option: dict[str, Any], whole: Any, rows: slice) -> None:
    """Prefill and decode: one query, a few, or all."""
    assert run(Q[..., rows, :], K, V, **option, offset=rows.start) == both(whole, rows)


@pytest.mark.parametrize("option", [OPTIONS["plain"], OPTIONS["score"]], ids=["plain", "score"])
def test_rows_far_apart(option: dict[str, Any], whole: Any) -> None:
    """Keys and values with others between their rows are copied tile by tile; what lies between is never read."""
    apart = [np.full((2, H, N, 8 * D), np.nan, np.float32)[..., :D] for _ in "kv"]
    for x, y in zip(apart, (K, V), strict=True):
        x[...] = y
    assert forward_spec.spec_of(problem_from(Q, *apart), chosen(), N, False).copied
    assert not forward_spec.spec_of(problem_from(Q, K, V), chosen(), N, False).copied
    assert run(Q, *apart, **option) == both(whole, slice(None))


def test_keys_that_no_query_sees_may_be_absent(option: dict[str, Any]) -> None:
    if option.get("causal"):
        rows = slice(0, 700)
        out, seen = regard.attention(Q, K, V, **option, observe=["lse"], engine="cpu")
        expected = both((out, seen.lse), rows)
        assert run(Q[..., rows, :], K[..., rows, :], V[..., rows, :], **option, offset=0) == expected


def test_one_batch_element_alone(option: dict[str, Any], whole: Any) -> None:
    got = run(Q[1], K[1], V[1], **option, origin=(1, 0, 0))
    assert got == (whole[0][1].tobytes(), whole[1][1].tobytes())


def test_a_shard_of_the_keys_begins_anywhere() -> None:
    mask = regard.mask(lambda b, h, i, j: j >= 200)
    expected = run(Q, K, V, mask=mask, offset=0)
    assert run(Q, K[..., 200:, :], V[..., 200:, :], mask=mask, offset=0, origin=(0, 0, 200)) == expected


def test_left_padding(option: dict[str, Any]) -> None:
    """Padding on the left by whole key splits changes no bit of a sequence."""
    pad = 1024
    zeros = np.zeros((2, H, pad, D), np.float32)
    padded = [np.concatenate([zeros, x], axis=-2) for x in (Q, K, V)]
    if "score" in option or "dropout" in option or "mask" in option:
        pytest.skip("the rule reads absolute positions")
    real = regard.padding(np.array([N, N]), side="left")
    got, seen = regard.attention(
        *padded,
        **{**option, "mask": real & option["mask"] if "mask" in option else real},
        observe=["lse"],
        engine="cpu",
    )
    assert both((got, seen.lse), slice(pad, None)) == run(Q, K, V, **option)


def test_values_of_skipped_and_masked_keys_do_not_matter(option: dict[str, Any]) -> None:
    if "mask" not in option and "causal" not in option:
        pytest.skip("everything is visible")
    rows = slice(500, 560)
    expected = run(Q[..., rows, :], K, V, **option, offset=500)
    k, v = K.copy(), V.copy()
    k[..., 560:, :], v[..., 560:, :] = np.nan, np.inf
    assert run(Q[..., rows, :], k, v, **option, offset=500) == expected


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads(option: dict[str, Any], whole: Any, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    assert run(Q, K, V, **option) == both(whole, slice(None))


@pytest.mark.parametrize("layout", ["keys in lanes", "queries in lanes", "heads joined"])
def test_spans_worked_apart(option: dict[str, Any], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer query blocks than keep the threads busy, key splits run separately, and are then merged."""
    observe = [regard.top(3)] if layout == "queries in lanes" else []
    k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if layout == "heads joined" else x for x in (K, V))
    split = Mock(wraps=stages.LaunchStages.split)
    monkeypatch.setattr(stages.LaunchStages, "split", lambda *args: split(*args))
    monkeypatch.setattr(work, "SMALL", 0)
    q, observe = Q[..., N - 1 :, :], ["lse", "entropy", "max", *observe]
    found = []
    for threads in (1, 5):
        monkeypatch.setattr("regard.runtime.threads._chosen", threads)
        out, seen = regard.attention(q, k, v, **option, observe=observe, engine="cpu")
        best = [x for s in observe[3:] for x in (seen[s].values, seen[s].indices)]
        found.append([x.tobytes() for x in (out, seen.lse, seen.entropy, seen.max, *best)])
    assert split.call_count == 1
    assert found[0] == found[1]


def test_many_python_threads(option: dict[str, Any], whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", 2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: run(Q, K, V, **option), range(16)))
    assert set(found) == {both(whole, slice(None))}


def in_child(queue: Any) -> None:
    queue.put(run(Q, K, V, causal=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork")
def test_after_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.runtime.threads._chosen", 2)
    expected = run(Q, K, V, causal=True)
    context = get_context("fork")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == expected
    child.join()


def test_grouped_heads_are_heads() -> None:
    k, v = K[:, :2], V[:, :2]
    for rows in (slice(0, 3), slice(None)):
        q = Q[..., rows, :]
        assert run(q, k, v) == run(q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1))


DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
DECODE_OPTIONS: dict[str, Any] = {
    "plain": lambda seen: {"sink": np.linspace(-1, 1, 2), "scale": -0.3},
    "mask": lambda seen: {"mask": seen, "dropout": 0.3, "seed": 3, "origin": (0, 0, 37)},
    "score": lambda seen: {"score": regard.softcap(3.0), "bias": np.sin(np.arange(seen.size)).reshape(seen.shape)},
}


def decode_and_prefill(
    sizes: tuple[int, ...], dtype: Any, options: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes that are keys and lanes that are queries; what no query sees is not a number."""
    rows, group, heads, keys, d, d_v = sizes
    rng = np.random.default_rng(1)
    seen = rng.random((rows, keys)) < 0.5
    q, k, v = (
        rng.standard_normal(s).astype(dtype) for s in ((heads * group, rows, d), (heads, keys, d), (heads, keys, d_v))
    )
    k = np.ascontiguousarray(k.swapaxes(-1, -2)).swapaxes(-1, -2) if layout == "turned" else k
    if layout == "inside of tokens":
        k, v = (np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (k, v))
    if options == "mask":
        v[:, ~seen.any(axis=0)] = np.nan
    given = DECODE_OPTIONS[options](seen)
    if "sink" in given:
        given["sink"] = np.resize(given["sink"], heads * group)
    specs, layouts, found = [], [], []
    spec_of = forward_spec.spec_of
    monkeypatch.setattr(work, "spec_of", lambda *args: specs.append(spec_of(*args)) or specs[-1])
    for few in (forward_spec.DECODE_QUERIES, 0):
        monkeypatch.setattr(forward_spec, "DECODE_QUERIES", few)
        monkeypatch.setattr(work, "_schedules", {})
        out, s = regard.attention(q, k, v, **given, observe=["lse", "entropy", "max"], engine="cpu")
        found.append([x.tobytes() for x in (out, s.lse, s.entropy, s.max)])
        layouts.append(specs[-1].decode_rows > 0)
        assert not np.isnan(out.astype(np.float64)).any()
    assert found[0] == found[1]
    assert layouts == [rows * group <= chosen().lanes(specs[0].real.size), False]
    assert (specs[0].packed_vectors > 0) == (layouts[0] and layout == "inside of tokens")


# Rows, queries that share a key head, key heads, keys, d, d_v; in the last two a query block does not hold all heads.
FEW_SIZES = [
    ((1, 1, 2, 1300, 33, 17), "apart"), ((2, 2, 2, 700, 64, 40), "turned"), ((1, 5, 2, 300, 16, 128), "apart"),
    ((1, 1, 5, 1300, 33, 17), "inside of tokens"), ((1, 1, 70, 150, 16, 40), "inside of tokens"),
    ((2, 2, 21, 300, 40, 16), "inside of tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "layout", "dtype", "options"),
    [
        (*sizes, dtype, options)
        for n, sizes in enumerate(FEW_SIZES)
        for m, dtype in enumerate(DTYPES)
        for options in ("plain", ("mask", "score")[(n + m) % 2])  # by turns: each is two kernels
    ],
)
def test_few_queries_meet_the_operations_of_many(
    sizes: tuple[int, ...], layout: str, dtype: Any, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is np.float16 and chosen().name == "baseline":
        pytest.skip("this processor does not convert float16")
    decode_and_prefill(sizes, dtype, options, layout, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["apart", "inside of tokens"])
@pytest.mark.parametrize("target", [t.name for t in targets().values() if t.runs][1:])
def test_few_queries_on_every_target(target: str, layout: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype is np.float16 and target == "baseline":
        pytest.skip("it does not convert float16")
    monkeypatch.setenv("REGARD_CPU", target)
    decode_and_prefill((1, 2, 3, 300, 17, 21), dtype, "mask", layout, monkeypatch)


WOVEN: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "statistics": {"observe": ["lse", "entropy", "max", regard.top(3)], "mask": regard.window(300, 20)},
    "dense": {"bias": RNG.standard_normal((H, 150, N)).astype(np.float32), "mask": RNG.random((150, N)) < 0.6},
    "hidden NaN": {"mask": np.arange(N) % 5 != 2},
}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("name", WOVEN)
def test_weaving_changes_no_bits(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights made beside the scores of the next tile, as on processors with registers left, and after their own."""
    q, k, v = Q[..., :150, :].astype(dtype), K.astype(dtype), V.astype(dtype)
    if name == "hidden NaN":
        v[..., 2::5, :] = np.nan
    monkeypatch.setattr(Target, "pipelines", property(lambda target: target.name == "pipelined"))
    found = []
    for target in ("apart", "pipelined"):
        monkeypatch.setitem(targets(), target, replace(chosen(), name=target))
        monkeypatch.setenv("REGARD_CPU", target)
        spec = forward_spec.spec_of(problem_from(q, k, v), chosen(), 150, False)
        assert spec.pipelined == (target == "pipelined" and not spec.amx)
        got = regard.attention(q, k, v, **WOVEN[name], engine="cpu")
        arrays = [got] if isinstance(got, np.ndarray) else [got[0], got[1].lse, got[1].entropy, got[1].max]
        if name == "statistics":
            arrays += [got[1][regard.top(3)].values, got[1][regard.top(3)].indices]
        if name in ("causal", "score"):
            arrays += [x.out for x in regard.attention_jvp(q, k, v, q, k, v, **WOVEN[name], engine="cpu")]
        found.append([x.tobytes() for x in arrays])
        monkeypatch.delenv("REGARD_CPU")
    assert found[0] == found[1]
    assert not np.isnan(arrays[0].astype(float)).any()


def test_another_key_changes_bits() -> None:
    """The comparisons above can fail."""
    k = K.copy()
    k[0, 0, 3, 0] += 1e-3
    assert run(Q, k, V) != run(Q, K, V)
