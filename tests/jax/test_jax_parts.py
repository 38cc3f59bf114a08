"""Every case in steps on several ranks, as devices compute them, without XLA: the bits of one call."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regard
from cases import CASES, Case

pytest.importorskip("jax.numpy", reason="jax is not installed: pip install 'regard[jax]'")

import jax.numpy as jnp

from regard.jax import adapter, parts, spreading
from regard.jax.spreading import Ranks
from regard.jax.task import PrimitiveTask, SequenceStep, run
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

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


def steps_of(
    task: PrimitiveTask, x: Arrays, ranks: Ranks, rank: int, gradients: str
) -> tuple[PrimitiveTask, Arrays, Arrays]:
    """The task and operands of a rank, which is sent rows of the whole arrays, and the results of its last step."""
    mine = {"rank": np.array(rank, np.int32)}
    for name, a in x.items():
        mine[name] = a
        if spreading.sequence_dim(task, name, a.ndim) is not None:
            n = a.shape[spreading.dim_of(task, name, a)] // ranks.count
            mine[name] = shard(task, name, a, slice(rank * n, (rank + 1) * n))
    results: Arrays = {}
    passes = ranks.passes(gradients)
    for n, rows in enumerate(passes):
        names = spreading.passing(task, x, gradients)
        given = {name: shard(task, name, x[name], slice(rows.start, rows.stop)) for name in names}
        last = n == len(passes) - 1
        step = SequenceStep(ranks.rows, ranks.keys, rows.start, rows.stop, n == 0, last, gradients)
        sums = {name: a for name, a in results.items() if name.startswith(parts.SUM)}
        results = ran(task, step, {**mine, **given}, sums, with_sequence(task) if last else ())
    return task, mine, results


def ran(task: PrimitiveTask, step: SequenceStep, x: Arrays, sums: Arrays, returns: tuple[str, ...]) -> Arrays:
    """The results of a step, into arrays of NaN or the sums of the step before."""
    types = {name: (a.shape, a.dtype) for name, a in x.items()}
    shapes = dict(zip(task.results, task.shapes(types), strict=True))
    stepped = replace(spreading.over(task, {**x, **sums}, task.kind), step=step)
    carried = parts.carried(stepped, types)
    stepped = replace(stepped, step=replace(step, sums=tuple(carried), returns=returns))
    results = {parts.SUM + name: sums.get(parts.SUM + name, np.empty(*y)) for name, y in carried.items()}
    results |= {"turn": np.empty((), np.int32)}
    results |= {name: np.full(shapes[name][0], np.nan, shapes[name][1]) for name in returns}
    parts.run(stepped, [*x.values(), *sums.values()], list(results.values()))
    return results


def with_sequence(task: PrimitiveTask) -> tuple[str, ...]:
    return tuple(name for name in task.results if spreading.sequence_dim(task, name, 3) is not None)


def spread(task: PrimitiveTask, x: Arrays, count: int, gradients: str) -> Arrays:
    """The results of `count` ranks, joined; those without a sequence are added."""
    ranks = Ranks.of(task, x["query"].shape, x["key"].shape, ("s",), count)
    every = [steps_of(task, x, ranks, rank, gradients) for rank in range(count)]
    joined = {}
    for name in with_sequence(task):
        each = [results[name] for _, _, results in every]
        dim = spreading.sequence_dim(task, name, each[0].ndim)
        assert dim is not None
        joined[name] = np.concatenate(each, dim)
    names = tuple(name for name in task.results if name not in joined)
    if names:
        sums = [{parts.SUM + name: results[parts.SUM + name] for name in names} for _, _, results in every]
        every_sum = {name: gathered(name, x, [own[name] for own in sums]) for name in sums[0]}
        step = SequenceStep(ranks.rows, ranks.keys, 0, 0, True, True, "whole")
        for (_, mine, _), own in zip(every, sums, strict=True):
            given = {name: own[name] if a is None else a for name, a in every_sum.items()}
            found = ran(task, step, mine, given, names)
            joined |= {name: joined.get(name, 0) + found[name] for name in names}
    return joined


def gathered(name: str, x: Arrays, each: list[Array]) -> Array | None:
    """The sums of all ranks, as `Ranks.gathered` has them; None if they stay where they are."""
    name = name.removeprefix(parts.SUM)
    if ".table" in name:
        return np.stack(each)
    rows, keys = (1, 1, *x[name].shape)[-2:]
    if name == "bias" and rows != 1 != keys:
        return None
    return np.concatenate(each, -2 if name == "bias" and keys == 1 else -1)


def drawn(like: Arrays, prefix: str, seed: int, names: tuple[str, ...]) -> Arrays:
    """Tangents or cotangents of the arrays of these names."""
    rng = np.random.default_rng(seed)
    return {prefix + name: rng.standard_normal(like[name].shape).astype(like[name].dtype) for name in names}


@pytest.mark.parametrize("case", on_cpu(CASES, CASES[-1]), ids=str)
def test_every_case(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, its tangent, gradients and their tangents."""
    task, x = call_of(case, monkeypatch)
    lengths = [x[name].shape[spreading.dim_of(task, name, x[name])] for name in ("query", "key")]
    if not min(lengths):
        pytest.skip("no sequence")
    count = next((n for n in range(2, 100) if not any(size % n for size in lengths)), 1)
    observe = tuple(y for y in task.call.observe if y[0] in spreading.STATISTICS)
    task = replace(task, call=replace(task.call, observe=observe))
    outputs = whole(task, x)
    same(spread(task, x, count, ""), outputs)
    names, call = task.call.outputs, task.call
    known = {**x, **{name: outputs[name] for name in names}}
    t = drawn(x, "t.", 1, call.differentiable)
    moving = spreading.over(task, known | t, "jvp")
    d = whole(moving, known | t)
    same(spread(moving, known | t, count, ""), d)
    ct, d_ct = drawn(outputs, "ct.", 2, names), drawn(outputs, "t.ct.", 3, names)
    for kind, more in (("backward", ct), ("backward_jvp", {**ct, **t, **d_ct})):
        given = {**known, **more}
        along = {f"t.{name}": d[name] for name in names} if kind == "backward_jvp" else {}
        for gradients in ("query", "key"):
            wrt = tuple(
                (name, ()) for name in call.differentiable if spreading.pass_of(task, name, x[name].shape) == gradients
            )
            if not wrt:
                continue
            back = replace(spreading.over(task, given, kind), wrt=wrt)
            moved = spreading.over(back, {**given, **along}, kind)
            expected, found = whole(back, given), spread(moved, {**given, **along}, count, gradients)
            for name in [name for name in expected if ".table" in name]:
                size = np.abs(expected[name]).max(initial=1)
                np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-4, atol=1e-5 * size)
            same(found, expected)


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert x.dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], x, name)
