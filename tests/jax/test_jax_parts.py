"""Every case in steps on several ranks, as devices compute them, without XLA: the bits of one call."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regard
from regard.bench.cases import CASES, Case

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

from regard.jax import adapter, parts, spreading
from regard.jax.spreading import GRADIENTS, Ranks
from regard.jax.task import PrimitiveTask, SequenceStep, run

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]


def call_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[PrimitiveTask, Arrays]:
    """The task of a case, and its operands."""
    caught: list[Any] = []

    def catch(task: PrimitiveTask, operands: Any) -> Any:
        caught.append((task, [np.asarray(x) for x in operands]))
        raise InterruptedError

    q, k, v, options = case.inputs(np.float32)
    monkeypatch.setattr(adapter, "bind", catch)
    with pytest.raises(InterruptedError):
        regard.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), **options)
    ((task, operands),) = caught
    return task, task.named(operands)


def whole(task: PrimitiveTask, x: Arrays) -> Arrays:
    """The results of a task in one call, into arrays of NaN."""
    results = empty(task, x)
    run(task, list(x.values()), list(results.values()))
    return results


def empty(task: PrimitiveTask, x: Arrays) -> Arrays:
    shapes = task.shapes({name: (a.shape, a.dtype) for name, a in x.items()})
    return {name: np.full(shape, np.nan, dtype) for name, (shape, dtype) in zip(task.results, shapes, strict=True)}


def shard(task: PrimitiveTask, name: str, x: Array, rows: slice) -> Array:
    dim = spreading.dim_of(task, name, x)
    return np.ascontiguousarray(np.moveaxis(np.moveaxis(x, dim, 0)[rows], 0, dim))


def one_rank(task: PrimitiveTask, x: Arrays, ranks: Ranks, rank: int, gradients: str, passing: list[str]) -> Arrays:
    """The results of a rank, which is sent rows of the whole arrays."""
    mine = {}
    for name, a in x.items():
        if spreading.sequence_dim(task, name, a.ndim) is None:
            mine[name] = a
            continue
        n = a.shape[spreading.dim_of(task, name, a)] // ranks.count
        mine[name] = shard(task, name, a, slice(rank * n, (rank + 1) * n))
    sums: Arrays = {}
    passes = ranks.passes(gradients)
    for n, rows in enumerate(passes):
        given = {name: shard(task, name, x[name], slice(rows.start, rows.stop)) for name in passing}
        step = SequenceStep(ranks.rows, ranks.keys, rows.start, rows.stop, n == 0, n == len(passes) - 1, gradients)
        operands = {**mine, **given, "rank": np.array(rank, np.int32), **sums}
        stepped = replace(task, step=step, operands=tuple(operands), axes=((),) * len(operands))
        carried = parts.carried(stepped, {name: (a.shape, a.dtype) for name, a in operands.items()})
        stepped = replace(stepped, step=replace(step, sums=tuple(carried)))
        results = {parts.SUM + name: sums.get(parts.SUM + name, np.empty(*y)) for name, y in carried.items()}
        results |= {"turn": np.empty((), np.int32)} | (empty(task, mine) if step.last else {})
        parts.run(stepped, list(operands.values()), list(results.values()))
        sums = {name: a for name, a in results.items() if name.startswith(parts.SUM)}
    return {name: results[name] for name in task.results}


def spread(task: PrimitiveTask, x: Arrays, count: int, gradients: str, passing: list[str]) -> Arrays:
    """The results of `count` ranks, joined; those without a sequence are summed."""
    ranks = Ranks.of(task, x["query"].shape, x["key"].shape, ("s",), count)
    every = [one_rank(task, x, ranks, rank, gradients, passing) for rank in range(count)]
    joined = {}
    for name in task.results:
        each = [y[name] for y in every]
        dim = spreading.sequence_dim(task, name, each[0].ndim)
        joined[name] = sum(each) if dim is None else np.concatenate(each, dim)
    return joined


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    task, x = call_of(case, monkeypatch)
    lengths = [x[name].shape[spreading.dim_of(task, name, x[name])] for name in ("query", "key")]
    if not min(lengths):
        pytest.skip("no sequence")
    count = next((n for n in range(2, 100) if not any(size % n for size in lengths)), 1)
    observe = tuple(y for y in task.call.observe if y[0] in spreading.STATISTICS)
    task = replace(task, call=replace(task.call, observe=observe))
    outputs = whole(task, x)
    same(spread(task, x, count, "", ["key", "value"]), outputs)
    rng = np.random.default_rng(0)
    ct = {
        f"ct.{name}": rng.standard_normal(outputs[name].shape).astype(outputs[name].dtype) for name in task.call.outputs
    }
    known = {**x, **{name: outputs[name] for name in task.call.outputs}, **ct}
    for gradients, names in GRADIENTS.items():
        wrt = tuple((name, ()) for name in task.call.differentiable if name in names)
        back = replace(task, kind="backward", operands=tuple(known), axes=((),) * len(known), wrt=wrt)
        passing = ["key", "value"] if gradients == "query" else spreading.row_names(back, known)
        expected, found = whole(back, known), spread(back, known, count, gradients, passing)
        if "sink" in expected:
            np.testing.assert_allclose(found.pop("sink"), expected.pop("sink"), rtol=1e-4, atol=1e-5)
        same(found, expected)


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert x.dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], x, name)
