"""PyTorch's function with PyTorch's conventions, against PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import regard.torch
from regard.ops import callcache
from regard.torch import scaled_dot_product_attention as ours
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")
ON_CPU = pytest.mark.engine("cpu")

THEIRS = F.scaled_dot_product_attention


def activated(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's function while regard is active in its place."""
    with regard.torch.activate():
        return THEIRS(*args, **kwargs)


both = pytest.mark.parametrize("ours", [ours, activated], ids=["ours", "activated"])


def normal(*shape: int, dtype: Any = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype)


def dead() -> torch.Tensor:
    keep = torch.rand(5, 6) < 0.6
    keep[2] = False
    return keep


Q, K, V = (2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)
CASES: dict[str, tuple[tuple[Any, Any, Any], Callable[[], dict[str, Any]]]] = {
    "plain": ((Q, K, V), dict),
    "batch, n, d": (((7, 5, 8), (7, 6, 8), (7, 6, 3)), dict),
    "matrices": (((5, 8), (6, 8), (6, 3)), dict),
    "five dimensions": (((2, 3, 4, 5, 8), (1, 3, 4, 6, 8), (2, 1, 4, 6, 3)), dict),
    "causal from the top left, more keys": ((Q, K, V), lambda: {"is_causal": True}),
    "causal, fewer keys": ((Q, (2, 4, 3, 8), (2, 4, 3, 3)), lambda: {"is_causal": True}),
    "scale": ((Q, K, V), lambda: {"scale": 0.3}),
    "booleans, rows that see nothing": ((Q, K, V), lambda: {"attn_mask": dead()}),
    "booleans for each batch": ((Q, K, V), lambda: {"attn_mask": torch.rand(2, 1, 1, 6) < 0.7}),
    "floats": ((Q, K, V), lambda: {"attn_mask": normal(4, 5, 6)}),
    "floats of 32 bits": ((Q, K, V), lambda: {"attn_mask": normal(5, 6, dtype=torch.float32)}),
    "floats that hide, rows that see nothing": (
        (Q, K, V), lambda: {"attn_mask": torch.zeros(5, 6).double().masked_fill(~dead(), -torch.inf)},
    ),
    "grouped heads": ((Q, (2, 2, 6, 8), (2, 2, 6, 3)), lambda: {"enable_gqa": True}),
    "grouped unevenly": ((Q, (2, 2, 6, 8), (2, 1, 6, 3)), lambda: {"enable_gqa": True}),
    "heads that broadcast": ((Q, (2, 1, 6, 8), (2, 1, 6, 3)), dict),
    "one query head": (((2, 1, 5, 8), K, V), dict),
    "one value head": ((Q, K, (2, 1, 6, 3)), dict),
    "ranks that differ": ((Q, (4, 6, 8), (6, 3)), dict),
    "no keys": ((Q, (2, 4, 0, 8), (2, 4, 0, 3)), dict),
    "all is dropped": ((Q, K, V), lambda: {"dropout_p": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("name", on_cpu(CASES, "floats"))
@both
def test_the_same_as_pytorch(name: str, ours: Any) -> None:
    shapes, options = CASES[name]
    q, k, v = (normal(*shape).requires_grad_() for shape in shapes)
    given = options()
    trained = [q, k, v]
    if "attn_mask" in given and given["attn_mask"].is_floating_point() and name.startswith("floats of") is False:
        trained.append(given["attn_mask"].requires_grad_())
    out, expected = ours(q, k, v, **given), THEIRS(q, k, v, **given)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(x, trained, dout) for x in (out, expected))
    for got, x in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, x)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "both masks": lambda f: f(normal(4, 5, 8), normal(4, 6, 8), normal(4, 6, 8), dead(), 0.0, True),
    "integers as the mask": lambda f: f(normal(4, 5, 8), normal(4, 6, 8), normal(4, 6, 8), dead().int()),
    "dtypes": lambda f: f(normal(4, 5, 8), normal(4, 6, 8).float(), normal(4, 6, 8)),
    "integers": lambda f: f(*(normal(4, 5, 8).long() for _ in range(3))),
    "vectors": lambda f: f(normal(8), normal(8), normal(8)),
    "heads that do not broadcast": lambda f: f(normal(4, 5, 8), normal(2, 6, 8), normal(2, 6, 8)),
    "heads that do not divide": lambda f: f(normal(3, 5, 8), normal(2, 6, 8), normal(2, 6, 8), enable_gqa=True),
    "features": lambda f: f(normal(4, 5, 8), normal(4, 6, 7), normal(4, 6, 8)),
    "a mask that is larger": lambda f: f(
        normal(1, 4, 5, 8), normal(1, 4, 6, 8), normal(1, 4, 6, 8), dead().expand(3, 1, 5, 6)
    ),
    "dropout": lambda f: f(normal(4, 5, 8), normal(4, 6, 8), normal(4, 6, 8), dropout_p=1.1),
}


