"""Functions of tensors that become rules in a graph: the ways in which people write them, against the eager call."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import regard
from regard.warning import RegardWarning, warn_once

D = torch.float64
RANDOM = torch.Generator().manual_seed(0)
B, H, N = 2, 3, 7
Q = torch.randn(B, H, N, 4, dtype=D, generator=RANDOM)
T = torch.tensor(0.7, dtype=D)
PER_HEAD = torch.rand(H, dtype=D, generator=RANDOM)
BIAS = torch.randn(H, N, N, dtype=D, generator=RANDOM)
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
SIGNS = regard.table(np.linspace(-1, 1, 2 * N - 1))
SCALE = torch.nn.Parameter(torch.tensor(1.3, dtype=D))
OFFSETS = torch.nn.Parameter(BIAS.flip(-1))
OUTSIDE = regard.table(OFFSETS)
Make = Callable[[Any], Any]


def alibi(slopes: Any) -> Any:
    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * abs(i - j)

    return score


def both(*masks: Any) -> Any:
    """A mask of several, in the way of FlexAttention's `and_masks`."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        result = i >= 0
        for part in masks:
            result = result & part(b, h, i, j)
        return result

    return mask


def scaled(t: Any, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * t


def of_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.tanh(s) * SCALE


class Learned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(T.clone())

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.x

    def forward(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.x * abs(i - j)


LEARNED = Learned()
SCORES: dict[str, tuple[Make, torch.Tensor]] = {
    "a learned temperature": (lambda t: lambda s, b, h, i, j: s * t + t, T),
    "the tensor first": (lambda t: lambda s, b, h, i, j: t - t * s / (t + abs(i - j)), T),
    "reflected operators": (lambda t: lambda s, b, h, i, j: (s - t) / t + (i < t) * (s // t + s % t), T),
    "tensors alone": (lambda t: lambda s, b, h, i, j: s * (2 * t).exp() + t.sin(), T),
    "methods": (lambda t: lambda s, b, h, i, j: t * (s / t).tanh().clamp(min=-0.5), T),
    "functions": (lambda t: lambda s, b, h, i, j: t * torch.tanh(torch.clamp(s / t, max=0.9)), T),
    "torch.where": (lambda t: lambda s, b, h, i, j: torch.where((i >= j) & (j > 1), s, s * t), T),
    "regard.where": (lambda t: lambda s, b, h, i, j: regard.where(i >= j, s, t), T),
    "casts": (lambda t: lambda s, b, h, i, j: s + t * ((i - j).float() + (i * j).astype(s.dtype)), T),
    "a partial": (lambda t: functools.partial(scaled, t), T),
    "a bound method": (lambda t: [LEARNED.score, functools.partial(scaled, t)], T),
    "a module": (lambda t: [LEARNED, functools.partial(scaled, t)], T),
    "a global parameter": (lambda t: [of_global, functools.partial(scaled, t)], T),
    "rules and functions": (
        lambda t: [lambda s, b, h, i, j: s * t, regard.softcap(5.0), alibi(regard.table(t[None]))],
        T,
    ),
    "a decorated function": (lambda t: regard.score(lambda s, b, h, i, j: s * t), T),
    "a table": (lambda x: lambda s, b, h, i, j: s + regard.table(x)[h, i, j], BIAS),
    "a table made outside": (lambda t: lambda s, b, h, i, j: s * t + OUTSIDE[h, i, j], T),
    "a table of an array": (lambda t: lambda s, b, h, i, j: s * t + SIGNS[i - j + 6], T),
    "NumPy's numbers": (lambda t: lambda s, b, h, i, j: s * t * np.float64(2.0) + np.pi, T),
    "NumPy's functions of numbers": (lambda t: [functools.partial(scaled, t), capped(3.0)], T),
}
INDEXED: dict[str, tuple[Make, torch.Tensor]] = {
    "an index": (alibi, PER_HEAD),
    "three indices": (lambda x: lambda s, b, h, i, j: s + x[h, i, j] * x[0, j, i], BIAS),
    "an index that is computed": (lambda x: lambda s, b, h, i, j: s + x[h, abs(i - j), 0].tanh(), BIAS),
}
MASKS: dict[str, Make] = {
    "documents": lambda ids: lambda b, h, i, j: ids[b, i] == ids[b, j],
    "masks of masks": lambda ids: both(lambda b, h, i, j: i >= j, lambda b, h, i, j: ids[b, i] == ids[b, j]),
    "masks combined": lambda ids: regard.mask(lambda b, h, i, j: ids[b, i] <= ids[b, j]) & regard.causal(),
}


def capped(cap: float) -> Any:
    return lambda s, b, h, i, j: cap * np.tanh(s / cap)


def derivatives(function: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The output, and the gradients of all that a score may read."""
    given = [Q.clone().requires_grad_(), x.clone().requires_grad_()]
    out = function(*given)
    trained = [*given, LEARNED.x, OFFSETS, SCALE]
    return [out, *torch.autograd.grad(out.square().sum(), trained, allow_unused=True)]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    assert found[2] is not None
    assert found[2].any()
    for x, y in zip(found, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **{"fullgraph": True} | options)


@pytest.mark.parametrize("name", [*SCORES, *INDEXED])
def test_a_score_reads_tensors(name: str) -> None:
    make, x = (SCORES | INDEXED)[name]

    def call(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=make(x))

    def by_table(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=make(regard.table(x) if name in INDEXED else x))

    assert_same(derivatives(compiled(call), x), derivatives(by_table, x))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_reads_tensors(name: str) -> None:
    """A graph that is compiled once serves other values."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def call(q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, mask=MASKS[name](ids))

    for ids in (IDS, IDS.flip(-1)):
        expected = regard.attention(Q, Q, Q, mask=MASKS[name](regard.table(ids)))
        assert torch.equal(call(Q, ids), expected)
    assert counter.frame_count == 1


def helper(s: Any, t: Any) -> Any:
    return np.tanh(s) * t


def test_what_dynamo_cannot_run_breaks_the_graph_with_one_warning() -> None:
    breaking: list[Make] = [
        lambda t: lambda s, b, h, i, j: helper(s, t),
        lambda t: lambda s, b, h, i, j: np.tanh(s) * t,
    ]
    for make in breaking:
        warn_once.cache_clear()

        def call(q: torch.Tensor, x: torch.Tensor, make: Make = make) -> torch.Tensor:
            return regard.attention(q, q, q, score=make(x))

        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            found = [derivatives(compiled(call, fullgraph=False), T) for _ in range(2)]
        assert_same(found[0], derivatives(call, T))
        assert_same(found[1], found[0])
        (one,) = [x for x in given if issubclass(x.category, RegardWarning)]
        assert "the score function '<lambda>' breaks the graph of torch.compile" in str(one.message)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            derivatives(compiled(call), T)


def test_an_error_of_a_function_is_that_of_the_eager_call() -> None:
    wrong: list[Make] = [
        lambda t: lambda s, b, h, i, j: s * t if i > j else s,
        lambda t: lambda s, b, h, i, j: s + BIAS,
        lambda t: lambda s, b, h, i, j: s.nothing(t),
    ]
    for make in wrong:

        def call(q: torch.Tensor, x: torch.Tensor, make: Make = make) -> torch.Tensor:
            return regard.attention(q, q, q, score=make(x))

        with pytest.raises((TypeError, AttributeError)) as error:
            call(Q, T)
        with pytest.raises(Exception) as again:  # noqa: PT011
            compiled(call, fullgraph=False)(Q, T)
        assert str(error.value) in str(again.value)
