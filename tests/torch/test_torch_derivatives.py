"""Derivatives on tensors: gradcheck over the table of cases, every order of modes, transforms, and no silent zeros."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import regard
from cases import CASES, Case, case
from on_tensors import SMALL, array, call, flat, smaller
from regard.engines import engines

pytestmark = pytest.mark.engine("tiled")

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def function(case: Case) -> tuple[Callable[..., Any], list[torch.Tensor], list[str]]:
    """(out, lse, entropy) of a case as a function of its tensors, without infinite results.

    On the engine without kernels to compile: what is tried here is how PyTorch is told of derivatives.
    """
    attention, tensors, names, _ = call(smaller(case), observe=["lse", "entropy"], engine="tiled")

    def finite(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse, entropy = flat(attention(*xs))
        return out, torch.where(lse.detach().isinf(), 0.0, lse), entropy

    return finite, tensors, names


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_first_derivatives(case: Case) -> None:
    f, tensors, _ = function(case)
    if all(x.numel() for x in tensors):
        assert gradcheck(f, [x.requires_grad_() for x in tensors], check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_second_derivatives(case: Case) -> None:
    f, tensors, _ = function(case)
    if all(x.numel() for x in tensors):
        inputs = [x.requires_grad_() for x in tensors]
        assert gradgradcheck(f, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.parametrize("case", [c for c in CASES if c.poison is not None or max(c.n_q, c.n_k) >= 30], ids=str)
@pytest.mark.engine("cpu")
def test_gradients_have_the_bits_of_numpy(case: Case) -> None:
    q, k, v, options = case.inputs(np.float32)
    attention, tensors, names, _ = call(case, np.float32)
    out = attention(*(x.requires_grad_() for x in tensors))
    dout = torch.randn(out.shape, generator=GENERATOR)
    found = dict(zip(names, torch.autograd.grad(out, tensors, dout), strict=True))
    expected = regard.attention_vjp(q, k, v, dout.numpy(), **options)
    for name in ("query", "key", "value", "bias", "sink"):
        assert (name in found) == (getattr(expected, name) is not None)
        if name in found:
            assert array(found[name]).tobytes() == getattr(expected, name).tobytes()


SHAPES = {"query": (2, 5, 3), "key": (2, 4, 3), "value": (2, 4, 2), "bias": (5, 4), "sink": (2,), "table": (2,)}


def everything(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A call in which all that has a derivative meets."""
    q, k, v, bias, sink, table = xs
    score = [regard.softcap(2.0), regard.alibi(table)]
    mask = regard.window(2, 1)
    return flat(regard.attention(q, k, v, bias=bias, sink=sink, score=score, mask=mask, observe=["lse", "entropy"]))


def loss(*xs: torch.Tensor) -> torch.Tensor:
    return sum((x.square().sum() for x in everything(*xs)), start=torch.zeros(()))


def inputs() -> list[torch.Tensor]:
    return [normal(*shape) for shape in SHAPES.values()]