@pytest.mark.parametrize("name", REFUSED)
@both
def test_pytorchs_errors(name: str, ours: Any) -> None:
    for function in (THEIRS, ours):
        with pytest.raises(RuntimeError):
            REFUSED[name](function)


@both
def test_what_is_hidden_does_not_reach_the_output(ours: Any) -> None:
    """The one difference: PyTorch's result is NaN here, for one query or for all."""
    q, k, v = normal(4, 5, 8), normal(4, 5, 8), normal(4, 5, 8)
    k[:, 4] = v[:, 4] = torch.nan
    assert THEIRS(q, k, v, is_causal=True)[:, :4].isnan().any()
    assert not ours(q, k, v, is_causal=True)[:, :4].isnan().any()


@both
def test_dropout_follows_the_generator(ours: Any) -> None:
    q = normal(4, 50, 8)
    torch.manual_seed(0)
    first = ours(q, q, torch.ones_like(q), dropout_p=0.25)
    torch.manual_seed(0)
    assert torch.equal(first, ours(q, q, torch.ones_like(q), dropout_p=0.25))
    assert abs(first.mean() - 1) < 0.05
    assert first.std() > 0.01


class Seen(Exception):
    pass


def test_models_call_ours_inside_of_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x, padding = normal(2, 7, 16, dtype=torch.float32), torch.arange(7) >= torch.tensor([[5], [7]])
    before = F.scaled_dot_product_attention
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(regard.torch.dropins.functional, "scaled_dot_product_attention", counted)
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            expected = model(x, src_key_padding_mask=padding)
            calls.clear()
            with regard.torch.sdpa():
                torch.testing.assert_close(model(x, src_key_padding_mask=padding)[1], expected[1])
            assert len(calls) == 1
    assert F.scaled_dot_product_attention is before


def test_the_context_nests_and_is_undone() -> None:
    before, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()

    def nested() -> None:
        with regard.torch.sdpa():
            with regard.torch.sdpa():
                assert F.scaled_dot_product_attention is ours
            assert F.scaled_dot_product_attention is ours
            raise Seen

    with pytest.raises(Seen):
        nested()
    assert F.scaled_dot_product_attention is before
    assert torch.backends.mha.get_fastpath_enabled() == fast


WRONG: dict[str, tuple[Any, ...]] = {
    "query": (None, 1.0, [1.0], np.zeros((2, 4, 5, 8)), "x"),
    "key": (None, 1.0, np.zeros((2, 4, 6, 8))),
    "value": (None, 1.0, np.zeros((2, 4, 6, 3))),
    "attn_mask": (1.0, True, np.ones((5, 6), bool), "causal", [[True]]),
    "dropout_p": (None, "x", 1j, torch.tensor([0.0]), torch.tensor(0.0, requires_grad=True)),
    "is_causal": (None, 1, 0, "x", 1.0, np.bool_(True), torch.tensor(True)),
    "scale": ("x", 1j, torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True)),
    "enable_gqa": (None, 1, 0, "x", 1.0, np.bool_(True), torch.tensor(True)),
}


