"""Third derivatives and beyond: dense references in float64, every case of the table, and every way to ask for them."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, grad
from torch.func import grad as func_grad
from torch.func import hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

import dense
import regard
from cases import CASES, Case
from on_tensors import call, smaller
from regard.reference.specification import dropout_mask
from regard.torch.call import kernels
from regard.torch.composed import higher, rows
from regard.warning import RegardWarning
from support import on_cpu

Tensor = torch.Tensor
Attention = Callable[..., Tensor]
GENERATOR = torch.Generator().manual_seed(0)

pytestmark = [
    pytest.mark.engine("tiled"),
    pytest.mark.filterwarnings("ignore:derivatives of regard.attention beyond the second"),
]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows in each call."""
    monkeypatch.setattr(higher, "PAIRS", 40)


# References: dense, in float64


def reference(*xs: Tensor, **options: Any) -> Tensor:
    return dense.attention(*xs, **options)[0]


H, N, D = 2, 6, 3
I, J = torch.arange(N)[:, None], torch.arange(N)
BIAS, SINK, SLOPES, TABLE = normal(H, N, N), normal(H), normal(H), 1 + 0.3 * normal(5)
KEEP = torch.from_numpy(1.0 * dropout_mask(0.4, 7, 0, np.arange(H)[:, None, None], I.numpy(), J.numpy()))

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Tensor, ...]]] = {}
"""Of each option: those of regard.attention and of `reference`, both as functions of its tensors; and the tensors."""


def option(name: str, ours: Any, theirs: Any, *tensors: Tensor) -> None:
    OPTIONS[name] = ours, theirs, tensors


option("plain", dict, dict)
option("scale", lambda: {"scale": 0.3}, lambda: {"scale": 0.3})
option("causal", lambda: {"causal": True}, lambda: {"visible": J <= I})
option("window", lambda: {"mask": regard.window(1, 1)}, lambda: {"visible": (J - I).abs() <= 1})
option("mask", lambda: {"mask": BIAS > -1}, lambda: {"visible": BIAS > -1})
option("bias", lambda b: {"bias": b}, lambda b: {"score": lambda s: s + b}, BIAS)
option("bias of a row", lambda b: {"bias": b}, lambda b: {"score": lambda s: s + b}, BIAS[:, :1])
option("sink", lambda x: {"sink": x}, lambda x: {"sink": x}, SINK)
option("softcap", lambda: {"score": regard.softcap(0.7)}, lambda: {"score": lambda s: 0.7 * torch.tanh(s / 0.7)})
option(
    "slopes that train", lambda x: {"score": regard.alibi(x)},
    lambda x: {"score": lambda s: s - x[:, None, None] * (I - J).abs()}, SLOPES,
)  # fmt: skip
option(
    "a curved table", lambda x: {"score": regard.score(lambda s, b, h, i, j: s * regard.table(x)[j - i + 2] ** 3)},
    lambda x: {"score": lambda s: s * x[(J - I + 2).clamp(0, 4)] ** 3}, TABLE,
)  # fmt: skip
option("dropout", lambda: {"dropout": 0.4, "seed": 7}, lambda: {"factors": KEEP / 0.6})
option("seed in a tensor", lambda: {"dropout": 0.4, "seed": torch.tensor(7)}, lambda: {"factors": KEEP / 0.6})


def repeated(f: Attention, tensors: list[Tensor], order: int) -> list[Tensor]:
    """Gradients of a loss on gradients of a loss ..., `order` times, in all tensors."""
    value = f(*tensors)
    for n in range(order - 1):
        (value,) = grad(value.square().sum(), tensors[n % 3], create_graph=True)
        value = value / value.detach().norm()
    return list(grad(value.square().sum(), tensors, create_graph=True))


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        largest = b.detach().abs().max().item()
        assert largest > 1e-3
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * largest)


@pytest.mark.parametrize(("name", "order"), [*((name, 3) for name in OPTIONS), ("sink", 4), ("a curved table", 4)])
def test_every_option(name: str, order: int) -> None:
    ours, theirs, tensors = OPTIONS[name]
    xs = [x.clone().requires_grad_() for x in (normal(H, N, D), normal(H, N, D), normal(H, N, 2), *tensors)]
    found = repeated(lambda q, k, v, *x: regard.attention(q, k, v, **ours(*x)), xs, order)
    same(found, repeated(lambda q, k, v, *x: reference(q, k, v, **theirs(*x)), xs, order))