def test_every_order_of_two_modes() -> None:
    """Forward over reverse, reverse over reverse and reverse over forward give H u for all inputs, and forward over
    forward uᵀ H u.
    """
    xs, us, every = tuple(inputs()), tuple(inputs()), tuple(range(6))
    step = 1e-5

    def slope(*xs: torch.Tensor) -> torch.Tensor:
        return jvp(loss, xs, us)[1]

    def product(*xs: torch.Tensor) -> torch.Tensor:
        return sum(((g * u).sum() for g, u in zip(grad(loss, every)(*xs), us, strict=True)), start=torch.zeros(()))

    ends = [grad(loss, every)(*(x + s * u for x, u in zip(xs, us, strict=True))) for s in (step, -step)]
    exact = [(high - low) / (2 * step) for high, low in zip(*ends, strict=True)]
    orders = {
        "forward over reverse": jvp(grad(loss, every), xs, us)[1],
        "reverse over reverse": grad(product, every)(*xs),
        "reverse over forward": grad(slope, every)(*xs),
    }
    for name, found in orders.items():
        for got, expected in zip(found, exact, strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-7, msg=name)
    along = sum((h * u).sum() for h, u in zip(exact, us, strict=True))
    torch.testing.assert_close(jvp(slope, xs, us)[1], along, rtol=1e-4, atol=1e-7)
    q = normal(1, 2, 2)

    def alone(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q).square().sum()

    square = hessian(alone)(q)
    for twice in (jacrev(jacrev(alone)), jacfwd(jacfwd(alone)), jacrev(jacfwd(alone))):
        torch.testing.assert_close(twice(q), square)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_forward_over_forward(case: Case) -> None:
    """Of tangents that move themselves, beside the differences of tangents."""
    f, tensors, _ = function(case)
    xs, ts, us, moving = (tuple(normal(*x.shape) if n else x for x in tensors) for n in range(4))

    def tangents(xs: Any, ts: Any) -> tuple[torch.Tensor, ...]:
        return jvp(f, xs, ts)[1]

    def at(step: float) -> tuple[torch.Tensor, ...]:
        return tangents(*(tuple(x + step * y for x, y in zip(*pair, strict=True)) for pair in ((xs, us), (ts, moving))))

    found = jvp(tangents, (xs, ts), (us, moving))[1]
    step = 1e-5
    for got, high, low in zip(found, at(step), at(-step), strict=True):
        torch.testing.assert_close(got, (high - low) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("n", range(6), ids=list(SHAPES))
def test_no_transform_gives_a_silent_zero(n: int) -> None:
    """Every way to a derivative in each input gives the same number, which is not zero."""
    xs = inputs()
    t, alone = normal(*SHAPES[list(SHAPES)[n]]), lambda x: loss(*xs[:n], x, *xs[n + 1 :])
    step = 1e-6
    exact = (alone(xs[n] + step * t) - alone(xs[n] - step * t)) / (2 * step)
    assert exact.abs() > 1e-2
    leaf = xs[n].clone().requires_grad_()
    alone(leaf).backward()
    assert leaf.grad is not None
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(alone(forward_ad.make_dual(xs[n], t))).tangent
    found = {
        "backward": (leaf.grad * t).sum(),
        "forward_ad": dual,
        "func.grad": (grad(alone)(xs[n]) * t).sum(),
        "func.jvp": jvp(alone, (xs[n],), (t,))[1],
        "func.vjp": (vjp(alone, xs[n])[1](torch.ones_like(exact))[0] * t).sum(),
        "jacrev": (jacrev(alone)(xs[n]) * t).sum(),
        "jacfwd": (jacfwd(alone)(xs[n]) * t).sum(),
        "jvp of jvp in its tangent": jvp(lambda t: jvp(alone, (xs[n],), (t,))[1], (t,), (t,))[1],
        "vmap of jvp": vmap(lambda t: jvp(alone, (xs[n],), (t,))[1])(torch.stack([t, t]))[1],
        "vmap of grad": (vmap(grad(alone))(torch.stack([xs[n], xs[n]]))[1] * t).sum(),
    }
    for way, value in found.items():
        torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-7, msg=way)

    def slope(x: torch.Tensor) -> torch.Tensor:
        return jvp(alone, (x,), (t,))[1]

    curvature = (slope(xs[n] + step * t) - slope(xs[n] - step * t)) / (2 * step)
    assert curvature.abs() > 1e-2
    again = {
        "jvp of jvp": jvp(slope, (xs[n],), (t,))[1],
        "jacfwd of jvp": (jacfwd(slope)(xs[n]) * t).sum(),
        "grad of jvp": (grad(slope)(xs[n]) * t).sum(),
        "jvp of grad": (jvp(grad(alone), (xs[n],), (t,))[1] * t).sum(),
        "vmap of jvp of jvp": vmap(lambda x: jvp(slope, (x,), (t,))[1])(torch.stack([xs[n], xs[n]]))[1],
    }
    for way, value in again.items():
        torch.testing.assert_close(value, curvature, rtol=1e-5, atol=1e-7, msg=way)