@pytest.mark.parametrize("name", WRONG)
@both
def test_what_is_of_another_type_is_a_type_error(name: str, ours: Any) -> None:
    for wrong in WRONG[name]:
        given = {"query": normal(*Q), "key": normal(*K), "value": normal(*V), name: wrong}
        expected = {"dropout_p": "float", "scale": "float", "is_causal": "bool", "enable_gqa": "bool"}.get(
            name, "Tensor"
        )
        for function in (THEIRS, ours):
            kind = f"(numpy.|torch.)?{type(wrong).__name__}"
            message = rf"^scaled_dot_product_attention\(\): argument '{name}' must be {expected}, not {kind}$"
            with pytest.raises(TypeError, match=message):
                function(**given)


@pytest.mark.parametrize("x", [1, True, np.float32(0.5), np.float64(0.5), np.int64(1), torch.tensor(0.5)], ids=str)
@both
def test_numbers_are_those_that_pytorch_takes(x: Any, ours: Any) -> None:
    q = normal(*Q)
    torch.testing.assert_close(ours(q, q, q, scale=x), THEIRS(q, q, q, scale=x))
    if x in (0, 1):
        torch.testing.assert_close(ours(q, q, q, dropout_p=x), THEIRS(q, q, q, dropout_p=x))


@both
def test_a_number_that_is_no_float(ours: Any) -> None:
    for function in (THEIRS, ours):
        with pytest.raises(OverflowError):
            function(*(normal(*Q),) * 3, scale=10**400)


@both
@ON_CPU
def test_a_call_that_is_kept_serves_no_other(ours: Any) -> None:
    """Calls of few queries are looked up by their form before anything is checked."""
    q = normal(2, 8, 1, 16)
    for n in (5, 9, 5, 9):
        k, v = normal(2, 8, n, 16), normal(2, 8, n, 16)
        for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"scale": 0.0}, {"is_causal": True, "scale": 0.3}):
            for _ in range(2):
                torch.testing.assert_close(ours(q, k, v, **options), THEIRS(q, k, v, **options))
    k, v = normal(2, 2, 9, 16), normal(2, 2, 9, 16)
    expected = THEIRS(q, k, v, enable_gqa=True)
    for _ in range(2):
        torch.testing.assert_close(regard.attention(q, k, v), expected)
        torch.testing.assert_close(ours(q, k, v, enable_gqa=True), expected)
        with pytest.raises(RuntimeError, match="heads"):
            ours(q, k, v)
    k, v = normal(8, 16), normal(8, 16)  # of one head, with as many numbers as keys of the steps above
    torch.testing.assert_close(ours(q[0], k, v), THEIRS(q[0], k, v))
    k, v = normal(2, 8, 9, 16), normal(2, 8, 9, 16)
    assert ours(q, k, v).grad_fn is None
    assert ours(q, k.clone().requires_grad_(), v).grad_fn is not None
    with pytest.raises(TypeError):
        ours(q, k, v, is_causal=1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        assert torch.autograd.forward_ad.unpack_dual(ours(dual, k, v)).tangent is not None


@both
def test_operands_of_several_dtypes_under_autocast(ours: Any) -> None:
    q, k, v = normal(*Q).float(), normal(*K).bfloat16(), normal(*V).half()
    mask = normal(5, 6).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, out = THEIRS(q, k, v, mask), ours(q, k, v, mask)
    assert out.dtype is torch.bfloat16
    given = [x.bfloat16().double() for x in (q, k, v, mask)]
    exact = THEIRS(*given)
    given[2] = given[2].abs()
    bound = 2 * (expected - exact).norm() + torch.finfo(out.dtype).eps * THEIRS(*given).norm()
    assert (out - exact).norm() <= bound
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        ours(q, k, v)


BIASES = [causal_upper_left, causal_lower_right]


@pytest.mark.parametrize("make", BIASES)
@pytest.mark.parametrize("n_k", [3, 9])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_bias(make: Any, n_k: int, compiled: bool) -> None:
    q, k, v = normal(2, 4, 5, 8).requires_grad_(), normal(2, 4, n_k, 8), normal(2, 4, n_k, 3)
    bias = make(5, n_k)
    found = ours
    if compiled:
        torch._dynamo.reset()
        found = torch.compile(ours, fullgraph=True, backend="eager", dynamic=True)
    out, expected = found(q, k, v, bias), THEIRS(q, k, v, bias)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))
    with regard.torch.sdpa():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)


