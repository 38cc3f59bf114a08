"""`linear_attention` and `multihead_attention` on tensors, beside NumPy's."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.ops.linear import RandomFeatures

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'regard[transformers]'")

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
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="the derivative of 'renyi' is not provided"):
        regard.attention(q, k, k, observe=observe)[1][observe[1]].sum().backward()
