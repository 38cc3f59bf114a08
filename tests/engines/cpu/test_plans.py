"""A cached schedule serves the calls it was made for, and no others; it holds no array."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regard
from regard.core.parts import part_of
from regard.core.problem import Problem
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule import stages, work
from regard.engines.cpu.schedule.arguments import arrays_of
from regard.engines.cpu.spec.tiles import KEYS, PART, TILE_BITS, TILE_WORD, TILE_WORD_BITS
from regard.engines.cpu.target.instructions import chosen, targets
from regard.ops.normalization import problem_from
from regard.runtime import memory

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, 200, 8)) for _ in range(3))


def beyond(c: float) -> regard.Mask:
    """Everything for c = 0.0, nothing for −0.0."""
    return regard.mask(lambda b, h, i, j: 1.0 / (c * (j + 1)) > 0)


def ids(n: int) -> np.ndarray[Any, Any]:
    return np.arange(200) // n


TWICE: dict[str, tuple[Any, Any]] = {
    "window": ({"mask": regard.window(30)}, {"mask": regard.window(31)}),
    "0.0 and −0.0": ({"mask": beyond(0.0)}, {"mask": beyond(-0.0)}),
    "documents": ({"mask": regard.documents(ids(50))}, {"mask": regard.documents(ids(60))}),
    "boolean mask": ({"mask": RNG.random((200, 200)) < 0.5}, {"mask": RNG.random((200, 200)) < 0.5}),
    "offset": ({"causal": True}, {"causal": True, "offset": 5}),
    "origin": ({"causal": True, "offset": 0}, {"causal": True, "offset": 0, "origin": (0, 0, 64)}),
    "scale": ({"scale": 0.5}, {"scale": -0.5}),
    "dropout": ({"dropout": 0.1, "seed": 1}, {"dropout": 0.3, "seed": 2}),
    "seed": ({"dropout": 0.1, "seed": 1}, {"dropout": 0.1, "seed": 2}),
    "sink": ({"sink": np.zeros(2)}, {}),
    "bias": ({"bias": np.zeros((2, 200, 200))}, {"bias": RNG.standard_normal((200, 1))}),
    "alibi": ({"score": regard.alibi(np.ones(2))}, {"score": regard.alibi(np.full(2, 0.5))}),
    "statistics": ({}, {"observe": ["max", "entropy"]}),
}


@pytest.mark.parametrize("name", TWICE)
def test_another_call_has_another_result(name: str) -> None:
    for options in TWICE[name] * 2:
        got, expected = (regard.attention(Q, K, V, **options, engine=engine) for engine in ("cpu", "tiled"))
        got, expected = (x[0] if isinstance(x, tuple) else x for x in (got, expected))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", TWICE)
def test_another_call_has_other_gradients(name: str) -> None:
    for options in TWICE[name] * 2:
        rest = {key: x for key, x in options.items() if key != "observe"}
        got, expected = (regard.attention_vjp(Q, K, V, V, **rest, engine=engine) for engine in ("cpu", "tiled"))
        for part in ("query", "key", "value", "bias", "sink"):
            x, y = getattr(got, part), getattr(expected, part)
            assert (x is None) == (y is None)
            if x is not None:
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-11, err_msg=part)


def test_other_strides_and_places() -> None:
    for q in (Q, Q[:, ::-1], np.asfortranarray(Q), Q + 1):
        got, expected = (regard.attention(q, K, V, causal=True, engine=engine) for engine in ("cpu", "tiled"))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_other_strides_of_cotangents() -> None:
    for dout in (V, V[:, ::-1], np.asfortranarray(V)):
        got, expected = (regard.attention_vjp(Q, K, V, dout, causal=True, engine=engine) for engine in ("cpu", "tiled"))
        np.testing.assert_allclose(got.query, expected.query, rtol=0, atol=1e-11)


@pytest.mark.parametrize("in_memory", [True, False])
def test_addresses(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "IN_MEMORY", in_memory)
    for x in (Q, Q[:, ::-1], Q[1:, 5:, 3:], np.broadcast_to(Q[:1], Q.shape), np.float32(1)[None], Q[:0]):
        assert memory.address_of(x) == x.__array_interface__["data"][0]


def test_plans_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_schedules", {})
    monkeypatch.setattr(work, "MAX_CACHED", 3)
    for n in (5, 6, 7, 8, 8, 8):
        regard.attention(Q, K, V, mask=regard.window(n), engine="cpu")
    assert len(work._schedules) == 3


def test_plans_are_kept_within_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_schedules", {})
    for n in (5, 6, 7, 8):
        regard.attention(Q, K, V, mask=regard.window(n), engine="cpu")
        if n == 5:
            one = sum(x.nbytes for x in work._schedules.values())
            monkeypatch.setattr(work, "CACHE_BYTES", 2 * one)
    assert one > 0
    assert 0 < sum(x.nbytes for x in work._schedules.values()) <= 2 * one
    monkeypatch.setattr(stages, "CACHED_BYTES", 1)
    kept = list(work._schedules)
    regard.attention(Q, K, V, mask=regard.window(9), engine="cpu")
    assert list(work._schedules) == kept


def test_a_plan_keeps_no_array() -> None:
    mask = RNG.random((200, 200)) < 0.5
    rule = regard.mask(lambda b, h, i, j: regard.table(ids(40))[i] == 1)
    table = weakref.ref(rule.node.args[0].payload)
    there = weakref.ref(mask)
    for m in (rule, mask):
        regard.attention(Q, K, V, mask=m, engine="cpu")
    del rule, mask, m
    gc.collect()
    assert there() is None
    assert table() is None


def groups(rows: int, threads: int = 1, **options: Any) -> list[int]:
    """The query blocks of each work group, in a call with `rows` of them in each of four heads."""
    target = targets()["avx512"]
    x = np.zeros((4, rows * target.lanes(8) * target.tile[1], 8))
    p = problem_from(x, x, x, **options)
    results = work.KernelResults(x, x[..., 0].copy(), None, None)
    (stage,) = work.schedule_for(p, target, results, arrays_of(p, results.own(p)), range(p.n_q), threads).stages
    return sorted(np.diff(stage.bounds)[:, 0].tolist())


def test_groups_are_as_wide_as_keys_are_shared() -> None:
    assert groups(40) == [40] * 4
    assert groups(100) == [36] * 4 + [64] * 4
    assert groups(40, mask=regard.window(8)) == sorted([16, 16, 8] * 4)  # two tiles for each
    # At least eight for each thread, the last four halved four times.
    assert groups(40, threads=2) == [1] * 8 + [2] * 3 + [3] * 2 + [5] * 4 + [10] * 12
    assert groups(120, threads=2) == sorted([1, *[2] * 7] + [3, 4, 4, 4] + [7, 8] * 2 + [15] * 4 + [30] * 12)
    assert groups(640, threads=2) == [4] * 8 + [8] * 4 + [16] * 4 + [32] * 4 + [64] * 36


def test_heads_that_share_rows_of_keys_go_through_them_together() -> None:
    """Decoding (batch 2, 6 heads): each page of such keys is gone through once, not once for each head."""
    target = targets()["avx512"]
    q, apart = np.zeros((2, 6, 1, 8), np.float32), np.zeros((2, 6, 300, 8), np.float32)
    in_rows = np.zeros((2, 300, 6, 8), np.float32).swapaxes(1, 2)
    by_head = {"mask": regard.mask(lambda b, h, i, j: j >= 100 * h)}
    for key, options, threads, heads, expected in [
        (apart, {}, 1, 1, [1] * 12),
        (apart, {}, 2, 1, [1] * 12),
        (in_rows, {}, 1, 6, [1] * 2),
        (in_rows, {}, 2, 3, [2] * 2),  # two key splits of some heads for each thread
        (in_rows, by_head, 1, 1, [6] * 2),  # though heads see other keys
    ]:
        p = problem_from(q, key, key, **options)
        results = work.KernelResults(np.zeros_like(q), q[..., 0].copy(), None, None)
        (stage,) = work.schedule_for(p, target, results, arrays_of(p, results.own(p)), range(1), threads).stages
        spec = results.spec(p, target, 1)
        assert (stage.blocks[:, spec.block_fields.index("lanes")] == heads).all()
        assert sorted(np.diff(stage.bounds)[:, 0].tolist()) == expected


MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"mask": regard.window(100)},
    "window, some keys further on": {"mask": regard.window(70, 30), "offset": 45},
    "documents": {"mask": regard.documents(np.arange(600) // 90)},
    "strided": {"mask": regard.strided(64) | regard.global_tokens(3)},
    "halves that see keys apart": {"mask": regard.mask(lambda b, h, i, j: (j // 32) % 4 == 2 * ((i // 32) % 2))},
}


@pytest.mark.parametrize("name", MASKS)
def test_no_half_of_the_lanes_misses_what_it_sees(name: str) -> None:
    target = targets()["avx512"]
    lanes, n, x = 64, 600, np.zeros((1, 600, 8), np.float32)
    p = problem_from(x, x, x, **MASKS[name])
    results = work.KernelResults(x, x[..., 0].copy(), None, None)
    spec = replace(results.spec(p, target, n), lanes=lanes)
    ((tiles, blocks),) = stages.LaunchStages(spec, p, arrays_of(p, results.own(p)), range(n), 1).chunks()
    visible = regard.attention(x, x, x, return_weights=True, engine="tiled", **MASKS[name])[1][0] > 0
    left_out = 0
    for block in blocks:
        first, rows, start, count = (
            int(block[spec.block_fields.index(field)]) for field in ("i", "rows", "tiles", "count")
        )
        first -= int(p.offset[0])
        worked_on = np.zeros((rows, -(-n // KEYS) * KEYS), bool)
        for word in tiles[start : start + count].tolist():
            tile = (word >> TILE_BITS) * KEYS
            found = {name: word >> TILE_WORD_BITS * n & 15 for n, name in enumerate(TILE_WORD)}
            begin, stop, both, after = (
                tile + PART * found[name] for name in ("first", "stop", "both_first", "both_stop")
            )
            half = rows // 2 if rows == lanes else rows
            worked_on[:, both:after] = True
            for alone, low, high in ((found["early"], begin, both), (found["late"], after, stop)):
                worked_on[alone * half : (alone + 1) * half, low:high] = True
                left_out += high - low
        assert not (visible[first : first + rows] & ~worked_on[:, :n]).any()
    assert left_out > 0 or name == "halves that see keys apart"


def lists(p: Problem) -> tuple[dict[tuple[int, int, int], list[int]], int]:
    """The tiles of each query block, by batch element, head and first row; and the number of chunks."""
    results = work.KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
    spec = results.spec(p, chosen(), p.n_q)
    found, chunks = {}, 0
    for tiles, blocks in stages.LaunchStages(spec, p, arrays_of(p, results.own(p)), range(p.n_q), 1).chunks():
        chunks += 1
        for block in blocks:
            b, h, i, begin, count = (int(block[spec.block_fields.index(x)]) for x in ("b", "h", "i", "tiles", "count"))
            found[b, h, i] = tiles[begin : begin + count].tolist()
    return found, chunks


LENGTHS = np.array([300, 7, 0, 129])
VARIED: dict[str, dict[str, Any]] = {
    "documents": {"mask": regard.documents(np.sort(RNG.integers(0, 4, (4, 300)), axis=1))},
    "padding": {"mask": regard.padding(LENGTHS)},
    "blocks of each head": {"mask": regard.blocks(RNG.random((2, 19, 19)) < 0.2, 16)},
    "blocks of all": {"mask": regard.blocks(RNG.random((4, 2, 19, 19)) < 0.2, 16) | regard.window(3)},
    "offsets": {"causal": True, "offset": np.array([0, 40, -90, 3])},
    "one for all": {"mask": regard.window(50)},
    "a score": {"score": regard.score(lambda s, b, h, i, j: regard.where(i - j < 60 * b + 30 * h, s, -np.inf))},
    "an array": {"mask": np.arange(300) < LENGTHS[:, None, None, None]},
    "an array of each head": {"mask": RNG.random((4, 2, 1, 300)) < 0.01},
    "an array and a rule": {"mask": regard.mask(RNG.random((4, 1, 300, 300)) < 0.001) & regard.padding(LENGTHS)},
}


@pytest.mark.parametrize("together", [1, 2**15])
@pytest.mark.parametrize("name", VARIED)
def test_the_tiles_of_a_batch_are_those_of_each_element(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "BLOCK_MASK", 1)
    monkeypatch.setattr(stages, "LIST_TILES", together)
    p = problem_from(*(RNG.standard_normal((4, 2, 300, 8)) for _ in range(3)), **VARIED[name])
    found, chunks = lists(p)
    assert (chunks == 1) == (together > 1 or name in ("one for all", "blocks of each head"))
    for b in range(4):
        for h in range(2):
            alone, _ = lists(part_of(p, b, h))
            assert alone == {key: x for key, x in found.items() if key[:2] == (b, h)}


@pytest.mark.parametrize("n", [20, 100, 128])
def test_bits_are_the_same_if_a_single_tile_is_classified(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = RNG.standard_normal((4, 3, 2, n, 8), dtype=np.float32)
    results = []
    for least in (1, 2**62):
        monkeypatch.setattr(stages, "ONE_TILE", (least, 1))
        monkeypatch.setattr(work, "_schedules", {})
        for mask in (regard.causal(), regard.padding([n, n // 3, 0]), regard.window(9)):
            out = regard.attention(q, k, v, mask=mask, engine="cpu")
            g = regard.attention_vjp(q, k, v, dout, mask=mask, engine="cpu")
            results.append([out, g.query, g.key, g.value])
    for some, others in zip(results[:3], results[3:], strict=True):
        for x, y in zip(some, others, strict=True):
            np.testing.assert_array_equal(x, y)


def test_rules_that_mean_the_same_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs make their rules anew for each call."""
    made: list[Any] = []
    schedule = work.Schedule
    monkeypatch.setattr(work, "_schedules", {})
    monkeypatch.setattr(work, "Schedule", lambda *given: made.append(given) or schedule(*given))
    for n in (30, 30, 31):
        regard.attention(Q, K, V, mask=regard.mask(lambda b, h, i, j, n=n: abs(i - j) < n), engine="cpu")
    assert len(made) == 2


