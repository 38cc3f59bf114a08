"""The backward kernel: every instruction set, bits, what is hidden, and no element outside the arrays."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import regard
from cases import CASES, Case
from engines.cpu.test_targets import SOME, by_turns
from regard.core.layout import Layout
from regard.core.problem import Differential, Outputs
from regard.engines import cpu, tiled
from regard.engines.cpu.schedule import backward_arrays, backward_work, work
from regard.engines.cpu.schedule.arguments import arrays_of
from regard.engines.cpu.schedule.backward_arrays import BackwardArrays
from regard.engines.cpu.spec.tiles import TILE_BITS
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import chosen, targets
from regard.ops.normalization import problem_from
from support import assert_gradients

RNG = np.random.default_rng(0)
H, N, D = 4, 700, 24
Q, DO = (RNG.standard_normal((2, H, N, D)).astype(np.float32) for _ in range(2))
K, V = (RNG.standard_normal((2, 2, N, D)).astype(np.float32) for _ in range(2))
ROWS = RNG.standard_normal((2, 2, H, N))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"mask": regard.window(150, 20)},
    "score": {"score": [regard.softcap(5.0), regard.alibi(regard.table(np.full(H, 0.1)))], "causal": True},
    "dropout and sink": {"dropout": 0.2, "seed": 7, "sink": np.full(H, 0.3), "causal": True},
    "bias of keys": {"bias": RNG.standard_normal((H, 1, N)), "causal": True},
    "bias that the batch shares": {"bias": RNG.standard_normal((H, N, N))},
    "bias of rows": {"bias": RNG.standard_normal((N, 1)), "score": regard.softcap(2.0)},
    "score and shared bias": {"score": regard.alibi(regard.table(np.ones(H))), "bias": RNG.standard_normal((N, N))},
    "bias of nothing": {"bias": np.float32(0.5) * np.ones(1)},
}
TURNS = (
    lambda x: np.asfortranarray(x),
    lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
)  # other layouts and strides of the same


def gradients(q: Any, k: Any, v: Any, dout: Any, rows: Any = ROWS, engine: str = "cpu", **options: Any) -> Differential:
    return regard.attention_vjp(q, k, v, dout, dlse=rows[0], dentropy=rows[1], engine=engine, **options)


def arrays(g: Differential) -> dict[str, Any]:
    """All gradients by name."""
    found = {name: getattr(g, name) for name in ("query", "key", "value", "bias", "sink")}
    found |= {f"table {n}": x for n, x in enumerate(g.tables.values())}
    return {name: x for name, x in found.items() if x is not None}


def bits(g: Differential) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in arrays(g).items()}


@pytest.fixture(params=OPTIONS)
def option(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


@pytest.fixture
def whole(option: dict[str, Any]) -> Differential:
    return gradients(Q, K, V, DO, **option)


def assert_near(got: Differential, expected: Differential) -> None:
    for name, x in arrays(expected).items():
        size = np.abs(x).max(initial=1e-30)
        np.testing.assert_allclose(arrays(got)[name] / size, x / size, rtol=0, atol=1e-5, err_msg=name)


def test_agrees_with_the_tiled_engine(option: dict[str, Any], whole: Differential) -> None:
    assert_near(whole, gradients(Q, K, V, DO, engine="tiled", **option))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("lead", [slice(0, 2), 1])
def test_any_number_of_threads(
    option: dict[str, Any], lead: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough key-value heads for all threads, or so few that each is divided."""
    part = [x[lead] for x in (Q, K, V, DO)], ROWS[:, lead]
    monkeypatch.setattr("regard.runtime.threads._chosen", 1)
    alone = bits(gradients(*part[0], part[1], **option))
    monkeypatch.setattr("regard.runtime.threads._chosen", threads)
    assert bits(gradients(*part[0], part[1], **option)) == alone