def test_causal_bias_reads_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalBias, "_materialize", None)
    ours(normal(*Q), normal(*K), normal(*V), causal_lower_right(5, 6))


def test_causal_bias_that_does_not_fit() -> None:
    q, k = normal(2, 4, 5, 8), normal(2, 4, 6, 8)
    for function in (THEIRS, ours):
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            function(q, k, k, causal_lower_right(5, 6), 0.0, True)
        with pytest.raises(RuntimeError):
            function(q, k, k, causal_lower_right(5, 7))
    with pytest.raises(RuntimeError, match="attn_mask is a CausalBias of 5 queries and 7 keys, but got 5 and 6"):
        ours(q, k, k, causal_lower_right(5, 7))


class Own:
    """An argument that says itself what the function makes of it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function, types, args, kwargs


def test_arguments_with_a_torch_function_of_their_own() -> None:
    q, own = normal(*Q), Own()
    assert THEIRS(q, own, q, is_causal=True)[1:] == ((Own,), (q, own, q), {"is_causal": True})
    assert ours(q, own, q, is_causal=True) == (ours, (Own,), (q, own, q), {"is_causal": True})
    assert ours(q, q, q, own, scale=2.0) == (ours, (Own,), (q, q, q), {"attn_mask": own, "scale": 2.0})


class Log(TorchFunctionMode):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [None, causal_lower_right(5, 6)], ids=["none", "bias"])
def test_a_mode_sees_one_function(bias: Any) -> None:
    q, k, v = normal(*Q), normal(*K), normal(*V)
    with Log() as log:
        out = ours(q, k, v, bias)
    assert log.seen == [ours]
    assert torch.equal(out, ours(q, k, v, bias))
    with regard.torch.sdpa(), Log() as log:
        F.scaled_dot_product_attention(q, k, v, bias)
    assert log.seen == [ours]


def test_symbolic_trace_sees_one_function() -> None:
    graph = torch.fx.symbolic_trace(lambda q, k: ours(q, k, k, enable_gqa=True))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [ours]
    q, k = normal(*Q), normal(2, 2, 6, 8)
    assert torch.equal(graph(q, k), ours(q, k, k, enable_gqa=True))


class Named(torch.Tensor):
    """A subclass that changes no operation."""


def test_a_subclass_without_operations_of_its_own() -> None:
    leaf = normal(*Q).as_subclass(Named).requires_grad_()
    for function in (THEIRS, ours):
        out = function(leaf, normal(*K), normal(*V))
        assert type(out) is Named
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        assert gradient.abs().sum() > 0
    torch.testing.assert_close(ours(leaf, leaf, leaf), THEIRS(leaf, leaf, leaf))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(leaf.detach(), leaf.detach(), leaf.detach()), THEIRS(leaf, leaf, leaf).detach())


@pytest.mark.parametrize("heads", [[(4, 2, 2), (6, 3, 3)], [(4, 2, 1), (12, 4, 6)]])
def test_grouped_heads_under_dynamic_shapes(heads: list[tuple[int, int, int]]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    for n, (h, h_k, h_v) in enumerate(heads, 4):
        q = normal(2, h, n, 8).requires_grad_()
        k, v = normal(2, h_k, n + 1, 8), normal(2, h_v, n + 1, 3)
        out, expected = compiled(q, k, v, enable_gqa=True), THEIRS(q, k, v, enable_gqa=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))


class Scripted(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def scripted(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_torchscript_is_refused_and_works_afterwards() -> None:
    what = [
        (Scripted(), normal(2, 4, 5, 8).float()),
        (scripted, normal(2, 4, 5, 8).float()),
        (torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), normal(5, 2, 8).float()),
    ]
    message = (
        r"^TorchScript cannot compile regard\.torch\.scaled_dot_product_attention: use torch\.compile or "
        r"torch\.export, or script outside of `with regard\.torch\.sdpa\(\)` and `regard\.torch\.activate\(\)`$"
    )
    with regard.torch.sdpa():
        for module, _ in what:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=message):
                    torch.jit.script(module)
    with pytest.raises(RuntimeError, match=message):
        torch.jit.script(ours)
    for module, x in what:
        torch.testing.assert_close(torch.jit.script(module)(x), module(x))


@both
@ON_CPU
def test_a_cached_call_of_grouped_heads_needs_enable_gqa(ours: Any) -> None:
    """The drop-in shares the store with `regard.attention`, which groups heads without being asked."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    for _ in range(2):
        regard.attention(q, k, k)
    with pytest.raises(RuntimeError):
        ours(q, k, k)
    out = ours(q, k, k, enable_gqa=True)
    assert torch.equal(out, regard.attention(q, k, k))
    assert len([x for x in callcache.entries().values() if x.fields is None]) == 1  # of tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@both
