"""Modes, traces and transforms of PyTorch see one operation, in forward and in every derivative."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize, grad, hessian, jacfwd, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import dense
import regard
import regard.torch
from regard.torch.call import text as texts

GENERATOR = torch.Generator().manual_seed(0)
# On the engine without kernels to compile, but for the plain call: what is tried here is how PyTorch is told of calls.
MODES = ["real", "fake", "symbolic"]
pytestmark = [pytest.mark.engine("tiled"), pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


QUERY, OTHER, SLOPES, BIAS = normal(2, 3, 5, 4), normal(2, 3, 5, 4), normal(3), normal(3, 5, 5)
KEEP = (torch.rand(2, 1, 5, 5, generator=GENERATOR) < 0.7).numpy()
Function = Callable[..., torch.Tensor]


def plain(q: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return regard.attention(q, q, q * slopes.sum(), causal=True) + bias.sum()


def masked(q: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mask = regard.mask(bias > -0.5) & regard.window(3) | regard.mask(KEEP)
    return regard.attention(q, q.cos(), q * slopes.sum(), mask=mask, engine="tiled")


def scored(q: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    score = [regard.alibi(slopes), regard.softcap(3.0)]
    out, seen = regard.attention(
        q, q.cos(), q, score=score, bias=bias, sink=slopes, observe=["entropy"], engine="tiled"
    )
    return out + seen.entropy[..., None]


def dropped(q: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return regard.attention(q, q.cos(), q, score=regard.alibi(slopes), bias=bias, dropout=0.4, seed=3, engine="tiled")


def weighed(q: torch.Tensor, slopes: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    q = q.transpose(1, 2)
    out, weights = regard.attention(q, q.cos(), q, bias=bias, return_weights=True, layout="bnhd", engine="tiled")
    return out.sum(-1).transpose(1, 2) + (weights * slopes[:, None, None]).square().sum(-1)


FUNCTIONS: dict[str, Function] = {f.__name__: f for f in (plain, masked, scored, dropped, weighed)}
INPUTS = (QUERY, SLOPES, BIAS)
OTHERS = (OTHER, normal(3), normal(3, 5, 5))
parametrize = pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)


def gradients(f: Function, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a loss, in every input."""
    xs = tuple(x.detach().requires_grad_() for x in xs)
    found = torch.autograd.grad(f(*xs).square().sum(), xs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True))