@pytest.mark.parametrize("heads", [1, H])
def test_few_heads_are_cut_for_many_threads(option: dict[str, Any], heads: int) -> None:
    """Every query block meets every tile once, in order, and enough tasks can run at the same time."""
    if heads == 1:
        option = {name: x for name, x in option.items() if name not in ("score", "bias", "sink")}
    q, k, v, dout = (x[0, : min(heads, len(x[0]))] for x in (Q, K, V, DO))
    p = problem_from(q, k, v, **option)
    outputs, ct = tiled.forward(p)[0], Outputs(dout, None, None)
    arrays = BackwardArrays(p, outputs, ct)
    spec = arrays.spec(chosen())
    chunks = backward_work.BackwardChunks(spec, p, arrays, arrays_of(p, arrays.own(p)), 2)
    for chunk in chunks:
        place = {task: n for n, task in enumerate(chunk.tasks)}
        assert all(place[other] < n for task, n in place.items() for other in task.before)
        for block, (begin, count) in enumerate(chunk.blocks[:, [chunks.field("tiles"), chunks.field("count")]]):
            tasks = [task for task in chunk.tasks if any(first <= block < stop for first, stop in task.work_groups)]
            tiles = (chunk.tiles[begin : begin + count] >> TILE_BITS).tolist()
            assert [t for task in tasks for t in tiles if task.tiles[0] <= t < task.tiles[1]] == tiles
            assert [task.tiles[0] == 0 for task in tasks] == [True] + [False] * (len(tasks) - 1)
        assert max(task.depth + 1 for task in chunk.tasks) < 0.6 * len(chunk.tasks)


@pytest.mark.parametrize("name", ["bias that the batch shares", "score", "score and shared bias"])
def test_units_that_add_to_the_same_numbers_follow_each_other(name: str) -> None:
    p = problem_from(Q, K.repeat(2, axis=1), V.repeat(2, axis=1), **OPTIONS[name])
    arrays = BackwardArrays(p, tiled.forward(p)[0], Outputs(DO, None, None))
    spec = arrays.spec(chosen())
    chunks = backward_work.BackwardChunks(spec, p, arrays, arrays_of(p, arrays.own(p)), 2)
    for chunk in chunks:
        above: dict[backward_work.Task, set[backward_work.Task]] = {}
        for task in chunk.tasks:
            above[task] = set(task.before).union(*(above[other] for other in task.before))
        sums = chunk.blocks[:, chunks.field("partial_sum")]
        if name == "bias that the batch shares":
            sums = chunk.blocks[:, chunks.field("head")] // p.group
        elif name == "score and shared bias":
            sums = np.zeros_like(sums)
        added = {task: set(sums[task.work_groups[:, 0]].tolist()) for task in chunk.tasks}
        for m, task in enumerate(chunk.tasks):
            for other in chunk.tasks[:m]:
                together = max(task.tiles[0], other.tiles[0]) < min(task.tiles[1], other.tiles[1])
                if together and added[task] & added[other]:
                    assert other in above[task]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", ["plain", "bias that the batch shares", "score", "score and shared bias"])
def test_tasks_do_not_grow_with_the_batch(name: str, threads: int) -> None:
    """Python handles each task, so a batch of many short sequences has few."""
    n = 8
    q, k, v, dout = (np.broadcast_to(x[:1, :, :n], (300, *x.shape[1:2], n, D)) for x in (Q, K, V, DO))
    option = {x: y[..., :n, :n] if x == "bias" else y for x, y in OPTIONS[name].items()}
    p = problem_from(q, k, v, **option)
    arrays = BackwardArrays(p, tiled.forward(p)[0], Outputs(dout, None, None))
    for chunk in backward_work.BackwardChunks(arrays.spec(chosen()), p, arrays, arrays_of(p, arrays.own(p)), threads):
        assert len(chunk.tasks) <= backward_work.TASKS * threads
        blocks = [m for task in chunk.tasks for first, stop in task.work_groups for m in range(first, stop)]
        assert sorted(blocks) == [*range(len(chunk.blocks))]