@pytest.mark.parametrize("name", ["max", "received", regard.top(2)], ids=str)
def test_statistics_without_a_derivative_raise(name: Any) -> None:
    q = normal(2, 5, 3).requires_grad_()

    def values(q: torch.Tensor) -> torch.Tensor:
        found = regard.attention(q, q, q, observe=[name])[1][name]
        return found if isinstance(found, torch.Tensor) else found.values

    with pytest.raises(NotImplementedError, match=r"is not provided; .detach\(\) it"):
        values(q).sum().backward()
    with pytest.raises(NotImplementedError, match="is not provided"):
        jvp(values, (q.detach(),), (q.detach(),))
    out, _ = regard.attention(q, q, q, observe=[name])
    out.sum().backward()


def test_mass_names_what_differentiates_in_its_place() -> None:
    q, k, v, _, sink, _ = (x.requires_grad_() for x in inputs())
    rule = regard.mass(regard.window(1, 1))
    _, seen = regard.attention(q, k, v, sink=sink, observe=["lse", rule])
    with pytest.raises(NotImplementedError) as told:
        seen[rule].sum().backward()
    assert str(told.value) == (
        "regard.attention: the derivative of 'mass' is not provided; .detach() it, or differentiate its logarithm, "
        "part.lse - seen.lse, where _, part = regard.attention(..., mask=mask & rule, sink=None, observe=['lse'])"
    )

    def log_mass(q: torch.Tensor, k: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        _, seen = regard.attention(q, k, v, sink=sink, observe=["lse"])
        _, part = regard.attention(q, k, v, mask=regard.window(1, 1), observe=["lse"])
        return part.lse - seen.lse

    torch.testing.assert_close(log_mass(q, k, sink).exp(), seen[rule])
    assert gradcheck(log_mass, (q, k, sink), check_forward_ad=True)
    assert gradgradcheck(log_mass, (q, k, sink), fast_mode=True)


def test_weights_differentiate() -> None:
    q, k, v, bias, sink, _ = (x.requires_grad_() for x in inputs())

    def weights(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        options = {"bias": bias, "sink": sink, "mask": regard.window(2, 1), "dropout": 0.5}
        return regard.attention(q, k, v, return_weights=True, **options)[1]

    assert gradcheck(weights, (q, k, bias, sink), check_forward_ad=True)
    assert gradgradcheck(weights, (q, k, bias, sink), fast_mode=True)
    with pytest.raises(NotImplementedError, match=r"regard\.weights does not differentiate, and key requires grad"):
        regard.weights(q.detach(), k)


def test_merge_differentiates() -> None:
    q, k, v, _, sink, _ = (x.requires_grad_() for x in inputs())

    def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = []
        for keys in (slice(0, 1), slice(1, 4)):
            out, seen = regard.attention(q, k[:, keys], v[:, keys], observe=["lse"], causal=True, offset=-1)
            parts.append((out, seen.lse))
        out, lse = regard.merge(*parts, sink=sink)
        return out, lse

    whole, seen = regard.attention(q, k, v, sink=sink, causal=True, offset=torch.tensor(-1), observe=["lse"])
    parts = [
        regard.attention(q, k[:, s], v[:, s], causal=True, offset=-1, origin=(0, 0, s.start), observe=["lse"])
        for s in (slice(0, 1), slice(1, 4))
    ]
    out, lse = regard.merge(*((out, seen.lse) for out, seen in parts), sink=sink)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, seen.lse)
    assert gradcheck(merged, (q, k, v, sink), check_forward_ad=True)
    hidden, dead = torch.full((2, 5, 2), torch.nan), torch.full((2, 5), -torch.inf)
    assert torch.equal(regard.merge((hidden.double(), dead.double()), (whole, seen.lse))[0], whole)


# vmap


BATCH = 3


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 1, 0), (2, 0, None), (-1, -2, 1)], ids=str)
@pytest.mark.parametrize("name", ["plain", "everything", "broadcast leading dimensions", "prefix", "positions first"])
def test_vmap_is_a_loop(name: str, dims: tuple[int | None, ...]) -> None:
    attention, tensors, _, _ = call(smaller(case(name)), observe=["lse", "entropy"])
    tensors, rest = tensors[:3], tensors[3:]
    stacked = [
        x if d is None else torch.stack([x + n for n in range(BATCH)], d) for x, d in zip(tensors, dims, strict=True)
    ]
    every = [x.unbind(d) if d is not None else [x] * BATCH for x, d in zip(stacked, dims, strict=True)]

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flat(attention(q, k, v, *rest))

    def g(*xs: torch.Tensor) -> torch.Tensor:
        out, _, entropy = f(*xs)
        return out.square().sum() + entropy.sum()

    for function in (f, grad(g, (0, 1, 2))):
        found = vmap(function, dims)(*stacked)
        for n in range(BATCH):
            for got, expected in zip(found, function(*(x[n] for x in every)), strict=True):
                torch.testing.assert_close(got[n], expected)


