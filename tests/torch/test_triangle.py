"""Triangle attention of protein models, and models whose modules use it."""

import sys
import types
from typing import Any

import pytest
import torch

import regard.torch
from dense import attention, same, scores
from regard.torch import triangle_attention
from support import on_cpu

pytestmark = [pytest.mark.engine("tiled"), pytest.mark.engine("tiled")]


def formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """cuequivariance's formula, with a constant in the place of the scores of hidden keys."""
    score = bias.add if mask is None else lambda s: torch.where(mask != 0, s + bias, -1e9)
    return attention(q, k, v, scale=scale, score=score)[0]


def operands(*lead: int, n_q: int = 7, n_k: int = 5, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Random q, k, v of rows of keys that differ in number from queries, and the bias that all rows share."""
    b, n, h = lead
    shapes = (b, n, h, n_q, 8), (b, n, h, n_k, 8), (b, n, h, n_k, 8), (b, 1, h, n_q, n_k)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks(batch: int, rows: int, n_k: int = 5) -> torch.Tensor:
    """A random mask whose first row has no key."""
    mask = torch.rand(batch, rows, 1, 1, n_k) > 0.3
    mask[:, 0] = False
    return mask


@pytest.mark.parametrize("dtype", on_cpu([None, torch.bool, torch.uint8, torch.float32], torch.bool))
def test_value_and_gradients_are_the_formula(dtype: torch.dtype | None) -> None:
    """Rows without keys included: their values alone have a gradient."""
    x = operands(2, 6, 2)
    mask = None if dtype is None else masks(2, 6).to(dtype)
    out, expected = triangle_attention(*x, mask), formula(*x, mask)
    same(out, expected, x)


def test_second_derivatives_pass_gradcheck() -> None:
    x, mask = operands(1, 2, 1, n_q=2, n_k=3), masks(1, 2, 3)
    assert torch.autograd.gradgradcheck(lambda *x: triangle_attention(*x, mask), x, fast_mode=True)


def test_four_dimensions_are_a_batch_of_one_as_in_the_package() -> None:
    x, mask = operands(1, 6, 2), masks(1, 6)
    out = triangle_attention(*(t[0] for t in x), mask[0])
    assert torch.equal(out, triangle_attention(*x, mask))


def test_lengths_are_prefixes_and_empty_rows_are_zero() -> None:
    x = operands(1, 4, 2)
    lengths = torch.tensor([0, 2, 5, 9], dtype=torch.int32).view(1, 4, 1, 1, 1)
    out, lse, largest = triangle_attention(*x, return_aux=True, kv_lengths=lengths)
    expected = formula(*x, torch.arange(5) < lengths)
    torch.testing.assert_close(out[:, 1:], expected[:, 1:])
    for zeros in out[:, 0], lse[:, 0], largest[:, 0]:
        assert not zeros.any()


def test_auxiliary_results_are_those_of_the_scores() -> None:
    x, mask = operands(2, 6, 2), masks(2, 6)
    out, lse, largest = triangle_attention(*x, mask, return_aux=True)
    expected = torch.where(mask, scores(x[0], x[1]) + x[3], -1e9).detach()
    torch.testing.assert_close(out, formula(*x, mask))
    torch.testing.assert_close(lse, expected.logsumexp(-1).float())
    torch.testing.assert_close(largest, expected.amax(-1).float())
    assert not lse.requires_grad
    assert not largest.requires_grad


@pytest.mark.engine("cpu")
def test_bias_gradient_has_the_same_bits_on_any_number_of_threads() -> None:
    x = operands(1, 40, 2, n_q=40, n_k=40, dtype=torch.float32)
    gradients = []
    for threads in 1, 2:
        torch.set_num_threads(threads)
        gradients.append(torch.autograd.grad(triangle_attention(*x).square().sum(), x[3])[0])
    assert torch.equal(*gradients)


def test_a_compiled_call_with_rows_without_keys() -> None:
    x, mask = operands(2, 6, 2), masks(2, 6)
    compiled = torch.compile(triangle_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*x, mask), formula(*x, mask))


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"k": torch.ones(1, 3, 1, 4, 7)}, ValueError, r"k must have shape \(1, 3, 1, 4, 8\), got \(1, 3, 1, 4, 7\)"),
        (
            {"bias": torch.ones(1, 3, 1, 3, 4)},
            ValueError,
            r"bias must have shape \(1, 1, 1, 3, 4\), got \(1, 3, 1, 3, 4\)",
        ),
        (
            {"mask": torch.ones(3, 4)},
            ValueError,
            r"mask must have 5 dimensions, or 4 for a batch of one, got shape \(3, 4\)",
        ),
        (
            {"mask": torch.ones(1, 3, 1, 1, 5)},
            ValueError,
            r"mask must have shape \(1, 3, 1, 1, 4\), got \(1, 3, 1, 1, 5\)",
        ),
        ({"kv_lengths": torch.ones(1, 3, 1, 1, 1).int(), "mask": torch.ones(1, 3, 1, 1, 4)}, ValueError, "got both"),
        ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    right = dict(zip(["q", "k", "v", "bias"], operands(1, 3, 1, n_q=3, n_k=4), strict=True))
    with pytest.raises(kind, match=text):
        triangle_attention(**(right | change))


def test_the_package_that_cuequivariance_imports_is_provided() -> None:
    """Of its functions it has the attention alone; what else it has is missing, as cuequivariance expects."""
    with regard.torch.stand_in("cuequivariance_ops_torch"):
        import cuequivariance_ops_torch as ops

        assert ops.triangle_attention is triangle_attention
        with pytest.raises(ImportError):
            from cuequivariance_ops_torch import TriMulPrecision  # noqa: F401


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> type[torch.nn.Module]:
    """A class that stands at the place of a package's, with the same attributes and its formula."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_hidden, self.projection = 4, torch.nn.Linear(8, 8)

        def _prep_qkv(self, q_x: torch.Tensor, kv_x: torch.Tensor, apply_scale: bool = True) -> list[torch.Tensor]:
            q, k, v = (self.projection(x).unflatten(-1, (2, 4)).transpose(-2, -3) for x in (q_x, kv_x, kv_x + 1))
            return [q / 2 if apply_scale else q, k, v]

        def _wrap_up(self, out: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
            return self.projection(out.flatten(-2) * q_x)

        def forward(
            self, q_x: torch.Tensor, kv_x: torch.Tensor, biases: list[torch.Tensor] | None = None, use_lma: bool = False
        ) -> torch.Tensor:
            q, k, v = self._prep_qkv(q_x, kv_x)
            out, _ = attention(q, k, v, scale=1.0, score=lambda s: s + sum(biases or []))
            return self._wrap_up(out.transpose(-2, -3), q_x)

    Attention.__module__, Attention.__qualname__ = name, "Attention"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return Attention


def test_adopt_replaces_modules_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks with a row that hides everything, one pair bias for all rows, and gradients of parameters."""
    cls = module_of("openfold3.core.model.primitives.attention", monkeypatch)
    model = torch.nn.Sequential(torch.nn.Identity(), cls()).double()
    x = torch.randn(2, 5, 6, 8, dtype=torch.float64)
    pair = torch.randn(2, 1, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    hide = (torch.rand(2, 5, 1, 1, 6) > 0.7).double() * -1e9
    hide[0, 0] = -1e9
    arguments = [model.projection.weight if hasattr(model, "projection") else model[1].projection.weight, pair]
    expected = model[1](x, x, [hide, pair])
    gradients = torch.autograd.grad(expected[:, 1:].square().sum(), arguments)
    names = list(model.state_dict())
    assert regard.torch.adopt(model) == ["1"]
    out = model[1](x, x, [hide, pair], use_lma=True)
    torch.testing.assert_close(out[:, 1:], expected[:, 1:])
    for ours, theirs in zip(torch.autograd.grad(out[:, 1:].square().sum(), arguments), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert names == list(model.state_dict())
    with pytest.raises(ValueError, match="must be a mask"):
        model[1](x, x, [hide / 1e9])
    del model[1].forward
    assert torch.equal(model[1](x, x, [hide, pair]), expected)


def test_adopt_refuses_what_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = module_of("boltz.model.layers.triangular_attention.primitives", monkeypatch)
    with pytest.raises(ValueError, match=r"primitives.Attention.forward has parameters .* not know: biases, use_lma"):
        regard.torch.adopt(cls())
    with pytest.raises(ValueError, match=r"no attention of Boltz or OpenFold-3, got torch.nn.modules.linear.Linear"):
        regard.torch.adopt(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        regard.torch.adopt(3)  # type: ignore[arg-type]
