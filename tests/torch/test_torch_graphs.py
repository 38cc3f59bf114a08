"""torch.compile and torch.export see one operation; what a graph does not provide raises."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vmap

import regard
from regard.torch.call import text as texts
from regard.torch.call.record import DEFAULTS
from regard.torch.tensors.modes import outside_of_graphs

Q = torch.randn(2, 3, 7, 4, generator=torch.Generator().manual_seed(0))
SLOPES = torch.nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))
OUTSIDE = regard.alibi(SLOPES)
WINDOW = regard.window(3) & ~regard.prefix(1)
KEEP = torch.rand(2, 1, 1, 7, generator=torch.Generator().manual_seed(1)) < 0.7


def observed(q: torch.Tensor) -> Any:
    out, weights, seen = regard.attention(
        q, q, q, return_weights=True, observe=["max", "lse", regard.top(2), "entropy"]
    )
    return out, weights, seen.lse, seen.entropy, seen[regard.top(2)].values.detach(), seen.max.detach()


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda q: regard.attention(q, q, q, causal=True, scale=0.3),
    "rules made outside": lambda q: regard.attention(q, q, q, mask=WINDOW, score=OUTSIDE),
    "rules made inside": lambda q: regard.attention(
        q, q, q, mask=regard.window(2) & regard.mask(KEEP) | regard.mask(KEEP.flip(-1)) & regard.window(4),
        score=[regard.alibi(SLOPES), regard.softcap(5.0), regard.alibi(2 * SLOPES)],
    ),
    "functions": lambda q: regard.attention(q, q, q, score=lambda s, b, h, i, j: s - 0.1 * abs(i - j)),
    "arrays": lambda q: regard.attention(
        q, q, q, mask=KEEP, bias=q.mean(-1)[..., None, :], sink=SLOPES, offset=q.shape[-2] - 3, causal=True
    ),
    "everything observed": observed,
    "positions first": lambda q: regard.attention(q, q, q, layout="bnhd", offset=torch.tensor([1, 2]), causal=True),
    "matrices": lambda q: regard.attention(q[0, 0], q[0, 0], q[0, 0]),
    "a metric": lambda q: regard.attention(q, q, q, metric=q[0, :, :4]),
    "seeded dropout": lambda q: regard.attention(q, q, q, dropout=0.5, seed=3),
    "merge": lambda q: regard.merge((q, q.mean(-1)), (2 * q, q.sum(-1)), sink=SLOPES),
    "multi-head": lambda q: regard.multihead_attention(q[0], q[0], q[0], 2, causal=True),
    "linear attention": lambda q: regard.linear_attention(q, q, q, causal=True),
    "hopfield": lambda q: regard.hopfield(q, q[:, :1] + 1, beta=2.0, steps=2),
}  # fmt: skip


def outputs(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def assert_same(function: Any, compiled: Any, q: torch.Tensor) -> None:
    """The bits of the results and of the gradients."""
    results, found = outputs(function(q)), outputs(compiled(q))
    trained = [q, SLOPES]
    expected = torch.autograd.grad(
        sum(x.square().sum() for x in results if x.requires_grad), trained, allow_unused=True
    )
    gradients = torch.autograd.grad(sum(x.square().sum() for x in found if x.requires_grad), trained, allow_unused=True)
    for x, y in zip((*results, *expected), (*found, *gradients), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y)
    assert torch.equal(results[0], found[0])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_compiled_call_is_the_call(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend="aot_eager")
    assert_same(FUNCTIONS[name], compiled, Q.clone().requires_grad_())


def test_dynamo_may_be_imported_after_a_call() -> None:
    code = """