def test_vmap_over_everything_else() -> None:
    """Biases, sinks, tables, masks, offsets; nested; and matrices, whose batch becomes that of one head each."""
    xs = inputs()
    for n in (3, 4, 5):
        many = torch.stack([xs[n], 2 * xs[n], -xs[n]])
        found = vmap(everything, tuple(0 if m == n else None for m in range(6)))(*xs[:n], many, *xs[n + 1 :])
        for one, got in zip(many, zip(*found, strict=True), strict=True):
            for x, expected in zip(got, everything(*xs[:n], one, *xs[n + 1 :]), strict=True):
                torch.testing.assert_close(x, expected)
    q, k, v = xs[:3]
    masks, offsets = torch.rand(3, 5, 4) < 0.6, torch.tensor([0, 1, -2])

    def masked(mask: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, k, v, mask=regard.window(3, 3) & mask, causal=True, offset=offset)

    found = vmap(masked)(masks, offsets)
    assert torch.equal(found, torch.stack([masked(m, o) for m, o in zip(masks, offsets, strict=True)]))
    nested = vmap(vmap(lambda q, k: regard.attention(q, k, k), (0, None)), (None, 0))(
        normal(2, 3, 5, 4), normal(3, 3, 6, 4)
    )
    assert nested.shape == (3, 2, 3, 5, 4)
    x = normal(3, 5, 4)
    assert torch.equal(
        vmap(lambda x: regard.attention(x, x, x, causal=True))(x), regard.attention(x, x, x, causal=True)
    )


def test_rules_do_not_see_the_axis_that_vmap_took() -> None:
    x = normal(3, 2, 1, 6, 4)
    mask = regard.padding(np.array([2, 5]))
    found = vmap(lambda x: regard.attention(x, x, x, mask=mask))(x)
    assert torch.equal(found, torch.stack([regard.attention(y, y, y, mask=mask) for y in x]))
    with pytest.raises(ValueError, match="lengths of padding covers batch index 0 to 1, but this call reaches"):
        vmap(lambda x: regard.attention(x, x, x, mask=mask))(normal(2, 3, 1, 6, 4))
    heads = regard.alibi(np.ones(3))

    def call(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return regard.attention(x, x, x, **options)

    for function in (call, torch.func.grad(lambda x, **options: call(x, **options).sum())):
        for options in ({"mask": mask}, {"score": heads}):
            with pytest.raises(ValueError, match=r"but this call ends at .* 0, and no origin= places it"):
                vmap(vmap(partial(function, **options)))(x)
            vmap(vmap(partial(function, **options, origin=(0, 0, 0))))(x)


def test_rules_of_statistics_do_not_see_the_axis_that_vmap_took() -> None:
    flags, x = regard.table(np.array([[True] * 6, [True, False] * 3])), normal(3, 2, 1, 6, 4)
    for rule in (regard.padding([2, 4]), regard.mask(lambda b, h, i, j: flags[b, j])):
        mass = regard.mass(rule)
        function = partial(seen_of, mass)
        assert torch.equal(vmap(function)(x), torch.stack([function(each) for each in x]))


def seen_of(statistic: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = regard.attention(x, x, x, observe=[statistic])[1][statistic]
    return found


def test_randomness_governs_dropout() -> None:
    x = normal(3, 1, 6, 4).expand(3, 1, 6, 4)[:1].expand(3, 1, 6, 4)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, dropout=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(dropped)(x)
    same, different = vmap(dropped, randomness="same")(x), vmap(dropped, randomness="different")(x)
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])
    seeded = vmap(lambda x: regard.attention(x, x, x, dropout=0.5, seed=4))(x)
    assert torch.equal(seeded[2], regard.attention(x[2], x[2], x[2], dropout=0.5, seed=4))