def test_arrays_that_a_kernel_would_misread_are_refused() -> None:
    """Outputs that the kernel writes without strides, in the type of sums, for each row, and that must be there."""
    x: Any = np.zeros((1, 20, 8), np.float32)
    p, target = problem_from(x, x, x), targets()["avx2"]
    for out, lse, message in [
        (x, x[..., 0], "lse must be contiguous along row"),
        (x.swapaxes(1, 2).copy().swapaxes(1, 2), x[..., 0].copy(), "out must be contiguous along feature"),
        (x, np.zeros((1, 20)), "lse must have the axes head, row and 4 bytes for a number"),
        (x, np.zeros((1, 19), np.float32), "lse must have row 20, as q, got shape"),
        (None, x[..., 0].copy(), "out must be an array with the axes head, row, feature, got none"),
    ]:
        with pytest.raises(ValueError, match=message):
            work.run(p, target, work.KernelResults(out, lse, None, None))


def test_a_field_that_a_kernel_lacks_is_named() -> None:
    spec = work.spec_of(problem_from(Q, K, V), targets()["avx2"], Q.shape[-2], entropy=False)
    with pytest.raises(ValueError, match="k_dot_row must be a field of the kernel, got none: it has work_groups, "):
        written("forward", spec.fields, targets()["avx2"], lambda k: k.integer("k_dot_row"))
