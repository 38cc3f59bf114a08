"""`linear_attention` and `multihead_attention` on tensors, beside NumPy's."""

from typing import Any

import numpy as np
import pytest

import regard
from linear_cases import KEYS, MASKS, N_K, N_Q
from regard.ops.linear import RandomFeatures

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'regard[transformers]'")

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return torch.from_numpy(RNG.standard_normal(shape))


def close(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.detach().double(), np.asarray(expected, float), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", ["elu", "relu", "softmax", RandomFeatures(6, 1)], ids=str)
def test_linear_attention(feature_map: Any, causal: bool) -> None:
    """In values, autograd, forward mode and vmap; also where keys are large."""
    q, k, v = normal(2, 4, 11, 3), normal(1, 2, 19, 3), normal(2, 2, 19, 5)
    options: Any = {"feature_map": feature_map, "causal": causal}
    for scale in (1, 30):
        expected = regard.linear_attention(scale * q.numpy(), scale * k.numpy(), v.numpy(), **options)
        close(regard.linear_attention(scale * q, scale * k, v, **options, chunk=4), expected)

    def call(q: Any, k: Any, v: Any) -> Any:
        return regard.linear_attention(q, k, v, **options, chunk=4)

    few = tuple(x[:1, :1].contiguous().requires_grad_() for x in (q, k, v))
    close(torch.vmap(call, (0, None, 0))(q, k[0], v), call(q, k, v).detach())
    if feature_map != "relu":  # which has kinks
        assert torch.autograd.gradcheck(call, few, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_linear_attention(mask: str, causal: bool) -> None:
    """In values, autograd and forward mode; also where keys are large, or hidden and not finite."""
    q, k, v = normal(2, 4, N_Q, 3), normal(2, 2, N_K, 3), normal(2, 2, N_K, 5)
    rule = MASKS[mask]
    for feature_map in ("elu", "relu", "softmax", "favor"):
        options: Any = {"feature_map": feature_map, "causal": causal}
        for scale in (1, 30):
            expected = regard.linear_attention(scale * q.numpy(), scale * k.numpy(), v.numpy(), mask=rule, **options)
            given = torch.from_numpy(rule) if isinstance(rule, np.ndarray) else rule
            close(regard.linear_attention(scale * q, scale * k, v, mask=given, **options, chunk=4), expected)
    few = tuple(x.clone().requires_grad_() for x in (q, k, v))

    def call(q: Any, k: Any, v: Any) -> Any:
        return regard.linear_attention(q, k, v, mask=given, feature_map="softmax", causal=causal, chunk=4)

    assert torch.autograd.gradcheck(call, few, check_forward_ad=True, fast_mode=True)


@pytest.mark.parametrize("feature_map", ["elu", "softmax", "favor", torch.exp], ids=["elu", "softmax", "favor", "exp"])
def test_gradients_of_hidden_keys_are_zero(feature_map: Any) -> None:
    keep = torch.from_numpy(KEYS)
    q, k, v = (x.requires_grad_() for x in (normal(2, 4, N_Q, 3), normal(2, 2, N_K, 3), normal(2, 2, N_K, 5)))
    with torch.no_grad():
        for x in (k, v):
            x[~keep[:, :, 0].expand(2, 2, N_K)] = torch.inf
    for causal in (False, True):
        out = regard.linear_attention(q, k, v, mask=keep, feature_map=feature_map, causal=causal)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(g.isfinite().all() for g in (out, *gradients))
        assert not any(g[~keep[:, :, 0].expand(2, 2, N_K)].any() for g in gradients[1:])


def test_masks_in_graphs_and_vmap() -> None:
    q, k, v = normal(2, 4, N_Q, 3), normal(2, 2, N_K, 3), normal(2, 2, N_K, 5)
    keep = torch.from_numpy(KEYS)

    def call(q: Any, k: Any, v: Any, keep: Any) -> Any:
        return regard.linear_attention(q, k, v, mask=keep, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    close(compiled(q, k, v, keep), call(q, k, v, keep))
    close(compiled(q, k, v, ~keep), call(q, k, v, ~keep))
    close(torch.vmap(call)(q, k, v, keep), call(q, k, v, keep))


@pytest.mark.engine("cpu")
def test_multihead_attention() -> None:
    x, y = normal(2, 5, 12), normal(2, 7, 10)
    weights = {"w_q": normal(12, 8), "w_k": normal(10, 4), "w_v": normal(10, 6), "w_o": normal(12, 3)}
    weights |= {"b_q": normal(8), "b_v": normal(6), "b_o": normal(3)}

    def call(x: Any, y: Any, *arrays: Any) -> Any:
        named = dict(zip(weights, arrays, strict=True))
        return regard.multihead_attention(x, y, y, 4, num_kv_heads=2, **named, mask=regard.window(3, 3))

    inputs = [x, y, *weights.values()]
    expected = call(*(a.numpy() for a in inputs))
    close(call(*inputs), expected)
    close(torch.vmap(lambda x, y: call(x, y, *inputs[2:]))(x, y), expected)
    assert torch.autograd.gradcheck(call, [a.clone().requires_grad_() for a in inputs], fast_mode=True)
    out, seen = regard.multihead_attention(x, x, x, 4, observe=["lse"])
    assert seen.lse.shape == (2, 4, 5)
    half = [x.to(torch.bfloat16), torch.eye(12, dtype=torch.bfloat16)]
    out = regard.multihead_attention(half[0], half[0], half[0], 4, w_o=half[1])
    close(out, regard.multihead_attention(half[0], half[0], half[0], 4).double())


def test_what_is_no_tensor_is_named() -> None:
    x = normal(2, 5, 12)
    for call in (regard.linear_attention, lambda *x: regard.multihead_attention(*x, 4)):
        with pytest.raises(TypeError, match=r"^key must be a torch.Tensor where others of the call are, got numpy"):
            call(x, x.numpy(), x)


def test_hopfield() -> None:
    """In values, autograd, forward mode and vmap."""
    state, patterns = normal(3, 2, 6), normal(5, 6)

    def call(state: Any, patterns: Any) -> Any:
        return regard.hopfield(state, patterns, beta=1.3, steps=2)

    expected = call(state.numpy(), patterns.numpy())
    for found in (call(state, patterns), torch.vmap(call, (0, None), 1)(state, patterns)):
        close(found.states, expected.states)
        close(found.energies, expected.energies)
    inputs = [x.clone().requires_grad_() for x in (state, patterns)]
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    with pytest.raises(TypeError, match=r"patterns must be a torch\.Tensor where others of the call are"):
        regard.hopfield(state, patterns.numpy())


def test_renyi_entropies() -> None:
    q, k = normal(2, 5, 4), normal(2, 7, 4)
    observe: list[Any] = ["effective_states", regard.renyi(0.5), regard.renyi(2)]
    _, expected = regard.attention(q.numpy(), k.numpy(), k.numpy(), causal=True, observe=observe)
    _, found = regard.attention(q, k, k, causal=True, observe=observe)
    for s in observe:
        close(found[s], expected[s], 1e-14)
    one, two = (regard.attention(q, k, k, causal=True, scale=x, observe=["lse"])[1].lse for x in (0.5, 1.0))
    close(2 * one - two, expected[regard.renyi(2)], 1e-14)  # what differentiates
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="the derivative of 'renyi' is not provided"):
        regard.attention(q, k, k, observe=observe)[1][observe[1]].sum().backward()


def test_effective_states_differentiate() -> None:
    """In every mode, by the exponential of the entropy, whatever else is observed."""
    q, k, sink = normal(2, 5, 4), normal(2, 7, 4), normal(2)

    def call(q: torch.Tensor, k: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        _, seen = regard.attention(q, k, k, sink=sink, observe=["argmax", "effective_states", "lse"])
        assert [s.name for s in seen] == ["argmax", "effective_states", "lse"]
        return seen.effective_states

    inputs = [x.requires_grad_() for x in (q, k, sink)]
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)
    both = regard.attention(q, k, k, observe=["effective_states", "entropy"])[1]
    close(both.effective_states, both.entropy.exp().detach())


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("shape", [(4, 6, 6), (6, 6)])
def test_a_metric(shape: tuple[int, ...], layout: Any) -> None:
    """In values, statistics, weights, steps, vmap and under autocast; its derivatives are among the cases."""
    q, k, v, M = normal(2, 4, 5, 6), normal(2, 2, 7, 6), normal(2, 2, 7, 3), normal(*shape)
    if layout == "bnhd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    options: Any = {"causal": True, "layout": layout}
    expected, seen = regard.attention(*(x.numpy() for x in (q, k, v)), metric=M.numpy(), observe=["lse"], **options)
    out, weights, found = regard.attention(q, k, v, metric=M, observe=["lse"], return_weights=True, **options)
    close(out, expected)
    close(found.lse, seen.lse)
    close(regard.weights(q, k, metric=M, lse=found.lse, **options), weights)
    close(torch.from_numpy(regard.steps(q, k, v, metric=M, **options)["output"].value.copy()), expected)
    many = torch.stack([M, 2 * M])
    twice = torch.vmap(lambda M: regard.attention(q, k, v, metric=M, **options))(many)
    close(twice[1], regard.attention(q, k, v, metric=2 * M, **options))
    with torch.autocast("cpu", torch.bfloat16):
        half = regard.attention(q.float(), k.float(), v.float(), metric=M.float(), **options)
    assert half.dtype is torch.bfloat16
    close(half, expected, 0.2)
    assert regard.plan(q, k, v, metric=M, **options) == regard.plan(q, k, v, **options)


def test_gradients_of_a_metric() -> None:
    """First and second ones beside those of a product of one's own, and in NumPy."""
    q, k, v, M, dout = normal(2, 5, 4), normal(2, 7, 4), normal(2, 7, 4), normal(2, 4, 4), normal(2, 5, 4)
    inputs = [x.requires_grad_() for x in (q, k, v, M)]

    def ours(q: Any, k: Any, v: Any, M: Any) -> Any:
        return regard.attention(q, k, v, metric=M)

    def own(q: Any, k: Any, v: Any, M: Any) -> Any:
        return torch.softmax(q @ M @ k.mT / 2, -1) @ v

    def second(call: Any) -> Any:
        first = torch.autograd.grad(call(*inputs), inputs, dout, create_graph=True)
        return *first, *torch.autograd.grad(sum((g**2).sum() for g in first), inputs)

    for got, expected in zip(second(ours), second(own), strict=True):
        close(got, expected.detach())
    g = regard.attention_vjp(*(x.detach().numpy() for x in (q, k, v)), dout.numpy(), metric=M.detach().numpy())
    for got, name in zip(second(ours), ("query", "key", "value", "metric"), strict=False):
        close(got, getattr(g, name))
    dM = normal(2, 4, 4)
    _, tangent = torch.func.jvp(lambda M: ours(q, k, v, M), (M,), (dM,))
    _, expected = torch.func.jvp(lambda M: own(q, k, v, M), (M,), (dM,))
    close(tangent, expected.detach())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metric": np.eye(6)}, "metric must be a torch.Tensor where others of the call are, got numpy.ndarray"),
        ({"metric": torch.eye(5)}, "metric must have shape (d, d) = (6, 6) or (h, d, d) = (2, 6, 6), got shape (5, 5)"),
    ],
)
def test_a_metric_that_is_refused(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        regard.attention(normal(2, 5, 6), normal(2, 5, 6), normal(2, 5, 6), **given)
    assert message in str(error.value)
