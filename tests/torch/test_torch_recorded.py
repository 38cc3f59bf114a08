"""Functions of tensors that become rules in a graph: the ways in which people write them, against the eager call."""

import functools
import operator
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import regard
from regard.torch.compiled import opcodes
from regard.warning import RegardWarning, warn_once
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

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
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


@pytest.mark.parametrize("name", on_cpu([*SCORES, *INDEXED], "a table"))
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


def forgetting(q: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Forgetting Transformer: the log-gates between a key and its query (Lin et al. 2025)."""
    sums = regard.table(torch.nn.functional.logsigmoid(gates).cumsum(-1))
    return regard.attention(q, q, q, score=lambda s, b, h, i, j: s + sums[b, h, i] - sums[b, h, j], causal=True)


def disentangled(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """DeBERTa: content to position, and position to content (He et al. 2021)."""
    c2p = regard.table(torch.einsum("bhnd,rd->bhnr", q, x))
    p2c = regard.table(torch.einsum("bhnd,rd->bhnr", 2 * q, x.flip(0)))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (s + c2p[b, h, i, i - j + N - 1] + p2c[b, h, j, j - i + N - 1]) / 3**0.5

    return regard.attention(q, q, q, score=score)


def decomposed(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """SAM: relative positions of rows and columns of an image, 3 wide (Li et al. 2022)."""
    rows, columns = (regard.table(torch.einsum("bhnd,rd->bhnr", q, part)) for part in (x[:3], x[3:6]))
    return regard.attention(q, q, q, score=lambda s, b, h, i, j: s + rows[b, h, i, j // 3] + columns[b, h, i, j % 3])


PUBLISHED: dict[str, tuple[Function, torch.Tensor]] = {
    "Forgetting Transformer": (forgetting, torch.randn(B, H, N, dtype=D, generator=RANDOM)),
    "DeBERTa": (disentangled, torch.randn(2 * N - 1, 4, dtype=D, generator=RANDOM)),
    "SAM": (decomposed, torch.randn(6, 4, dtype=D, generator=RANDOM)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_make_tables_in_the_graph(name: str) -> None:
    function, x = PUBLISHED[name]
    assert_same(derivatives(compiled(function), x), derivatives(function, x))


def test_changing_sizes_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        last = bias.shape[-1] - 1
        near = regard.mask(lambda b, h, i, j: (i - j) * 2 <= 7)
        return regard.attention(q, q, q, score=lambda s, b, h, i, j: s + regard.table(bias)[h, i, j] * last, mask=near)

    run = torch.compile(call, fullgraph=True, backend=counter)
    for n in (7, 9, 12):
        q, bias = torch.randn(1, H, n, 4), torch.randn(H, n, n)
        for x, axes in ((q, (2,)), (bias, (1, 2))):
            for axis in axes:
                torch._dynamo.mark_dynamic(x, axis)
        torch.testing.assert_close(run(q, bias), call(q, bias))
    assert counter.frame_count == 1


def test_an_index_is_compared_with_a_changing_number() -> None:
    """Dynamo itself takes ``index == symbol`` for False: the graph breaks."""
    torch._dynamo.reset()

    def call(q: torch.Tensor, n: int) -> torch.Tensor:
        return regard.attention(q, q, q, mask=lambda b, h, i, j: (i - j < n) | (j == n))

    run = torch.compile(call, dynamic=True, backend="eager")
    for n in (2, 3, 5):
        assert torch.equal(run(Q, n), call(Q, n))


def equal(a: Any, b: Any) -> Any:
    return a == b


def every(*parts: Any) -> Any:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        visible = parts[0](b, h, i, j)
        for part in parts[1:]:
            visible = visible & part(b, h, i, j)
        return visible

    return mask


def assigned(n: Any) -> Any:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        other = n
        return j == other

    return mask


COMPARED: dict[str, Make] = {
    "an assigned variable": assigned,
    "a helper": lambda n: lambda b, h, i, j: equal(j, n),
    "the operator": lambda n: lambda b, h, i, j: operator.eq(j, n),
    "a helper in a function of functions": lambda n: every(lambda b, h, i, j: equal(j, n)),
}


@pytest.mark.filterwarnings("ignore:the mask function:regard.RegardWarning")
@pytest.mark.parametrize("name", COMPARED)
def test_a_helper_compares_an_index_with_a_changing_number(name: str) -> None:
    torch._dynamo.reset()

    def call(q: torch.Tensor, n: int) -> torch.Tensor:
        return regard.attention(q, q, q, mask=COMPARED[name](n))

    run = torch.compile(call, dynamic=True, backend="eager")
    for n in (2, 3):
        assert torch.equal(run(Q, n), call(Q, n))


def test_a_mask_of_numbers_may_be_inverted() -> None:
    width = 3
    run = compiled(lambda q: regard.attention(q, q, q, mask=lambda b, h, i, j: ~(i - j > width) & (i >= j)))
    assert torch.equal(run(Q), regard.attention(Q, Q, Q, causal=True, mask=regard.window(3)))


OTHER: Any = None  # a module, a helper or a table of these functions, which are not called
BYTECODE: list[tuple[Any, bool, bool]] = [
    (lambda b, h, i, j: i == j, False, False),
    (lambda b, h, i, j: (i - j) * 2 <= 7, False, False),
    (lambda b, h, i, j: OTHER[b, i] == OTHER[b, j], False, False),
    (lambda s, b, h, i, j: s.tanh() * OTHER, False, False),
    (lambda s, b, h, i, j: torch.tanh(s) + OTHER.tanh(*s), False, False),
    (lambda s, b, h, i, j: abs(s) * np.pi, False, False),
    (lambda s, b, h, i, j: np.tanh(s), True, False),
    (lambda b, h, i, j: ~(i > j), True, False),
    (lambda b, h, i, j: i - j == 0, False, True),
    (lambda b, h, i, j: i < N, False, True),
    (lambda b, h, i, j: equal(i, j), False, True),
    (lambda b, h, i, j: operator.eq(i, j), False, True),
    (lambda b, h, i, j: (lambda x: x == OTHER)(i), False, True),
    (lambda b, h, i, j: [x(i) for x in OTHER], False, True),
    (assigned(N), False, True),
]


@pytest.mark.parametrize(("function", "unrecordable", "compares"), BYTECODE)
def test_bytecode_is_read(function: Any, unrecordable: bool, compares: bool) -> None:
    assert opcodes.calls_numpy_or_inverts(function.__code__) == unrecordable
    assert opcodes.compares_others(function.__code__) == compares


def test_bytecode_of_another_version_of_cpython_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of tensors break the graph; functions of numbers, and rules made outside, do not."""
    monkeypatch.setattr(opcodes, "version", lambda: (3, 99))
    warn_once.cache_clear()
    outside = regard.score(alibi(regard.table(PER_HEAD)))

    def whole(q: torch.Tensor, width: int) -> torch.Tensor:
        return regard.attention(q, q, q, mask=lambda b, h, i, j: i - j <= width, score=outside)

    assert torch.equal(compiled(whole)(Q, 3), whole(Q, 3))

    def broken(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=scaled_by(x))

    def scaled_by(x: torch.Tensor) -> Any:
        return lambda s, b, h, i, j: s * x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(broken)(Q, T)
    with pytest.warns(RegardWarning, match=r"breaks the graph of torch[.]compile: .* bytecode of CPython 3[.]99"):
        derived = derivatives(compiled(broken, fullgraph=False), T)
    assert_same(derived, derivatives(broken, T))


COUNTS = torch.arange(Q.shape[-2])


@pytest.mark.filterwarnings("ignore:the score function:regard.RegardWarning")
def test_integers_that_a_function_of_numpy_reads_are_current() -> None:
    """They are a constant of a rule, so a graph must not hold the rule."""

    def call(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=lambda s, b, h, i, j: np.tanh(s) * COUNTS[j])

    run = torch.compile(call, backend="eager")
    for _ in range(2):
        assert torch.equal(run(Q), call(Q))
        COUNTS.neg_()


@pytest.mark.parametrize("make", [lambda c: lambda s, *_: s * c, capped], ids=["recorded", "NumPy"])
def test_a_function_as_an_argument_has_its_own_number(make: Make) -> None:
    def call(q: torch.Tensor, score: Any) -> torch.Tensor:
        return regard.attention(q, q, q, score=score)

    run = compiled(call)
    for cap in (1.0, 2.0, 3.0):
        assert torch.equal(run(Q, make(cap)), call(Q, make(cap)))


NEW: dict[str, Callable[[torch.Tensor], Any]] = {
    "of a tensor": regard.documents,
    "of an array": lambda ids: regard.documents(ids.numpy()) & regard.causal(),
    "of a dense array": lambda ids: regard.causal() & (ids[:, None, None] > 0).numpy(),
    "of a function": lambda ids: regard.mask(lambda b, h, i, j: regard.table(ids)[b, i] >= 1),
}


@pytest.mark.parametrize("name", NEW)
def test_a_new_rule_each_batch_compiles_once(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: torch.Tensor, mask: Any) -> torch.Tensor:
        return regard.attention(q, q, q, mask=mask)

    run = torch.compile(call, fullgraph=True, backend=counter)
    for seed in range(12):
        mask = NEW[name](torch.randint(0, 3, (B, N), generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(run(Q, mask), call(Q, mask))
    assert counter.frame_count == 1


class Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = torch.nn.Parameter(T.clone())

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=lambda s, b, h, i, j: s * self.t + self.t)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # of strict export
@pytest.mark.parametrize("strict", [False, True])
def test_a_function_of_a_parameter_is_exported(strict: bool) -> None:
    model = Exported()
    program = torch.export.export(model, (Q,), strict=strict).module()
    expected = torch.autograd.grad(model(Q).square().sum(), model.t)[0]
    assert expected.any()
    torch.testing.assert_close(torch.autograd.grad(program(Q).square().sum(), list(program.parameters()))[0], expected)


def test_autocast_leaves_the_tensors_of_a_function() -> None:
    def call(q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return regard.attention(q, q, q, score=lambda s, b, h, i, j: s * t)

    found = compiled(call)(Q.float(), T.float())
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, call(Q.float(), T.float()))
