"""What users of FlexAttention write in a score or a mask, in rules as it is, in float64 with two derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import regard
from flex_dense import dense

pytestmark = pytest.mark.engine("tiled")

B, H, N, D = 2, 4, 12, 5
Rule = Callable[..., Any]
GENERATOR = torch.Generator().manual_seed(3)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


HEADS, BIAS, ROWS, LAST = normal(H), normal(H, 2 * N), normal(B, N, 3), normal(3)
IDS = torch.randint(0, 3, (B, N), generator=GENERATOR)
BOUNDS = torch.tensor([[0, 4], [4, 9], [9, 12]])
TOP = torch.randint(0, 3, (B, H, 4, 2), generator=GENERATOR)
FLAGS = torch.arange(N) % 3 == 0
MEMBERS = torch.tensor([0, 2, 5, 11])

# Scores of (s, b, h, i, j). The tensors in `TRAINED` have gradients.
SCORES: dict[str, Rule] = {
    "2 ** x": lambda s, b, h, i, j: s * 2 ** (-8 * (h + 1) / H),
    "2.0 ** x": lambda s, b, h, i, j: s + 2.0 ** (0.3 * s),
    "1.7 ** x": lambda s, b, h, i, j: s + 1.7**s - 0.9 ** abs(i - j),
    "2 ** an integer": lambda s, b, h, i, j: s * (j % 2 ** (h + 1)),
    "4 ** an integer": lambda s, b, h, i, j: s - 4 ** (i % 3) * 0.1,
    "torch.pow": lambda s, b, h, i, j: torch.pow(2.0, s) + torch.pow(abs(i - j) * 0.1, 0.75),
    "x ** 1.5": lambda s, b, h, i, j: s.abs() ** 1.5 - 0.01 * abs(i - j) ** 1.5,
    "x ** 0.7": lambda s, b, h, i, j: (s * s + 0.5) ** 0.7 - 0.1 * abs(i - j) ** 0.7,
    "x ** -1.5": lambda s, b, h, i, j: (1 + abs(i - j)) ** -1.5 * s + (s * s + 1) ** -0.3,
    "exp2": lambda s, b, h, i, j: s + torch.exp2(-((h + 1) * 8.0 / H)) * (j - i) + torch.exp2(0.2 * s),
    "special.exp2": lambda s, b, h, i, j: torch.special.exp2(0.2 * s) + s.exp2(),
    "erf": lambda s, b, h, i, j: s + torch.erf(s) + s.erf() + torch.special.erf(2 * s),
    "gelu": lambda s, b, h, i, j: torch.log(F.gelu(s) + 1),
    "gelu, tanh": lambda s, b, h, i, j: F.gelu(s, approximate="tanh"),
    "silu": lambda s, b, h, i, j: F.silu(3 * s),
    "softplus": lambda s, b, h, i, j: F.softplus(s) + F.softplus(s * 30) + F.softplus(s, beta=2, threshold=3),
    "elu": lambda s, b, h, i, j: F.elu(s) + F.elu(3 * s, alpha=0.4),
    "leaky_relu": lambda s, b, h, i, j: F.leaky_relu(s) + F.leaky_relu(s - 0.2, 0.3),
    "hardtanh": lambda s, b, h, i, j: F.hardtanh(s * s * s, -0.5, 0.7),
    "logsigmoid": lambda s, b, h, i, j: F.logsigmoid(s) + F.logsigmoid(50 * s),
    "relu at 0": lambda s, b, h, i, j: torch.relu(torch.where(i > j, s, 0 * s)) + s,
    "tensor[h]": lambda s, b, h, i, j: s + HEADS[h],
    "tensor[h, i - j + n]": lambda s, b, h, i, j: s + BIAS[h, i - j + N - 1],
    "tensor[ids[b, i]]": lambda s, b, h, i, j: s * BIAS[h, IDS[b, i] * 3 + IDS[b][j]],
    "two axes in turn": lambda s, b, h, i, j: s + ROWS[b][i][j % 3] * ROWS[b, i, 2],
    "an axis in the middle": lambda s, b, h, i, j: s * ROWS[b, :, 1][j] + ROWS[..., 0][b, i],
    "dot of rows": lambda s, b, h, i, j: s + 0.3 * torch.dot(ROWS[b, i], ROWS[b, j]),
    "rows @ rows": lambda s, b, h, i, j: s + 0.3 * (ROWS[b, i] @ ROWS[b, j]),
    "sum of a row": lambda s, b, h, i, j: s * ROWS[b, j].sum() + torch.sum(ROWS[b, i] * LAST, dim=-1),
    "tensor * row": lambda s, b, h, i, j: s + (LAST * ROWS[b, j]).mean() - (s * ROWS[b, i]).sum(dim=-1),
    "distance of rows": lambda s, b, h, i, j: s - (ROWS[b, i] - ROWS[b, j]).pow(2).sum(),
    "max of a row": lambda s, b, h, i, j: s + ROWS[b, j].amax() * ROWS[b, i].amin(dim=0) + torch.prod(ROWS[b, i]),
    "functions of a row": lambda s, b, h, i, j: s * torch.sigmoid(ROWS[b, i]).sum() + F.gelu(ROWS[b, j]).sum(),
    "a cast of a row": lambda s, b, h, i, j: s + TOP[b, h, j // 3].float().sum() * 0.1,
}  # fmt: skip
TRAINED = [HEADS, BIAS, ROWS, LAST]

MASKS: dict[str, Rule] = {
    "and_masks": and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: IDS[b, i] == IDS[b, j]),
    "or_masks": or_masks(lambda b, h, i, j: i == j, lambda b, h, i, j: IDS[b, j] == 1),
    "nested": and_masks(noop_mask, or_masks(noop_mask, lambda b, h, i, j: i >= j), lambda b, h, i, j: i - j < 4),
    "noop_mask": noop_mask,
    "and_masks of nothing": and_masks(),
    "or_masks of one": or_masks(lambda b, h, i, j: i >= j),
    "new_ones": lambda b, h, i, j: (i >= j) & b.new_ones((), dtype=torch.bool) | i.new_zeros(size=()).bool(),
    "row, then element": lambda b, h, i, j: (i >= BOUNDS[IDS[b, j]][0]) & (i < BOUNDS[IDS[b, j]][1]) | (i == j),
    "unpacked row": lambda b, h, i, j: (lambda lo, hi: (j >= lo) & (j < hi))(*BOUNDS[i // 4]),
    "any over an axis": lambda b, h, i, j: (TOP[b, h, i // 3] == (j // 4).unsqueeze(-1)).any(dim=-1) | (i == j),
    "all over an axis": lambda b, h, i, j: (TOP[b, h, i // 3] != j // 4).all() | (i == j),
    "torch.any": lambda b, h, i, j: torch.any(TOP[b, h, i // 3] == j // 4, dim=-1, keepdim=True).all(-1) | (i == j),
    "sum of flags": lambda b, h, i, j: (TOP[b, h, i // 3] == j // 4).sum() < 2,
    "flags": lambda b, h, i, j: FLAGS[i] | FLAGS[j] | ((i - j).abs() <= 1),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _floats_of_indices_are_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, N, D, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


@pytest.fixture
def trained() -> Iterator[list[torch.Tensor]]:
    """The tensors of scores, which have gradients meanwhile."""
    for x in TRAINED:
        x.requires_grad_()
    yield TRAINED
    for x in TRAINED:
        x.requires_grad_(False)


def gradients(x: Any, inputs: list[torch.Tensor], **options: bool) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(x, inputs, materialize_grads=True, **options)


def agree(ours: torch.Tensor, theirs: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare outputs, and two derivatives in all inputs that either depends on."""
    torch.testing.assert_close(ours, theirs)
    first = [gradients(x.square().sum(), inputs, create_graph=True) for x in (ours, theirs)]
    for found, expected in zip(*first, strict=True):
        torch.testing.assert_close(found, expected)
    along = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in inputs]
    second = [gradients(sum((x * t).sum() for x, t in zip(grads, along, strict=True)), inputs) for grads in first]
    for found, expected in zip(*second, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, operands: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
    ours = regard.attention(*operands, score=SCORES[name])
    agree(ours, dense(*operands, SCORES[name]), [*operands, *trained])


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, operands: list[torch.Tensor]) -> None:
    agree(regard.attention(*operands, mask=MASKS[name]), dense(*operands, None, MASKS[name]), operands)