import sys, torch, regard
x = torch.ones(2, 4, 3)
regard.merge((x, x[..., 0]), (2 * x, x[..., 1]))
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(regard.merge, fullgraph=True, backend="eager")
compiled((x, x[..., 0]), (2 * x, x[..., 1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_function_outside_of_graphs_is_not_compiled_and_says_why() -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @outside_of_graphs("some reason")
    def outside(x: torch.Tensor) -> torch.Tensor:
        return called(x).cos()

    def step(x: torch.Tensor) -> torch.Tensor:
        return outside(2 * x) + 1

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    assert torch.equal(torch.compile(step, backend=counter)(Q), step(Q))
    assert (counter.frame_count, counter.op_count) == (2, 2)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="some reason"):
        torch.compile(step, fullgraph=True, backend="eager")(Q)


LENGTHS = torch.tensor([3, 7])
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
OF_INPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "padding": (regard.padding, LENGTHS),
    "padding on the left": (lambda x: regard.padding(lengths=x, side="left") & regard.causal(), LENGTHS.int()),
    "prefix": (regard.prefix, LENGTHS),
    "documents": (regard.documents, IDS),
    "documents of keys": (lambda x: regard.documents(x, x + 1) | regard.causal(), IDS),
    "blocks": (lambda x: regard.blocks(x, 4), torch.tensor([[1, 0], [1, 1]])),
}


@pytest.mark.parametrize("name", OF_INPUTS)
def test_a_mask_reads_an_input_of_the_graph(name: str) -> None:
    """A graph that is compiled once serves other values."""
    torch._dynamo.reset()
    rule, x = OF_INPUTS[name]

    def function(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, mask=rule(x))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for y in (x, x.flip(-1)):
        assert torch.equal(compiled(Q, y), function(Q, y))
    assert counter.frame_count == 1


def test_a_mask_of_floats_is_refused_while_a_graph_is_traced() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, x: regard.attention(q, q, q, mask=regard.padding(x)), backend="eager")
    with pytest.raises(Exception, match="lengths of padding must be integers, got float32"):
        compiled(Q, LENGTHS.float())


@pytest.mark.parametrize("name", ["rules made outside", "merge"])
def test_dynamic_shapes_compile_once(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, dynamic=True, backend=counter)
    for n in (7, 11, 30):
        assert_same(FUNCTIONS[name], compiled, torch.randn(2, 3, n, 4).requires_grad_())
    assert counter.frame_count == 1


def test_inductor() -> None:
    """A model with everything around attention, in one graph."""
    torch._dynamo.reset()

    def model(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q.sin(), q, q * 2, mask=WINDOW, score=OUTSIDE).cos() + 1

    q = torch.randn(2, 3, 7, 4, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True)
    for found, expected in zip(
        torch.autograd.grad(compiled(q).sum(), [q, SLOPES]),
        torch.autograd.grad(model(q).sum(), [q, SLOPES]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_dropout_in_a_graph_follows_the_generator() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: regard.attention(q, q, q, dropout=0.5), fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = compiled(Q), compiled(Q)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, compiled(Q))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(3))
        self.score = regard.alibi(self.slopes)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=self.score, mask=regard.causal())


class Inside(Model):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, score=regard.alibi(self.slopes), mask=regard.causal())