@pytest.mark.parametrize("rows", [slice(N - 1, N), slice(500, 503), slice(31, 150), slice(0, 699)])
def test_dq_does_not_depend_on_the_other_rows(option: dict[str, Any], whole: Differential, rows: slice) -> None:
    part = dict(option)
    if "bias" in option and option["bias"].shape[-2:-1] == (N,):
        part["bias"] = option["bias"][..., rows, :]
    got = gradients(Q[..., rows, :], K, V, DO[..., rows, :], ROWS[..., rows], **part, offset=rows.start)
    assert whole.query is not None
    assert got.query is not None
    assert got.query.tobytes() == whole.query[..., rows, :].tobytes()


def test_dq_does_not_depend_on_the_batch_or_the_group(option: dict[str, Any], whole: Differential) -> None:
    assert whole.query is not None
    alone = gradients(Q[1], K[1], V[1], DO[1], ROWS[:, 1], **option, origin=(1, 0, 0)).query
    assert alone is not None
    assert alone.tobytes() == whole.query[1].tobytes()
    k, v = (x.repeat(2, axis=1) for x in (K, V))
    repeated = gradients(Q, k, v, DO, **option).query
    assert repeated is not None
    assert repeated.tobytes() == whole.query.tobytes()


def test_layouts_and_strides_change_no_bit(option: dict[str, Any], whole: Differential) -> None:
    expected = bits(whole)
    for transpose in TURNS:
        assert bits(gradients(*(transpose(x) for x in (Q, K, V, DO)), **option)) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_what_is_hidden_may_hold_anything(dtype: Any) -> None:
    """Keys behind a mask, and rows that see nothing: no bit of the other gradients changes, and their own are 0."""
    n, hidden, blind = 150, 77, slice(100, 103)
    q, k, v, dout = (x[0, :, :n].astype(dtype) for x in (Q, K, V, DO))
    rows = ROWS[:, 0, :, :n].copy()
    mask = np.ones((n, n), bool)
    mask[:, hidden], mask[blind] = False, False
    rows[..., blind] = 0
    option = {
        "mask": mask,
        "score": regard.softcap(3.0),
        "bias": RNG.standard_normal((H, 1, n)),
        "dropout": 0.1,
        "seed": 1,
    }
    expected = gradients(q, k, v, dout, rows, **option)
    for x, at, value in ((k, hidden, np.nan), (v, hidden, np.inf), (q, blind, np.nan), (dout, blind, -np.inf)):
        x[:, at] = value
    got = gradients(q, k, v, dout, rows, **option)
    assert bits(got) == bits(expected)
    for name in ("key", "value"):
        assert (getattr(got, name)[:, hidden] == 0).all()
    assert got.query is not None
    assert (got.query[:, blind] == 0).all()


def test_what_is_visible_is_not_hidden() -> None:
    q, k, v, dout = (x[0, :, :60].copy() for x in (Q, K, V, DO))
    k[1, 30, 3] = np.nan
    g = gradients(q, k, v, dout, ROWS[:, 0, :, :60], causal=True)
    assert g.query is not None
    assert g.key is not None
    assert np.isnan(g.query[2:, 30:]).all()
    assert np.isfinite(g.query[2:, :30]).all()
    assert np.isfinite(g.query[:2]).all()
    assert np.isnan(g.key[1]).all()
    assert np.isfinite(g.key[0]).all()