def second(f: Function, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of a penalty on the gradients."""
    xs = tuple(x.detach().requires_grad_() for x in xs)
    first = torch.autograd.grad(f(*xs).square().sum(), xs, create_graph=True, allow_unused=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in first if g is not None), xs, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(xs, found, strict=True))


def assert_close(found: Any, expected: Any, some: bool = True) -> None:
    torch.testing.assert_close(found, expected)
    if some:  # zeros would say nothing
        assert all(x.any() for x in (expected if isinstance(expected, tuple) else (expected,)))


@parametrize
def test_linearize(f: Function) -> None:
    tangents = tuple(x.cos() for x in INPUTS)
    expected, moved = jvp(f, INPUTS, tangents)
    out, linear = linearize(f, *INPUTS)
    assert_close(out, expected)
    assert_close(linear(*tangents), moved)
    assert_close(linear(*(2 * x for x in tangents)), 2 * moved)


def test_weights_differentiate_in_both_layouts() -> None:
    def weights(q: torch.Tensor, layout: Any) -> torch.Tensor:
        x = q.transpose(1, 2) if layout == "bnhd" else q
        return regard.attention(x, x.cos(), x, return_weights=True, layout=layout, engine="tiled")[1].square()

    def naive(q: torch.Tensor) -> torch.Tensor:
        return dense.scores(q, q.cos()).softmax(-1).square()

    reference = grad(lambda q: naive(q).sum())(QUERY)
    for layout in ("bhnd", "bnhd"):
        assert_close(weights(QUERY, layout), naive(QUERY))
        assert_close(grad(lambda q, layout=layout: weights(q, layout).sum())(QUERY), reference)
        assert_close(
            jvp(lambda q, layout=layout: weights(q, layout).sum(), (QUERY,), (OTHER,))[1], (reference * OTHER).sum()
        )


def test_linearize_of_transforms() -> None:
    def loss(q: torch.Tensor) -> torch.Tensor:
        return scored(q, SLOPES, BIAS).square().sum()

    def returned(q: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = vjp(loss, q)[1](torch.ones((), dtype=q.dtype))[0]
        return gradient

    x = QUERY.clone().requires_grad_()
    (through,) = torch.autograd.grad((returned(x) * OTHER).sum(), x)
    assert_close(through, jvp(grad(loss), (QUERY,), (OTHER,))[1])  # the Hessian is symmetric
    for f in (grad(loss), vmap(lambda q: plain(q, SLOPES, BIAS)), returned):
        assert_close(linearize(f, QUERY)[1](OTHER), jvp(f, (QUERY,), (OTHER,))[1])


@pytest.mark.parametrize("mode", MODES)
@parametrize
def test_make_fx(f: Function, mode: str) -> None:
    """The graph computes with what it is given, and not with what it was traced with."""
    graph = make_fx(f, tracing_mode=mode)(*INPUTS)
    names = [str(node.target) for node in graph.graph.nodes if "regard" in str(node.target)]
    assert names == ["regard.attention.default"] * (2 if f is weighed else 1)
    assert_close(graph(*OTHERS), f(*OTHERS))
    if f is not masked:
        assert_close(gradients(graph, *OTHERS), gradients(f, *OTHERS), f is not weighed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("derivative", [gradients, second])
def test_make_fx_of_derivatives(derivative: Any, mode: str) -> None:
    graph = make_fx(lambda *xs: derivative(scored, *xs), tracing_mode=mode)(*INPUTS)
    assert_close(graph(*OTHERS), derivative(scored, *OTHERS))


TRANSFORMS: dict[str, Any] = {
    "jvp": lambda f: lambda q: jvp(f, (q,), (q.cos(),))[1],
    "vmap": lambda f: vmap(f),
    "grad": lambda f: grad(lambda q: f(q).square().sum()),
    "per example": lambda f: vmap(grad(lambda q: f(q).square().sum())),
    "hessian": lambda f: hessian(lambda q: f(q[None]).square().sum()),
    "forward over forward": lambda f: jacfwd(jacfwd(lambda q: f(q[None]).square().sum())),
}


TWICE = ("hessian", "forward over forward")
SMALL = QUERY[0, :1, :3]  # so that all pairs of directions are few


def scored_alone(q: torch.Tensor) -> torch.Tensor:
    return regard.attention(q, q.cos(), q, score=regard.softcap(3.0), mask=regard.window(2), engine="tiled")


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_make_fx_of_transforms(name: str, mode: str) -> None:
    f = TRANSFORMS[name](scored_alone)
    given, other = (SMALL, SMALL.cos()) if name in TWICE else (QUERY, OTHER)
    assert_close(make_fx(f, tracing_mode=mode, _allow_non_fake_inputs=True)(given)(other), f(other))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functionalize(name: str) -> None:
    given = SMALL if name in TWICE else QUERY
    expected = TRANSFORMS[name](scored_alone)(given)
    assert_close(functionalize(TRANSFORMS[name](scored_alone))(given), expected)
    assert_close(TRANSFORMS[name](functionalize(scored_alone))(given), expected)
    assert_close(make_fx(functionalize(TRANSFORMS[name](scored_alone)))(given)(given), expected)


@pytest.mark.engine("cpu")
def test_symbolic_sizes() -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, offset=q.shape[-2] - 3, causal=True, score=regard.alibi(SLOPES))

    graph = make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(QUERY)
    longer = normal(2, 3, 11, 4)
    assert_close(graph(longer), f(longer))
    matrix = make_fx(lambda q: regard.attention(q, q, q), tracing_mode="symbolic")(QUERY[0, 0])
    assert_close(matrix(longer[0, 0]), regard.attention(longer[0, 0], longer[0, 0], longer[0, 0]))

    def merged(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return regard.merge((a, a[..., 0]), (b, b[..., 0]))[0]

    assert_close(
        make_fx(merged, tracing_mode="symbolic")(QUERY, OTHER)(longer, longer.cos()), merged(longer, longer.cos())
    )


@parametrize
def test_jit_trace(f: Function) -> None:
    traced = torch.jit.trace(f, INPUTS)
    assert "regard::attention" in str(traced.graph)
    assert_close(traced(*OTHERS), f(*OTHERS))
    if f is not masked:
        assert_close(gradients(traced, *OTHERS), gradients(f, *OTHERS), f is not weighed)


def test_jit_trace_refuses_gradients_inside() -> None:
    with pytest.raises(NotImplementedError, match=r"torch.jit.trace holds no derivatives: trace the function"):
        torch.jit.trace(lambda *xs: gradients(scored, *xs), INPUTS, check_trace=False)


@pytest.mark.parametrize("trace", ["make_fx", "jit"])
def test_dropout_draws_in_a_graph(trace: str) -> None:
    def f(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, dropout=0.5)

    graph = make_fx(f)(QUERY) if trace == "make_fx" else torch.jit.trace(f, (QUERY,), check_trace=False)
    assert not torch.equal(graph(QUERY), graph(QUERY))


def test_values_are_not_read_while_a_graph_is_traced() -> None:
    ids, ends = torch.arange(5) // 2, torch.tensor([0, 2, 3])
    calls: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda q: regard.attention(q, q, q, mask=regard.documents(ids)), "documents"),
        (lambda q: regard.weights(q, q), "query has no values that can be read while it is transformed or traced"),
        (lambda q: regard.torch.varlen_attention(q[0], q[0], q[0], ends),
         "cu_seqlens_q has no values that can be read while it is transformed or traced"),
    ]  # fmt: skip
    for f, message in calls:
        f(QUERY)
        with pytest.raises((TypeError, NotImplementedError), match=message):
            make_fx(f)(QUERY)
        with pytest.raises((TypeError, NotImplementedError), match=message):
            torch.jit.trace(f, (QUERY,))


class Seen(TorchDispatchMode):
    """Names of the operations of this package that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "regard":
            self.names.append(function.__name__.removesuffix(".default"))
        return function(*args, **(kwargs or {}))


@parametrize
def test_dispatch_modes_see_one_operation(f: Function) -> None:
    expected = gradients(f, *INPUTS) if f is not masked else f(*INPUTS)
    with Seen() as seen:
        found = gradients(f, *INPUTS) if f is not masked else f(*INPUTS)
    assert_close(found, expected, False)
    calls = 2 if f is weighed else 1
    assert seen.names == ["attention"] * calls + ["attention_backward"] * (calls if f is not masked else 0)


def test_dispatch_modes_see_second_derivatives() -> None:
    with Seen() as seen:
        second(scored, *INPUTS)
        jacfwd(jacfwd(lambda q: scored_alone(q[None]).sum()))(QUERY[0, :, :2])
    assert set(seen.names) == {
        "attention", "attention_backward", "attention_tangent", "attention_backward_tangent",
        "attention_tangent_tangent",
    }  # fmt: skip


class Called(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_function_modes_see_one_operation() -> None:
    regard.attention(QUERY, QUERY, QUERY)
    with Called() as called:
        regard.attention(QUERY, QUERY, QUERY)
        regard.torch.scaled_dot_product_attention(QUERY, QUERY, QUERY)
    assert called.functions.count(torch.ops.regard.attention.default) == 1
    assert called.functions.count(regard.torch.scaled_dot_product_attention) == 1


def test_steps_and_modules_are_seen() -> None:
    layer = regard.torch.MultiHeadAttention(8, 2, causal=True, positions="rope", num_kv_heads=1).requires_grad_(False)
    x = torch.randn(2, 4, 8, generator=GENERATOR)
    padding = torch.arange(4) < torch.tensor([[4], [2]])

    def decoded(x: torch.Tensor) -> torch.Tensor:
        cache = regard.torch.KVCache()
        return torch.cat([layer(x[:, n : n + 1], cache=cache) for n in range(4)], 1)

    with torch.no_grad():
        decoded(x)
        for f in (decoded, lambda x: layer(x, key_padding_mask=padding)):
            graph = make_fx(f)(x)
            assert_close(graph(x.cos()), f(x.cos()))
            assert_close(torch.jit.trace(f, (x,))(x.cos()), f(x.cos()))
        other = ~padding.flip(1)
        graph = make_fx(lambda x, padding: layer(x, key_padding_mask=padding))(x, padding)
        assert_close(graph(x, other), layer(x, key_padding_mask=other))


def test_fake_tensors_and_meta_tensors_have_shapes() -> None:
    def f(q: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        observe = ["entropy", "received", regard.top(2), regard.mass(regard.causal())]
        out, weights, seen = regard.attention(
            q, q, q, bias=bias, mask=regard.window(2), dropout=0.1, return_weights=True, observe=observe, engine="tiled"
        )
        top = seen[regard.top(2)]
        return out, weights, seen.entropy, seen.received, top.values, top.indices, seen[observe[-1]]

    expected = f(QUERY, BIAS)
    meta = f(QUERY.to("meta").requires_grad_(), BIAS.to("meta"))
    meta[0].sum().backward()
    with FakeTensorMode() as mode:
        found = f(mode.from_tensor(QUERY), mode.from_tensor(BIAS))
        with pytest.raises(ValueError, match=r"bias must align right to \(..., h, n_q, n_k\) = \(2, 3, 5, 5\)"):
            f(torch.empty(2, 3, 5, 4), torch.empty(3, 6, 5))
    for x, y, z in zip(expected, found, meta, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()) == (z.shape, z.dtype, z.stride())
        assert (y.device.type, z.device.type) == ("cpu", "meta")


@parametrize
def test_aot_function(f: Function) -> None:
    graphs: list[Any] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return nop(graph, inputs)

    compiled = aot_function(f, compiler)
    for xs in (INPUTS, OTHERS):
        assert_close(gradients(compiled, *xs), gradients(f, *xs), False)
    names = [[str(n.target) for n in graph.graph.nodes if "regard" in str(n.target)] for graph in graphs]
    calls = 2 if f is weighed else 1
    assert names == [["regard.attention.default"] * calls, ["regard.attention_backward.default"] * calls]


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it does itself
def test_compiled_autograd() -> None:
    expected = gradients(scored, *INPUTS)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        xs = [x.clone().requires_grad_() for x in INPUTS]
        scored(*xs).square().sum().backward()
    assert_close(tuple(x.grad for x in xs), expected)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_flops_are_counted_as_of_pytorch(kind: str) -> None:
    q, k, v = (
        torch.randn(shape, device=kind, requires_grad=True) for shape in ((2, 6, 7, 4), (2, 3, 9, 4), (2, 3, 9, 5))
    )
    shapes = q.shape, k.shape, v.shape
    for layout in ("bhnd", "bnhd"):
        given = [x.transpose(1, 2) if layout == "bnhd" else x for x in (q, k, v)]
        with FlopCounterMode(display=False) as counter:
            out = regard.attention(*given, causal=True, layout=layout)
        assert counter.get_total_flops() == sdpa_flop_count(*shapes)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == sdpa_backward_flop_count((2, 6, 7, 5), *shapes)


COUNT = """
import torch, regard
from torch.utils.flop_counter import FlopCounterMode
q, counter = torch.randn(1, 2, 3, 4), FlopCounterMode(display=False)
with counter:
    regard.attention(q, q, q)
assert counter.get_total_flops() == 2 * 2 * 2 * 3 * 3 * 4, counter.get_total_flops()
"""


def test_a_counter_that_was_there_first_counts() -> None:
    subprocess.run([sys.executable, "-c", COUNT], check=True)


def test_the_default_device_is_not_that_of_results() -> None:
    half = QUERY.half()
    expected = regard.attention(QUERY, QUERY, QUERY), regard.attention(half, half, half)
    with torch.device("meta"):
        for _ in range(2):
            assert torch.equal(regard.attention(QUERY, QUERY, QUERY), expected[0])
            assert torch.equal(regard.attention(half, half, half), expected[1])
        assert regard.attention(QUERY, QUERY, QUERY, dropout=0.5).device.type == "cpu"
        pair = expected[0], expected[0][..., 0]
        assert torch.equal(regard.merge(pair, pair)[0], expected[0])


def test_arrays_of_a_call_in_a_mode_do_not_stay() -> None:
    before = len(texts._lasting)
    with Seen():
        for n in range(3):
            regard.attention(QUERY, QUERY, QUERY, mask=regard.documents(np.arange(20_000) // (n + 1)))
    assert len(texts._lasting) == before
    mask = regard.documents(np.arange(20_000))
    graph = make_fx(lambda q: regard.attention(q, q, q, mask=mask))(QUERY)
    assert len(texts._lasting) == before + 1
    assert_close(graph(OTHER), regard.attention(OTHER, OTHER, OTHER, mask=mask))


def test_a_table_that_mask_and_score_read_is_one_input() -> None:
    def f(q: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        table = regard.table(slopes)
        mask = regard.mask(lambda b, h, i, j: table[h] * (i - j) < 1.0)
        return regard.attention(q, q, q, mask=mask, score=regard.score(lambda s, b, h, i, j: s + table[h] * j))

    graph = make_fx(f)(QUERY, SLOPES)
    texts._read.cache_clear()
    assert_close(gradients(graph, OTHER, -SLOPES), gradients(f, OTHER, -SLOPES))


def test_onnx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    message = "regard.attention has no ONNX operator: export the model with PyTorch's F.scaled_dot_product_attention"
    for trace in (make_fx, lambda f: lambda q: torch.jit.trace(f, (q,))):
        with pytest.raises(Exception, match=message):
            trace(lambda q: regard.attention(q, q, q))(QUERY)


def test_traces_are_quiet() -> None:
    """No size is read from a traced tensor, of which PyTorch would warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(scored, INPUTS)


@pytest.mark.parametrize("engine", [pytest.param("cpu", marks=pytest.mark.engine("cpu")), "tiled"])
@pytest.mark.parametrize("graded", [False, True])
def test_a_profile_names_calls(engine: str, graded: bool) -> None:
    """Small ones take a fast path, and run no operation of PyTorch."""
    q = torch.randn(1, 2, 40, 8).requires_grad_(graded)
    step, keep = torch.randn(1, 2, 1, 8), torch.ones(40, 40, dtype=torch.bool)

    def calls() -> list[torch.Tensor]:
        return [
            regard.attention(q, q, q),
            regard.attention(q, q, q, causal=True),
            regard.attention(step, q, q),
            regard.torch.scaled_dot_product_attention(q, q, q),
            regard.torch.scaled_dot_product_attention(q, q, q, attn_mask=keep),
        ]

    expected = [calls(), calls()][1]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found = calls()
    assert all(map(torch.equal, found, expected))
    events = {event.key: event for event in profiled.key_averages()}
    assert events["regard::attention"].count == len(expected)
    assert all(map(torch.equal, calls(), expected))