def gradients(module: Any, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of q and of what trains, which an exported module shares with the one that it was made of."""
    q = q.detach().requires_grad_()
    return torch.autograd.grad(module(q).square().sum(), [q, *module.parameters()])


def test_export_refuses_parameters_that_would_be_constants() -> None:
    with pytest.raises(
        NotImplementedError, match=r"score: alibi\(.*\) was made outside of the program, and torch.export"
    ):
        torch.export.export(Model(), (Q,))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    model = (Model if strict else Inside)()
    n = torch.export.Dim("n", min=2, max=100)
    exported = torch.export.export(model, (Q,), dynamic_shapes={"q": {2: n}}, strict=strict)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert names.count("regard.attention.default") == 1
    again = exported.module()
    q = torch.randn(2, 3, 9, 4)
    assert torch.equal(again(q), model(q))
    for got, expected in zip(gradients(again, q), gradients(model, q), strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected)


def name_of(function: Any) -> str:
    """How a graph knows the call in it."""
    torch._dynamo.reset()
    names: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        names.extend(node.args[1] for node in module.graph.nodes if node.target is torch.ops.regard.attention.default)
        return module

    torch.compile(function, fullgraph=True, backend=backend)(Q.clone().requires_grad_())
    (name,) = names
    return name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck itself reads it
def test_operations_do_what_their_definitions_say() -> None:
    options = {"mask": WINDOW, "score": OUTSIDE, "observe": ["entropy", "argmax"]}
    name = name_of(lambda q: regard.attention(q, q, q, bias=q.mean(-1)[..., None, :], **options)[0])
    inputs = [torch.randn(2, 3, 7, 4, requires_grad=True) for _ in range(3)]
    inputs += [torch.randn(2, 3, 1, 7, requires_grad=True), SLOPES]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.regard.attention.default, (inputs, name), test_utils=tests)
    first = [x.transpose(1, 2).contiguous().detach() for x in inputs[:3]]
    torch.library.opcheck(
        torch.ops.regard.attention.default, (first, name_of(lambda q: regard.attention(q, q, q, layout="bnhd"))),
        test_utils=tests,
    )  # fmt: skip
    out, lse, entropy, *_ = torch.ops.regard.attention(inputs, name)
    given = [*(x.detach() for x in (*inputs, out, lse, entropy)), None, torch.ones_like(out)]
    torch.library.opcheck(torch.ops.regard.attention_backward.default, ([*given, None, None], name), test_utils=tests)


def dual(function: Any) -> torch.Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(Q, Q))).tangent


def test_graphs_give_no_silent_zero() -> None:
    """Everything that a graph does not provide raises, whether the transform is inside of it or outside."""
    plain = FUNCTIONS["plain"]
    inside: list[Callable[[torch.Tensor], Any]] = [
        lambda q: jvp(plain, (q,), (q,))[1],
        lambda q: grad(lambda q: plain(q).sum())(q),
        lambda q: vmap(plain)(q),
        lambda q: dual(plain),
    ]
    for function in inside:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"functorch|transform|not provided"):
            torch.compile(function, fullgraph=True, backend="eager")(Q)


def test_operations_differentiate_as_calls_do() -> None:
    """Those of a graph that is run without being compiled, such as an exported one."""
    plain = FUNCTIONS["plain"]
    name = name_of(plain)

    def exported(q: torch.Tensor) -> torch.Tensor:
        return torch.ops.regard.attention([q, q, q], name)[0]

    def twice(f: Any) -> torch.Tensor:
        q = Q.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(q).square().sum(), q, create_graph=True)
        return torch.autograd.grad(first.square().sum(), q)[0]

    derivatives: list[Callable[[Any], torch.Tensor | None]] = [
        dual, twice, lambda f: jvp(f, (Q,), (Q,))[1], lambda f: vmap(f)(Q),
        lambda f: vmap(grad(lambda q: f(q).square().sum()))(Q),
        lambda f: hessian(lambda q: f(q).square().sum())(Q[0, :, :2]),
    ]  # fmt: skip
    for derivative in derivatives:
        expected = derivative(plain)
        assert expected is not None
        assert expected.any()
        torch.testing.assert_close(derivative(exported), expected)


def test_a_graph_of_a_constant_bias_refuses_one_that_requires_grad() -> None:
    from regard.torch.compiled.traced import name_of_call
    from regard.torch.operators.registration import forward

    bias = torch.zeros(3, 7, 7, requires_grad=True)
    options = tuple((name, x) for name, x in DEFAULTS.items() if name not in ("mask", "score", "bias"))
    traced = name_of_call(None, None, (), ("bias",), None, False, (), options, ("bias",))
    with torch.no_grad():
        assert torch.equal(forward([Q, Q, Q, bias], traced)[0], regard.attention(Q, Q, Q, bias=bias))
    with pytest.raises(NotImplementedError, match="required no grad; trace it again"):
        forward([Q, Q, Q, bias], traced)


def test_statistics_without_a_derivative_raise_in_a_graph() -> None:
    torch._dynamo.reset()

    def maxima(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, observe=["max"])[1].max

    with pytest.raises(Exception, match="the derivative of 'max' is not provided"):
        torch.compile(maxima, fullgraph=True, backend="aot_eager")(Q.clone().requires_grad_()).sum().backward()


LOAD = """
import sys, torch, regard.torch
again = torch.export.load(sys.argv[1]).module()
q = torch.load(sys.argv[2]).requires_grad_()
out = again(q)
torch.save((out.detach(), torch.autograd.grad(out.square().sum(), [q, *again.parameters()])), sys.argv[2])
"""


class Reading(Model):
    """With rules over constant arrays, tensors, functions and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = torch.nn.Buffer(KEEP)
        self.score = [self.score, regard.softcap(5.0), regard.relative(np.linspace(-1, 1, 33).reshape(3, 11))]
        self.mask = regard.window(6) & regard.documents(np.arange(100) // 5) | ~regard.strided(3)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        mask = regard.mask(self.keep) & self.mask & regard.mask(lambda b, h, i, j: (i - j) % 5 > h)
        wishes = {"observe": ["entropy", regard.top(2)], "origin": (0, 0, 0), "causal": False}
        out, seen = regard.attention(q, q, q, sink=self.slopes, mask=mask, score=self.score, **wishes)
        return out + seen.entropy[..., None]


def test_a_saved_program_runs_in_another_process(tmp_path: Any) -> None:
    model, (saved, data) = Reading(), (str(tmp_path / name) for name in ("model.pt2", "data.pt"))
    torch.export.save(torch.export.export(model, (Q,), strict=True), saved)
    torch.save(Q, data)
    subprocess.run([sys.executable, "-c", LOAD, saved, data], check=True)
    found, derivatives = torch.load(data)
    assert torch.equal(found, model(Q))
    for got, expected in zip(derivatives, gradients(model, Q), strict=True):
        assert expected.any()
        torch.testing.assert_close(got, expected)


def test_large_arrays_stay_in_the_process() -> None:
    mask = regard.documents(np.arange(10_000))

    class Large(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return regard.attention(q, q, q, mask=mask)

    graph = torch.export.export(Large(), (Q,), strict=True).graph
    (name,) = [x.args[1] for x in graph.nodes if x.target is torch.ops.regard.attention.default]
    assert len(name) < 4000
    assert torch.equal(torch.ops.regard.attention([Q, Q, Q], name)[0], regard.attention(Q, Q, Q, mask=mask))
    kept = dict(texts._lasting)
    try:
        texts._large.clear()
        texts.named.cache_clear()
        texts._read.cache_clear()
        with pytest.raises(
            RuntimeError, match=r"reads an array of shape \(1, 10000\) that is too large to be saved with it"
        ):
            torch.ops.regard.attention([Q, Q, Q], name)
    finally:
        texts._large.update(kept)
        texts._lasting.update(kept)
    with pytest.raises(RuntimeError, match="of another version of regard"):
        torch.ops.regard.attention([Q, Q, Q], "0" * 64 + "x")


def test_names_tell_calls_apart() -> None:
    tables = [regard.alibi(n * SLOPES.detach().numpy()) for n in (1, 2)]
    names = {
        name_of(lambda q: regard.attention(q, q, q, mask=regard.window(2))),
        name_of(lambda q: regard.attention(q, q, q, mask=regard.window(3))),
        name_of(lambda q: regard.attention(q, q, q, causal=True)),
        name_of(lambda q: regard.attention(q, q, q, score=OUTSIDE)),
        name_of(lambda q: regard.attention(q, q, q, score=tables[0])),
        name_of(lambda q: regard.attention(q, q, q, score=tables[1])),
    }
    assert len(names) == 5  # tables are inputs of the graph