@ON_CPU
def test_a_dense_mask_or_bias_of_other_contents(dtype: torch.dtype, ours: Any) -> None:
    """Calls with dense operands are cached by shape and strides, never by contents."""
    q, k, v = (torch.randn(*shape, dtype=dtype) for shape in (Q, K, V))
    options: dict[str, Callable[[], torch.Tensor]] = {
        "booleans": lambda: torch.rand(5, 6) < 0.6,
        "of each batch": lambda: torch.rand(2, 1, 1, 6) < 0.6,
        "expanded": lambda: (torch.rand(1, 6) < 0.6).expand(5, 6),
        "bias": lambda: torch.randn(4, 5, 6, dtype=dtype),
        "strided bias": lambda: torch.randn(4, 6, 5, dtype=dtype).mT,
    }
    for make in options.values():
        for _ in range(3):
            x = make()
            name = "mask" if x.dtype is torch.bool else "bias"
            expected = regard.attention(q, k, v, engine="cpu", **{name: x})
            assert torch.equal(regard.attention(q, k, v, **{name: x}), expected)
            assert torch.equal(ours(q, k, v, attn_mask=x), expected)


@ON_CPU
def test_a_cached_bias_still_has_a_gradient() -> None:
    q, k, v = normal(*Q), normal(*K), normal(*V)
    bias, mask = normal(4, 5, 6), dead()
    for _ in range(2):
        ours(q, k, v, attn_mask=bias)
        both = regard.attention(q, k, v, bias=bias, mask=mask)
    torch.testing.assert_close(both, THEIRS(q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf)))
    bias.requires_grad_()
    (ours(q, k, v, attn_mask=bias)).sum().backward()
    given = bias.grad
    bias.grad = None
    THEIRS(q, k, v, attn_mask=bias).sum().backward()
    torch.testing.assert_close(given, bias.grad)
    masks = torch.stack([mask, ~mask])
    found = torch.func.vmap(lambda m: ours(q, k, v, attn_mask=m))(masks)
    assert torch.equal(found[0], ours(q, k, v, attn_mask=mask))
    signatures = [x for key, x in callcache.entries().items() if x.fields is None and type(key[0]) is tuple]
    assert [x.call is not None for x in signatures] == [True, True, True]
