"""Calls that are handed to PyTorch's fused functions on a device: which, and with the same meaning as ours.

Tensors of the host are taken for those of a device.
"""

from typing import Any

import pytest
import torch

import regard
from regard.torch.call import fused

NAN = float("nan")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


Q, K, V = (normal(2, 4, 9, 8, seed=n) for n in range(3))
MASK = normal(2, 1, 9, 9, seed=3) > -0.5
MASK[..., 0] = True
BIAS = normal(4, 9, 9, seed=4)
GROUPED = K[:, :2], V[:, :2]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that a fused function computed."""
    calls: list[Any] = []
    original = fused.scaled_dot_product_attention

    def counted(*args: Any, **settings: Any) -> Any:
        calls.append(settings)
        return original(*args, **settings)

    monkeypatch.setattr(fused, "on_host", lambda x: False)
    monkeypatch.setattr(fused, "scaled_dot_product_attention", counted)
    return calls


HANDED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "plain": ((Q, K, V), {}),
    "three axes": ((Q[0], K[0], V[0]), {}),
    "three axes, grouped": ((Q[0], K[0, :2], V[0, :2]), {"causal": True}),
    "scale": ((Q, K, V), {"scale": 0.3}),
    "causal": ((Q, K, V), {"causal": True}),
    "positions first": ((Q, K, V), {"causal": True, "layout": "bnhd"}),
    "grouped heads": ((Q, *GROUPED), {}),
    "grouped heads, causal": ((Q, *GROUPED), {"causal": True}),
    "fewer queries": ((Q[..., :3, :], K, V), {}),
    "wide value": ((Q, K, torch.cat([V, V], -1)), {}),
    "mask": ((Q, K, V), {"mask": MASK}),
    "bias": ((Q, K, V), {"bias": BIAS}),
    "defaults": ((Q, K, V), {"mask": None, "score": None, "dropout": 0.0, "offset": None, "origin": None}),
}


def varying(inputs: Any, options: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    x = [a.clone().requires_grad_() for a in inputs]
    bias = {"bias": options["bias"].clone().requires_grad_()} if "bias" in options else {}
    return [*x, *bias.values()], options | bias


def derivatives(inputs: Any, options: dict[str, Any], engine: str | None) -> list[torch.Tensor]:
    """The output, its gradients, those where a graph of them is made, and second ones."""
    x, options = varying(inputs, options)
    out = regard.attention(*x[:3], **options, engine=engine)
    first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
    graph = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in graph), x)
    return [out, *first, *graph, *second]


@pytest.mark.parametrize("name", HANDED)
def test_calls_that_are_handed_over(name: str, handed: list[Any]) -> None:
    """Values, gradients and double backward; the last is ours."""
    inputs, options = HANDED[name]
    values = regard.attention(*inputs, **options)
    assert len(handed) == 1
    found = derivatives(inputs, options, None)
    assert len(handed) == 2
    expected = derivatives(inputs, options, "tiled")
    assert len(handed) == 2
    for x, y in zip([values, *found], [expected[0], *expected], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


OURS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "a rule": ((Q, K, V), {"mask": regard.window(2)}),
    "a score": ((Q, K, V), {"score": regard.softcap(2.0)}),
    "a sink": ((Q, K, V), {"sink": normal(4)}),
    "dropout": ((Q, K, V), {"dropout": 0.2, "seed": 1}),
    "an offset": ((Q, K, V), {"causal": True, "offset": 1}),
    "an origin": ((Q, K, V), {"causal": True, "origin": (0, 0, 0), "offset": 0}),
    "statistics": ((Q, K, V), {"observe": ["entropy"]}),
    "weights": ((Q, K, V), {"return_weights": True}),
    "a named engine": ((Q, K, V), {"engine": "device"}),
    "causal, fewer queries": ((Q[..., :3, :], K, V), {"causal": True}),
    "causal and a mask": ((Q, K, V), {"causal": True, "mask": MASK}),
    "a bias and a mask": ((Q, K, V), {"bias": BIAS, "mask": MASK}),
    "a wider bias": ((Q.float(), K.float(), V.float()), {"bias": BIAS}),
    "a mask that is 0 and 1": ((Q, K, V), {"mask": MASK.long()}),
    "a matrix": ((Q[0, 0], K[0, 0], V[0, 0]), {}),
    "leading axes that broadcast": ((Q, K[:1], V[:1]), {}),
    "no keys": ((Q, K[..., :0, :], V[..., :0, :]), {}),
}


@pytest.mark.parametrize("name", OURS)
def test_calls_that_stay_ours(name: str, handed: list[Any]) -> None:
    inputs, options = OURS[name]
    regard.attention(*inputs, **options)
    assert not handed


def with_nan(x: torch.Tensor, at: int) -> torch.Tensor:
    x = x.clone()
    x[..., at, :] = NAN
    return x


BLIND = MASK.clone()
BLIND[0, 0, 3] = False
FORBIDDEN = torch.zeros(9, 9, dtype=torch.float64)
FORBIDDEN[5] = -torch.inf


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ((Q, K, with_nan(V, 8)), {"causal": True}),
        ((Q, with_nan(K, 8), V), {"causal": True}),
        ((Q, K, V), {"mask": BLIND}),
        ((Q, with_nan(K, 2), V), {"mask": MASK & (torch.arange(9) != 2)}),
        ((Q, K, V), {"bias": FORBIDDEN}),
    ],
    ids=["NaN in the last value", "NaN in the last key", "a row that sees nothing", "a NaN that is hidden", "bias"],
)
def test_numbers_that_change_the_meaning_stay_ours(inputs: Any, options: dict[str, Any], handed: list[Any]) -> None:
    out = regard.attention(*inputs, **options)
    assert not handed
    torch.testing.assert_close(out, regard.attention(*inputs, **options, engine="tiled"), equal_nan=True)
    assert not out[..., :2, :].isnan().any()


def test_a_plain_call_asks_nothing(handed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(fused, "answers", lambda *x: asked.append(x) or True)
    regard.attention(Q, K, V)
    assert not asked
    regard.attention(Q, K, V, causal=True)
    assert len(asked) == 1


def test_forward_mode_and_transforms_are_ours(handed: list[Any]) -> None:
    def f(*x: torch.Tensor) -> torch.Tensor:
        return regard.attention(*x, causal=True)

    def same(found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def tiled(*x: torch.Tensor) -> torch.Tensor:
        return regard.attention(*x, causal=True, engine="tiled")

    same(torch.func.jvp(f, (Q, K, V), (V, Q, K))[1], torch.func.jvp(tiled, (Q, K, V), (V, Q, K))[1])
    same(torch.func.vmap(f)(Q, K, V), tiled(Q, K, V))
    same(
        torch.func.hessian(lambda x: f(x, K[0], V[0]).sum())(Q[0]),
        torch.func.hessian(lambda x: tiled(x, K[0], V[0]).sum())(Q[0]),
    )
    assert not handed


def test_compiled_functions_are_ours(handed: list[Any]) -> None:
    def f(*x: torch.Tensor) -> torch.Tensor:
        return regard.attention(*x, causal=True).square().sum()

    grads = []
    for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        x = [a.clone().requires_grad_() for a in (Q, K, V)]
        g(*x).backward()
        grads.append([a.grad for a in x])
    assert len(handed) == 1
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_graph_is_used_once_unless_retained(handed: list[Any]) -> None:
    x = Q.clone().requires_grad_()
    out = regard.attention(x, K, V).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_plan_says_who_computes(handed: list[Any]) -> None:
    assert regard.plan(Q, K, V).engines["device"] == fused.REASON
    plan = regard.plan(Q, K, V, mask=regard.window(2))
    assert plan.engine == "device"
    assert plan.engines["device"] != fused.REASON
    assert not handed