@pytest.mark.parametrize("layout", on_cpu(["bhnd", "bnhd"], "bhnd"))
def test_grouped_heads_and_leading_dimensions(layout: str) -> None:
    q, k, v = normal(3, 4, N, D), normal(1, 2, N, D), normal(2, N, 2)
    xs = [x.requires_grad_() for x in (q, k, v)]

    def ours(*xs: Tensor) -> Tensor:
        first = layout == "bnhd"
        out = regard.attention(*(x.transpose(-2, -3) if first else x for x in xs), layout=layout, causal=True)
        return out.transpose(-2, -3) if first else out

    same(repeated(ours, xs, 3), repeated(partial(reference, visible=J <= I), xs, 3))


# The table of cases: the formulas beside the kernels, in values and second derivatives


@pytest.mark.parametrize("case", [c for c in CASES if max(c.n_q, c.n_k) <= 80], ids=str)
def test_formulas_are_those_of_the_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of out, lse and entropy, of ∂B and ∂J, with what is not finite in the same places."""
    case = case if case.poison is not None else smaller(case)
    attention, tensors, _, _ = call(case, observe=["lse", "entropy"], engine="tiled")
    recorded: list[Any] = []
    monkeypatch.setattr("regard.torch.public.attention.applied", lambda *given: recorded.extend(given) or run(*given))
    attention(*tensors)
    c, *inputs = recorded
    n = len(c.floats)
    results = run(c, *inputs)[:3]
    if not all(x.numel() for x in inputs):
        return
    second = replace(c, steps=("backward_tangent",)), replace(c, steps=("tangent_tangent",))
    finite, given = case.poison is None, (tuple(inputs[:n]), tuple(inputs[n:]))
    parts = [rows.outputs(c, finite, r, *given) for r in higher.blocks(second[0], inputs)]
    same_numbers([sum(x[1:], start=x[0]) for x in zip(*parts, strict=True)], results)
    ct, d_ct = ([normal(*x.shape) for x in results] for _ in range(2))
    t, u = ([normal(*x.shape) for x in inputs[:n]] for _ in range(2))
    known = (*results, None)  # nothing was rounded
    d_t, d_u = (kernels.tangent(c, *inputs, *known, *x) for x in (t, u))
    same_numbers(
        higher.derivative(second[0], *inputs, *ct, *t, *d_ct),
        kernels.backward_tangent(c, *inputs, *known, *ct, *t, *d_t, *d_ct),
    )
    same_numbers(
        higher.derivative(second[1], *inputs, *u, *t),
        kernels.tangent_tangent(c, *inputs, *known, *t, *d_t, *u, *d_u),
    )


def run(c: Any, *inputs: Tensor) -> Any:
    return kernels.attention(c, *inputs)


def same_numbers(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


# Every way to ask


def loss(attention: Attention, x: Tensor) -> Tensor:
    return attention(1.3 * x, x, x.sin()).square().sum()


def ours(*xs: Tensor) -> Tensor:
    return regard.attention(*xs, score=regard.softcap(2.0), causal=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = torch.arange(q.shape[-2])
    return reference(q, k, v, score=lambda s: 2 * torch.tanh(s / 2), visible=n <= n[:, None])


WAYS: dict[str, Callable[[Any], Any]] = {
    "jacrev of hessian": lambda f: jacrev(hessian(f)),
    "jacfwd of hessian": lambda f: jacfwd(hessian(f)),
    "reverse three times": lambda f: jacrev(jacrev(jacrev(f))),
    "forward three times": lambda f: jacfwd(jacfwd(jacfwd(f))),
    "reverse, forward, reverse": lambda f: jacrev(jacfwd(jacrev(f))),
    "hessian of a slope of a slope": lambda f: hessian(lambda x: along(along(f))(x)),
    "batch of gradients of traces": lambda f: (
        lambda x: vmap(func_grad(lambda x: hessian(f)(x).diagonal().sum()))(torch.stack([x, 2 * x]))
    ),
}


def along(f: Any) -> Any:
    return lambda x: jvp(f, (x,), (x.cos(),))[1]


@pytest.mark.parametrize("way", WAYS)
def test_transforms(way: str) -> None:
    x = normal(1, 2, 2)
    found, expected = (WAYS[way](partial(loss, f))(x) for f in (ours, theirs))
    same([found], [expected])


def test_plain_forward_mode_and_batched_gradients() -> None:
    x = normal(1, 3, 2).requires_grad_()

    def second(f: Attention, x: Tensor) -> Tensor:
        (first,) = grad(loss(f, x), x, create_graph=True)
        return grad(first.square().sum(), x, create_graph=True)[0]

    def forward(f: Attention) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(second(f, dual)).tangent

    def batched(f: Attention) -> Tensor:
        rows = torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)
        return grad(second(f, x), x, rows, is_grads_batched=True)[0]

    for way in (forward, batched):
        same([way(ours)], [way(theirs)])


@pytest.mark.parametrize("drop_in", [regard.torch.scaled_dot_product_attention, "sdpa"], ids=["function", "sdpa"])
def test_drop_ins(drop_in: Any) -> None:
    xs = [normal(2, 2, 5, 3).requires_grad_() for _ in range(3)]
    n = torch.arange(5)
    if drop_in == "sdpa":
        with regard.torch.sdpa():
            found = repeated(lambda *x: functional.scaled_dot_product_attention(*x, is_causal=True), xs, 3)
    else:
        found = repeated(lambda *x: drop_in(*x, is_causal=True), xs, 3)
    same(found, repeated(partial(reference, visible=n <= n[:, None]), xs, 3))


def test_weights() -> None:
    xs = [normal(2, 5, 3).requires_grad_() for _ in range(3)]
    found = repeated(lambda *x: regard.attention(*x, return_weights=True)[1], xs[:2] + xs[:1], 3)
    same(found, repeated(lambda q, k, _: dense.scores(q, k).softmax(-1), xs[:2] + xs[:1], 3))


class Field(torch.nn.Module):
    """A small network u of points in the plane, with attention among features of each."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.up, self.down = torch.nn.Linear(2, 24).double(), torch.nn.Linear(24, 1).double()

    def forward(self, points: Tensor) -> Tensor:
        x = self.up(points).tanh().reshape(len(points), 2, 4, 3)
        return self.down(self.attention(x, x, x).flatten(1))