@pytest.mark.parametrize(("case", "dtype"), by_turns(SOME, np.float32, np.float64, ml_dtypes.bfloat16), ids=str)
def test_every_instruction_set(forced: str, case: Case, dtype: Any) -> None:
    q, k, v, options = case.inputs(dtype)
    p, frame = problem_from(q, k, v, **options), Layout.of(q, options.get("layout", "bhnd"))
    rng = np.random.default_rng(1)
    dout, rows = rng.standard_normal(frame.out_shape(p)).astype(dtype), rng.standard_normal((2, *p.shape(p.n_q)))
    known = frame.outputs(tiled.jvp(p, Differential())[0])  # forward has tests of its own
    g = gradients(q, k, v, dout, rows, **options, outputs=known)
    turned = (frame.to_bhnd(getattr(g, name)) for name in ("query", "key", "value"))
    assert_gradients(p, Outputs(frame.to_bhnd(dout), *rows), Differential(*turned, g.bias, g.sink, g.tables))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_neon_compiles(dtype: Any) -> None:
    neon, case = targets()["neon"], next(case for case in CASES if case.name == "everything")
    q, k, v, options = case.inputs(dtype)
    p = problem_from(q, k, v, **options)
    outputs = tiled.jvp(p, Differential())[0]
    arrays = BackwardArrays(p, outputs, outputs)
    spec = arrays.spec(neon)
    assert cache.compile_object(arrays.source(spec, neon), neon, "neon")


def test_nothing_outside_is_touched(guarded: Any) -> None:
    (n_q, n_k, d, d_v), array = guarded.sizes, guarded.array
    q, k, v, dout = (
        array(2, n_q, d),
        array(2, n_k, d),
        array(2, n_k, d_v),
        array(2, n_q, d_v),
    )
    mask = guarded(RNG.random((n_q, n_k)) < 0.7)
    rows = array(2, 2, n_q, kind=q.dtype if q.dtype == np.float64 else np.float32)
    options = {
        "mask": mask,
        "bias": array(2, n_q, n_k, kind=np.float32),
        "sink": array(2, kind=np.float64),
    }
    known = tiled.jvp(problem_from(q, k, v, **options), Differential())[0]
    options["outputs"] = regard.Outputs(*(guarded(x) for x in known if x is not None))
    got, expected = (gradients(q, k, v, dout, rows, engine, **options) for engine in ("cpu", "tiled"))
    for name, x in arrays(expected).items():
        assert np.allclose(arrays(got)[name].astype(float), x.astype(float), rtol=0.02, atol=0.1), name


@pytest.mark.parametrize(("n_k", "origin"), [(272, 0), (272, 128), (272, 5), (267, 0)])
def test_sums_for_a_large_bias_go_past_the_caches(n_k: int, origin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, where rows are on cache lines; elsewhere they are stored as others are."""
    q, k, v, dout = (RNG.standard_normal((2, n, 8)).astype(np.float32) for n in (70, n_k, n_k, 70))
    p = problem_from(q, k, v, bias=RNG.standard_normal((2, 70, n_k)).astype(np.float32), origin=(0, 0, origin))
    outputs, ct, found = cpu.forward(p)[0], Outputs(dout, None, None), []
    for least in (backward_arrays.STREAMED, 0):
        monkeypatch.setattr(backward_arrays, "STREAMED", least)
        monkeypatch.setattr(work, "_schedules", {})
        assert BackwardArrays(p, outputs, ct).streams == (least == 0 and n_k % 16 == 0 and origin % 16 == 0)
        g = cpu.backward(p, outputs, ct).bias
        assert g is not None
        found.append(g.tobytes())
    assert found[0] == found[1]


HIDING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "keys to come": {"causal": True},
    "far keys": {"mask": regard.window(40, 30)},
    "keys behind an end": {"mask": regard.padding([130])},
    "far keys by score": {"score": regard.score(lambda s, b, h, i, j: regard.where(abs(i - j) < 50, s, -np.inf))},
}


@pytest.mark.parametrize("name", HIDING)
def test_the_gradient_of_a_bias_for_every_pair_is_whole(name: str) -> None:
    """Nothing of it stays as the memory was, hidden tiles neither."""
    q, k, v, dout = (RNG.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (300, 403, 403, 300))
    option = {"bias": RNG.standard_normal((2, 300, 403)).astype(np.float32), **HIDING[name]}
    got, expected = (regard.attention_vjp(q, k, v, dout, engine=engine, **option).bias for engine in ("cpu", "tiled"))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
