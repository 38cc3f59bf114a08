"""Nested tensors in the place of PyTorch's function are each sequence by itself."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import regard.torch
from regard.torch import scaled_dot_product_attention as ours

pytestmark = [
    pytest.mark.engine("tiled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
THEIRS = F.scaled_dot_product_attention
LAYOUTS = [torch.strided, torch.jagged]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def sequences(layout: Any, lengths: tuple[int, ...], heads: int = 2, d: int = 8, holes: bool = False) -> torch.Tensor:
    """A leaf of (sequences, heads, n*, d), with rows of NaN between the sequences if there are holes."""
    if holes:
        begins = [1 + 3 * n + sum(lengths[:n]) for n in range(len(lengths) + 1)]
        rows = torch.full((begins[-1], heads, d), torch.nan, dtype=torch.float64)
        for begin, n in zip(begins, lengths, strict=False):
            rows[begin : begin + n] = normal(n, heads, d)
        return torch.nested.nested_tensor_from_jagged(
            rows.requires_grad_(), torch.tensor(begins), torch.tensor(lengths)
        ).transpose(1, 2)
    if layout is torch.strided:
        return torch.nested.nested_tensor([normal(heads, n, d) for n in lengths], requires_grad=True)
    rows = torch.nested.nested_tensor([normal(n, heads, d) for n in lengths], layout=layout, requires_grad=True)
    return rows.transpose(1, 2)


def each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    parts = zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
    return [THEIRS(q[None], k[None], v[None], **options)[0] for q, k, v in parts]


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> None:
    """The values of the sequences, the layout of query, and gradients of all three."""
    out, expected = ours(query, key, value, **options), each(query, key, value, **options)
    assert out.is_nested
    assert out.layout is query.layout
    for got, x in zip(out.unbind(), expected, strict=True):
        torch.testing.assert_close(got, x)
    weights = [torch.randn_like(x) for x in expected]
    given = list(dict.fromkeys((query, key, value)))
    found, wanted = (
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(parts, weights, strict=True)), given)
        for parts in (out.unbind(), expected)
    )
    for got, x in zip(found, wanted, strict=True):
        for a, b in zip(got.unbind(), x.unbind(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sequence_by_itself(layout: Any) -> None:
    q, k, v = (sequences(layout, x, d=d) for x, d in (((4, 1, 6), 8), ((5, 2, 3), 8), ((5, 2, 3), 7)))
    check(q, k, v)
    check(q, q, q, scale=0.3)
    check(q, q, q, is_causal=True)
    check(q, sequences(layout, (4, 0, 6)), sequences(layout, (4, 0, 6)))  # no keys: 0
    check(sequences(layout, (4, 6), 4), *(sequences(layout, (4, 6), 2) for _ in range(2)), enable_gqa=True)
    assert all((x == 0).all() for x in ours(q, k, v, dropout_p=1.0).unbind())
    torch.manual_seed(0)
    first = ours(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    again = ours(q, k, v, dropout_p=0.5)
    assert all(torch.equal(a, b) for a, b in zip(first.unbind(), again.unbind(), strict=True))


@pytest.mark.parametrize("holes", [(True, True), (True, False), (False, True)], ids=str)
def test_holes(holes: tuple[bool, bool]) -> None:
    """What lies between the sequences is not read, and is 0 in the output, which adds to query."""
    q = sequences(torch.jagged, (4, 1, 6), holes=holes[0])
    k, v = (sequences(torch.jagged, (5, 2, 3), holes=holes[1]) for _ in range(2))
    check(q, k, v)
    check(q, q, q, is_causal=True)
    out = ours(q, k, v)
    assert out.shape == q.shape
    for a, b in zip((out + q).unbind(), q.unbind(), strict=True):
        assert a.shape == b.shape
    if holes[0]:
        assert (out.values()[..., 0, :] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_a_batch_of_several_sizes(layout: Any, shape: tuple[int, ...]) -> None:
    q = torch.nested.nested_tensor([normal(n, *shape) for n in (4, 6)], layout=layout, requires_grad=True)
    check(q, q, q)
    assert ours(q, q, q).unbind()[1].shape == (6, *shape)


def test_matrices_and_heads_that_differ() -> None:
    q = torch.nested.nested_tensor([normal(4, 8), normal(6, 8)], requires_grad=True)
    check(q, q, q)
    q = torch.nested.nested_tensor([normal(2, 4, 8), normal(3, 5, 8)], requires_grad=True)
    check(q, q, q)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors(layout: Any) -> None:
    q, k = sequences(layout, (4, 6)), sequences(layout, (4, 5))
    dense = normal(2, 2, 4, 8)
    names = {torch.strided: "strided", torch.jagged: "jagged"}
    kind = {torch.strided: RuntimeError, torch.jagged: ValueError}[layout]
    message = "Expected query, key, and value to be nested tensors of one layout, but got "
    for given in ((dense, q, q), (q, dense, dense), (q, q, dense)):
        with pytest.raises(kind):
            THEIRS(*given)
        kinds = [names[layout] if x.is_nested else "dense" for x in given]
        text = f"{message}query {kinds[0]}, key {kinds[1]}, value {kinds[2]}"
        with pytest.raises(kind, match=f"^{text}$"):
            ours(*given)
    with pytest.raises(kind, match=r"^Explicit attn_mask is not supported with nested tensors$"):
        ours(q, q, q, torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(kind, match=r"^Expected query, key, and value to have the same dtype, but got "):
        ours(q, q.float(), q)
    for given, text in (
        ((q, sequences(layout, (4,)), sequences(layout, (4,))), "^The batches differ: query 2, key 1, value 1$"),
        ((q, k, q), "^key and value must have the same "),
        ((q, sequences(layout, (4, 6), 3), sequences(layout, (4, 6), 3)), "^The heads of "),
    ):
        for function in (THEIRS, ours):
            with pytest.raises(RuntimeError, match=text if function is ours else None):
                function(*given)
    with pytest.raises(RuntimeError, match=r"^is_causal needs the same lengths of query and key where they are nested"):
        ours(q, k, k, is_causal=True)
    if layout is torch.jagged:
        thin = torch.nested.nested_tensor([normal(4, 8), normal(6, 8)], layout=layout)
        with pytest.raises(ValueError, match=r"^Jagged tensors must be \(sequences, heads, n\*, d\), or \(sequences, "):
            ours(thin, thin, thin)


def test_autocast() -> None:
    for layout in LAYOUTS:
        q = torch.nested.nested_tensor([torch.randn(2, 4, 8)] * 2, layout=layout)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert ours(q, q.bfloat16(), q).dtype is torch.bfloat16


def test_in_a_graph_that_may_break() -> None:
    torch._dynamo.reset()
    q = sequences(torch.jagged, (4, 6)).detach()
    out = torch.compile(ours, backend="eager")(q, q, q)
    for got, x in zip(out.unbind(), each(q, q, q), strict=True):
        torch.testing.assert_close(got, x)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_multihead_attention_in_eval(need_weights: bool, average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)])
    options = {"need_weights": need_weights, "average_attn_weights": average}
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(regard.torch.dropins.functional, "scaled_dot_product_attention", counted)
    with torch.inference_mode():
        out, weights = model(x, x, x, **options)
        with regard.torch.sdpa():
            found, seen = model(x, x, x, **options)
            with pytest.raises(AssertionError, match="does not support NestedTensor"):
                model(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    assert len(calls) == (0 if need_weights else 2)
    for got, expected in zip(found.unbind(), out.unbind(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (seen is None) == (weights is None)
    if need_weights:
        assert seen.shape == weights.shape
        for n, got, expected in zip((3, 5), seen, weights, strict=True):
            torch.testing.assert_close(got[..., :n, :n], expected[..., :n, :n], atol=1e-5, rtol=1e-5)


@pytest.mark.engine("cpu")
def test_an_encoder_in_eval() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    forward = torch.nn.MultiheadAttention.forward
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)])
    with torch.inference_mode():
        expected = model(x)
        with regard.torch.sdpa():
            found = model(x)
    for got, y in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(got, y, atol=1e-5, rtol=1e-5)
    assert torch.nn.MultiheadAttention.forward is forward