def squared_laplacian(network: Field, points: Tensor) -> Tensor:
    (slope,) = grad(network(points).sum(), points, create_graph=True)
    second = [grad(slope[:, n].sum(), points, create_graph=True)[0][:, n] for n in range(2)]
    return (second[0] + second[1]).square().mean()


def test_a_laplacian_in_a_loss() -> None:
    points = normal(5, 2).requires_grad_()
    losses, gradients = [], []
    for attention in (regard.attention, reference):
        network = Field(attention)
        value = squared_laplacian(network, points)
        value.backward()
        losses.append(value)
        gradients.append([x.grad for x in network.parameters() if x.grad is not None])
    same(losses[:1], losses[1:])
    same(gradients[0], gradients[1])


# What it costs


def test_one_warning_says_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(higher, "_warned", set())
    monkeypatch.setattr(higher, "PAIRS", 2**18)
    x = normal(2, 5, 3).requires_grad_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            repeated(lambda *xs: regard.attention(*xs), [x, x, x], 3)
    (one,) = told
    assert one.category is RegardWarning
    assert str(one.message) == (
        "derivatives of regard.attention beyond the second are computed by PyTorch's operations, for one block of rows "
        "after the other: many times slower than the second, and in 40,000 bytes"
    )


def test_a_second_derivative_warns_of_nothing() -> None:
    x = normal(2, 5, 3).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repeated(lambda *xs: regard.attention(*xs), [x, x, x], 2)


def test_nothing_of_n_squared_is_held() -> None:
    """What a graph saves of a third derivative are tensors of n · d."""
    x = normal(1, 64, 2).requires_grad_()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        repeated(lambda *xs: regard.attention(*xs), [x, x, x], 3)
    assert max(sizes) == x.numel()