def test_the_vmap_of_before() -> None:
    """With which PyTorch batches gradients and its functional Jacobians and Hessians."""
    xs = [x.requires_grad_() for x in inputs()]
    outs = everything(*xs)
    cotangents = [normal(BATCH, *x.shape) for x in outs]
    found = torch.autograd.grad(outs, xs, cotangents, is_grads_batched=True, create_graph=True)
    for n in range(BATCH):
        expected = torch.autograd.grad(outs, xs, [c[n] for c in cotangents], create_graph=True)
        for got, x in zip(found, expected, strict=True):
            torch.testing.assert_close(got[n], x)
        second, exact = (
            torch.autograd.grad(sum((g.square().sum() for g in gs), start=torch.zeros(())), xs, retain_graph=True)
            for gs in ([x[n] for x in found], expected)
        )
        for got, x in zip(second, exact, strict=True):
            torch.testing.assert_close(got, x)
    q = normal(1, 2, 2)

    def alone(q: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q)

    def squares(q: torch.Tensor) -> torch.Tensor:
        return alone(q).square().sum()

    for strategy in ("reverse-mode", "forward-mode"):
        options = {"vectorize": True, "strategy": strategy}
        torch.testing.assert_close(torch.autograd.functional.jacobian(alone, q, **options), jacrev(alone)(q))
    for strategy in ("reverse-mode", "forward-mode"):
        found = torch.autograd.functional.hessian(squares, q, vectorize=True, outer_jacobian_strategy=strategy)
        torch.testing.assert_close(found, hessian(squares)(q))
    assert gradcheck(
        alone, q.requires_grad_(), check_batched_grad=True, check_batched_forward_grad=True, check_forward_ad=True
    )
    assert gradgradcheck(alone, q, check_batched_grad=True, check_fwd_over_rev=True)


@pytest.mark.engine("cpu")
def test_per_sample_gradients() -> None:
    x, slopes = normal(4, 2, 5, 3), normal(2).abs()

    def one(slopes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return regard.attention(x, x, x, score=regard.alibi(slopes), causal=True).square().sum()

    found = vmap(grad(one), (None, 0))(slopes, x)
    assert torch.equal(found, torch.stack([grad(one)(slopes, y) for y in x]))


@pytest.mark.engine("cpu")
def test_what_requires_no_grad_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bias and of a table, whose gradient may be as large as all scores; in forward mode they still have one."""
    q, bias, slopes = normal(2, 5, 4), normal(2, 5, 5), normal(2).abs()
    made: list[tuple[bool, int]] = []
    engine = engines()["cpu"]
    backward = engine.backward

    def watched(*args: Any) -> Any:
        g = backward(*args)
        made.append((g.bias is not None, len(g.tables)))
        return g

    monkeypatch.setattr(engine, "backward", watched)

    def call(q: torch.Tensor, bias: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        return regard.attention(q, q, q, bias=bias, score=regard.alibi(slopes))

    traced = torch.compile(call, backend="aot_eager", fullgraph=True)
    q.requires_grad_()
    gradients = [torch.autograd.grad(f(q, bias, slopes).square().sum(), q)[0] for f in (call, traced)]
    inputs = q, bias.clone().requires_grad_(), slopes.clone().requires_grad_()
    gradients += [torch.autograd.grad(f(*inputs).square().sum(), inputs)[0] for f in (call, traced)]
    assert made == [(False, 0), (False, 0), (True, 1), (True, 1)]
    for x in gradients:
        assert torch.equal(x, gradients[0])
    q = q.detach()
    with forward_ad.dual_level():
        for n, dual in ((1, forward_ad.make_dual(bias, normal(2, 5, 5))), (2, forward_ad.make_dual(slopes, normal(2)))):
            given = [q, bias, slopes]
            given[n] = dual
            assert forward_ad.unpack_dual(call(*given)).tangent.any()
    for n in (1, 2):
        assert grad(lambda *x: call(*x).square().sum(), argnums=n)(q, bias, slopes).any()
