"""Rules made of tensors: what they keep of them, and PyTorch's functions inside of rules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
import regard.torch
from dense import attention, same

pytestmark = pytest.mark.engine("tiled")


@pytest.fixture
def operands() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.engine("cpu")
def test_a_mask_stays_what_it_was_when_its_tensor_changes(operands: tuple[torch.Tensor, ...]) -> None:
    for dtype in (torch.bool, torch.int64):
        flags = torch.ones(8, 8).tril().to(dtype)
        rules = regard.mask(flags), regard.causal() | flags, flags & regard.window(3)
        seen = regard.mass(flags)
        before = [regard.attention(*operands, mask=rule) for rule in rules]
        _, mass = regard.attention(*operands, observe=[seen])
        flags.fill_(1)
        flags[:, 1:] = 0
        for rule, out in zip(rules, before, strict=True):
            assert torch.equal(regard.attention(*operands, mask=rule), out)
        assert torch.equal(regard.attention(*operands, observe=[seen])[1][seen], mass[seen])
        # A call reads the tensor that it is given: every query sees the first key alone.
        out = regard.attention(*operands, mask=flags)
        assert torch.equal(out, operands[2][:, :1].expand_as(out))


def test_a_mask_of_a_module_stays_what_it_was() -> None:
    flags = torch.ones(8, 8, dtype=torch.bool).tril()
    module, x = regard.torch.MultiHeadAttention(8, 2, mask=flags), torch.randn(1, 8, 8)
    before = module(x)
    flags.fill_(True)
    assert torch.equal(module(x), before)


def test_a_mask_in_a_graph_stays_what_it_was(operands: tuple[torch.Tensor, ...]) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flags: torch.Tensor) -> torch.Tensor:
        rule = regard.mask(flags)
        flags.fill_(True)
        return regard.attention(q, k, v, mask=rule)

    flags = torch.ones(8, 8, dtype=torch.bool).tril()
    expected = regard.attention(*operands, mask=flags)
    assert torch.equal(call(*operands, flags.clone()), expected)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands, flags.clone()), expected)


def test_arrays_of_other_libraries_are_named(operands: tuple[torch.Tensor, ...]) -> None:
    cupy = type("ndarray", (), {"__module__": "cupy", "ndim": 3})()
    text = "must be a torch.Tensor where others of the call are, got cupy.ndarray; arrays of CuPy are not served: "
    for name, call in (
        ("key", lambda: regard.attention(operands[0], cupy, operands[2])),
        ("bias", lambda: regard.attention(*operands, bias=cupy)),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == f"{name} {text}convert them with cupy.asnumpy"


PARAMETER = torch.nn.Parameter(torch.tensor(0.7))


def distance(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """i - j (n_q, n_k)."""
    return torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])


# A rule as PyTorch's users write it, of the score and of i - j, on traced values and on tensors.
HABITS: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda s, d: torch.where(d > 2, s, -1.0),
    "where of both": lambda s, d: torch.where(condition=d > 2, input=s, other=torch.zeros_like(s)),
    "tanh": lambda s, d: 20 * torch.tanh(s / 20),
    "exp": lambda s, d: s + torch.exp(-0.1 * d.abs()),
    "abs": lambda s, d: s - d.abs() * 0.1,
    "torch.abs": lambda s, d: s - 0.1 * torch.abs(d),
    "float": lambda s, d: s - d.float() / 3,
    "to": lambda s, d: s + d.to(torch.float32) / 4,
    "to, by another's dtype": lambda s, d: s + d.to(s.dtype),
    "to, with a device": lambda s, d: s + d.to("cpu", torch.float32, non_blocking=True),
    "long": lambda s, d: s + (d / 2).long(),
    "bool": lambda s, d: s + (d % 2).bool().float(),
    "clamp": lambda s, d: s + d.clamp(min=-1, max=2),
    "torch.clamp": lambda s, d: torch.clamp(s, -0.5, 0.5),
    "div": lambda s, d: s + torch.div(d, 2, rounding_mode="floor"),
    "div, to zero": lambda s, d: s + torch.div(d, 2, rounding_mode="trunc") + torch.div(s, -0.5, rounding_mode="trunc"),
    "relu": lambda s, d: torch.relu(s),
    "functional relu": lambda s, d: torch.nn.functional.relu(s),
    "sigmoid": lambda s, d: torch.sigmoid(s) + s.sigmoid(),
    "logical": lambda s, d: torch.where(torch.logical_and(d >= 0, torch.logical_not(d > 3)), s, 0.5 * s),
    "masked_fill": lambda s, d: s.masked_fill(d < 0, float("-inf")),
    "max": lambda s, d: torch.max(s, 0.1 * s) if isinstance(s, torch.Tensor) else torch.maximum(s, 0.1 * s),
    "pow": lambda s, d: s.pow(2) + torch.square(s) + torch.pow(s, 3),
    "rsqrt": lambda s, d: s * torch.rsqrt(1.0 + d * d),
    "round": lambda s, d: s + torch.round(d / 4),
    "log": lambda s, d: s - torch.log(1 + d.abs()) + torch.log1p(d.abs()),
    "eq": lambda s, d: s + d.eq(1).float() + torch.ne(d, 2).float(),
    "masks": lambda s, d: s + ((d > 0) & ~(d > 3) | (d == -1)).to(torch.float32),
}


@pytest.mark.parametrize("name", HABITS)
def test_functions_of_pytorch_mean_in_rules_what_they_mean(name: str, operands: tuple[torch.Tensor, ...]) -> None:
    habit = HABITS[name]
    q, k, v = (x.clone().requires_grad_() for x in operands)
    out = regard.attention(q, k, v, score=lambda s, b, h, i, j: habit(s, i - j))
    expected = attention(q, k, v, score=lambda s: habit(s, distance(q, k)))[0]
    same(out, expected, [q, k, v], rtol=1e-4, atol=1e-5)


NUMBERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "s * p": lambda s, d, p: s * p,
    "p * s": lambda s, d, p: p * s,
    "p - s": lambda s, d, p: p - s,
    "s / p": lambda s, d, p: s / p,
    "p / s": lambda s, d, p: s + p / (1.0 + d * d),
    "p + d": lambda s, d, p: s + (p + d) * (d - p),
    "cap": lambda s, d, p: p * torch.tanh(s / p),
    "exp": lambda s, d, p: s - torch.exp(p * -d.abs()),
    "where": lambda s, d, p: torch.where(d > 1, s, p),
    "maximum": lambda s, d, p: torch.maximum(s, p * s),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_parameter_without_axes_is_a_number_that_trains(name: str, operands: tuple[torch.Tensor, ...]) -> None:
    rule = NUMBERS[name]
    q, k, v = (x.double() for x in operands)
    p = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    made = regard.score(lambda s, b, h, i, j: rule(s, i - j, p))

    def outs() -> tuple[torch.Tensor, torch.Tensor]:
        theirs = attention(q, k, v, score=lambda s: rule(s, distance(q, k), p))[0]
        return regard.attention(q, k, v, score=made), theirs

    for _ in range(2):  # again with another value, which the same rule follows
        ours, theirs = outs()
        torch.testing.assert_close(ours, theirs)
        found, expected = (torch.autograd.grad(x.square().sum(), p, create_graph=True)[0] for x in (ours, theirs))
        assert found.shape == ()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, p)[0], torch.autograd.grad(expected, p)[0])
        with torch.no_grad():
            p.fill_(1.3)


def test_integers_without_axes_are_read_once(operands: tuple[torch.Tensor, ...]) -> None:
    width = torch.tensor(3)
    for rule in (regard.mask(lambda b, h, i, j: i - j < width), regard.mask(lambda b, h, i, j: width > i - j)):
        expected = regard.attention(*operands, mask=lambda b, h, i, j: i - j < 3)
        assert torch.equal(regard.attention(*operands, mask=rule), expected)
        width.fill_(1)
        assert torch.equal(regard.attention(*operands, mask=rule), expected)
        width.fill_(3)


def test_what_a_rule_cannot_use_says_so(operands: tuple[torch.Tensor, ...]) -> None:
    bias = torch.ones(8)
    for rule, text in (
        (lambda s, b, h, i, j: s + bias, "arrays and lists cannot be used in a rule directly; use regard.table(array)"),
        (lambda s, b, h, i, j: torch.cumsum(s, 0), "torch.cumsum is not available in a rule; available: abs, absolute"),
        (
            lambda s, b, h, i, j: torch.div(i, 2, rounding_mode="ceil"),
            "rounding_mode of torch.div must be None, 'floor' or",
        ),
        (lambda s, b, h, i, j: s.to(torch.complex64).numpy(), "a traced value has no 'numpy': use operators, and func"),
    ):
        with pytest.raises((TypeError, AttributeError)) as raised:
            regard.attention(*operands, score=rule)
        assert str(raised.value).startswith(text)


def test_a_function_that_reads_a_parameter_has_its_gradient_inside_of_a_graph(
    operands: tuple[torch.Tensor, ...],
) -> None:
    def call(*x: torch.Tensor) -> Any:
        return regard.attention(*x, score=lambda s, b, h, i, j: s * PARAMETER)

    rule = regard.score(lambda s, b, h, i, j: s * PARAMETER)
    expected = torch.autograd.grad(call(*operands).square().sum(), PARAMETER)[0]
    for function in (call, lambda *x: regard.attention(*x, score=rule)):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(*operands).square().sum(), PARAMETER)[0], expected)


def test_tables_of_tensors_raise_where_they_are_left(operands: tuple[torch.Tensor, ...]) -> None:
    weight = torch.nn.Parameter(torch.rand(2, 8))
    table = regard.table(weight, bounds="raise")

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, i - j]

    out = regard.attention(*operands, score=rule, causal=True)
    expected = regard.attention(*operands, score=lambda s, b, h, i, j: s + regard.table(weight)[h, i - j], causal=True)
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.square().sum(), weight)[0].any()
    for options in ({}, {"causal": True, "offset": 1}, {"mask": torch.ones(8, 8, dtype=torch.bool)}):
        with pytest.raises(ValueError, match=r"which looks up .* with bounds='raise': axis 1 is read at"):
            regard.attention(*operands, score=rule, **options)  # type: ignore[arg-type]
    regard.attention(*operands, score=rule, mask=torch.ones(8, 8, dtype=torch.bool).tril())
    ids = regard.table(torch.arange(8), bounds="raise")
    with pytest.raises(ValueError, match=r"mask\(.*\), which looks up .* axis 0 is read at 8, outside of 0 to 7"):
        regard.attention(*operands, mask=lambda b, h, i, j: ids[j + 1] > 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_with_an_entry_for_each_query(operands: tuple[torch.Tensor, ...], compiled: bool) -> None:
    q, k, v = operands
    rows = torch.rand(5)

    def here(bounds: Any) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + regard.table(rows, bounds=bounds)[i]

    def call(score: Any, **options: Any) -> torch.Tensor:
        torch.compiler.reset()  # each call is another graph of the same function
        function = lambda q: regard.attention(q, k, v, score=score, **options)  # noqa: E731
        return (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(q[..., :5, :])

    numpy = regard.table(rows.numpy())
    for rule in (
        lambda s, b, h, i, j: s + rows[i], here(None), regard.score(here(None)),
        regard.score(lambda s, b, h, i, j: s + numpy[i]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="has an entry for each of the 5 rows: give offset=0"):
            call(rule)
        call(rule, offset=0)
    clipped = call(regard.score(lambda s, b, h, i, j: s + regard.table(rows)[i.clamp(0, 4)]))
    for rule in (here("clamp"), regard.score(here("clamp"))):
        assert torch.equal(call(rule), clipped)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_that_is_longer_than_a_whole_call(operands: tuple[torch.Tensor, ...], compiled: bool) -> None:
    lengths, slopes = torch.tensor([4, 6, 5, 5, 5]), torch.rand(9)
    by_head = regard.table(slopes)

    def call(rules: Any, **options: Any) -> torch.Tensor:
        function = lambda *xs: regard.attention(*xs, **rules, **options)  # noqa: E731
        return (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*operands)

    for rules in (
        {"mask": regard.padding(lengths)}, {"score": regard.alibi(slopes)},
        {"score": lambda s, b, h, i, j: s * slopes[h]}, {"score": regard.score(lambda s, b, h, i, j: s * by_head[h])},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"but this call ends at .*, and no origin= places it in a larger one"):
            call(rules)
        call(rules, origin=(0, 0, 0))


def test_tables_that_raise_are_refused_inside_of_a_graph(operands: tuple[torch.Tensor, ...]) -> None:
    weight = torch.rand(2, 8)
    rule = regard.score(lambda s, b, h, i, j: s + regard.table(weight, bounds="raise")[h, j])
    with pytest.raises(Exception, match="bounds='raise' of a table is not checked inside of a graph"):
        torch.compile(lambda *x: regard.attention(*x, score=rule), fullgraph=True, backend="aot_eager")(*operands)
    with pytest.raises(Exception, match="bounds='raise' is not checked inside of a graph"):
        torch.compile(lambda x: regard.table(x, bounds="raise") + 1, fullgraph=True, backend="aot_eager")(weight)