def test_isin(operands: list[torch.Tensor]) -> None:
    """PyTorch has no batching rule for it, so the masks are computed of all indices."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    ids = IDS[:, None, None].expand(B, 1, N, N)
    top = TOP[:, :, i // 3].flatten(-2)[..., None, :] == (j // 4)[:, None]
    for rule, array in (
        (lambda b, h, i, j: torch.isin(j, MEMBERS), torch.isin(j, MEMBERS).expand(N, N)),
        (lambda b, h, i, j: torch.isin(IDS[b, j], MEMBERS, invert=True), torch.isin(ids, MEMBERS, invert=True)),
        (lambda b, h, i, j: torch.isin(j // 4, TOP[b, h, i // 3]), top.any(-1)),
        (lambda b, h, i, j: torch.isin(j, 3) | (i >= j), (j == 3) | (i >= j)),
    ):
        visible = array | (i == j)
        ours = regard.attention(*operands, mask=regard.mask(rule) | (lambda b, h, i, j: i == j))
        assert torch.equal(ours, regard.attention(*operands, mask=visible))


@pytest.mark.parametrize("case", ["spec: gelu", "spec: x ** 1.5", "spec: dot of rows", "cpu: gelu"])
def test_other_engines(case: str, operands: list[torch.Tensor], trained: list[torch.Tensor]) -> None:
    engine: Any
    engine, name = case.split(": ")
    ours = regard.attention(*operands, score=SCORES[name], engine=engine)
    agree(ours, dense(*operands, SCORES[name]), [*operands, *trained])


def test_one_tensor_is_one_table() -> None:
    rule = regard.mask(lambda b, h, i, j: (IDS[b, i] == IDS[b, j]) & (IDS[b][0] >= 0))
    tables = {x.payload for x in regard.rules.order([rule.node]) if x.op == "gather"}
    assert len(tables) == 1


def test_an_index_beyond_a_tensor_is_that_of_its_end(operands: list[torch.Tensor]) -> None:
    ours = regard.attention(*operands, score=lambda s, b, h, i, j: s + HEADS[h + i - j])
    theirs = dense(*operands, lambda s, b, h, i, j: s + HEADS[(h + i - j).clamp(0, H - 1)])
    torch.testing.assert_close(ours, theirs)


WRONG: dict[str, tuple[Rule, type[Exception], str]] = {
    "negative": (lambda s, b, h, i, j: s + HEADS[-1] * BIAS[h, -1], IndexError,
                 r"index 1 of a table counts from 0, got -1; the last entry of shape \(4, 24\) is 23"),
    "negative, of a row": (lambda s, b, h, i, j: s + BIAS[h][-2], IndexError, "index 1 of a table counts from 0"),
    "a slice": (lambda s, b, h, i, j: s + BIAS[h, 1:4].sum(), TypeError, "takes whole axes of a table with :"),
    "too many": (lambda s, b, h, i, j: s + HEADS[h, i], TypeError, r"a table of shape \(4,\) takes 1 indices, got 2"),
    "a float": (lambda s, b, h, i, j: s + HEADS[h / 2], TypeError, "index 0 of a table must be an int, not float"),
    "a row as a score": (lambda s, b, h, i, j: s + ROWS[b, i], TypeError, "returned a TracedArray; a score must"),
    "a branch": (lambda s, b, h, i, j: s if (TOP[b, h, i] == j).any() else -s, TypeError, "has no truth value"),
    "a long row": (lambda s, b, h, i, j: s + torch.zeros(2, 5000)[b].sum(), ValueError,
                   r"at most 4,096 elements of a table, got a traced array of shape \(5000,\)"),
    "a matrix": (lambda s, b, h, i, j: s + torch.dot(ROWS[b], ROWS[b]), TypeError, "multiplies rows of one axis, got"),
    "a size": (lambda s, b, h, i, j: s + b.new_ones((2,)), TypeError, r"size must be \(\), got \(2,\)"),
    "a method": (lambda s, b, h, i, j: s + ROWS[b, i].cumsum(), AttributeError, "a row of a table has no 'cumsum'"),
    "a power": (lambda s, b, h, i, j: s ** s, TypeError, r"takes a finite number on one side at least; .* np.exp\(y"),
    "a negative base": (lambda s, b, h, i, j: (-2.0) ** s, TypeError, "the base of .* must be positive .*, got -2.0"),
    "an integer base": (lambda s, b, h, i, j: s * 3**i, TypeError, "must be a power of two, or a float"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_a_rule_cannot_do_says_so(name: str, operands: list[torch.Tensor]) -> None:
    rule, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        regard.attention(*operands, score=rule)
