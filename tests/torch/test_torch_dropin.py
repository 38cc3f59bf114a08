"""PyTorch's function with PyTorch's conventions, against PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import regard.torch
from regard.torch import scaled_dot_product_attention as ours

THEIRS = F.scaled_dot_product_attention


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


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_pytorch(name: str) -> None:
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
def test_pytorchs_errors(name: str) -> None:
    for function in (THEIRS, ours):
        with pytest.raises(RuntimeError):
            REFUSED[name](function)


def test_what_is_hidden_does_not_reach_the_output() -> None:
    """The one difference: PyTorch's result is NaN here, for one query or for all."""
    q, k, v = normal(4, 5, 8), normal(4, 5, 8), normal(4, 5, 8)
    k[:, 4] = v[:, 4] = torch.nan
    assert THEIRS(q, k, v, is_causal=True)[:, :4].isnan().any()
    assert not ours(q, k, v, is_causal=True)[:, :4].isnan().any()


def test_dropout_follows_the_generator() -> None:
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

    monkeypatch.setattr(regard.torch.dropin, "scaled_dot_product_attention", counted)
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
