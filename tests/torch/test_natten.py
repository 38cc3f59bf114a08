"""NATTEN's functions against dense attention in float64, and against NATTEN where it is installed."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import regard.torch
from dense import attention, same
from grids import dense
from regard.torch.dropins import natten_grid
from regard.torch.natten import NeighborhoodAttention1D, NeighborhoodAttention2D, na1d, na2d, na3d
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

Tensor = torch.Tensor
INSTALLED = importlib.util.find_spec("natten") is not None


class Windows(NamedTuple):
    shape: tuple[int, ...]
    kernel_size: Any
    stride: Any = 1
    dilation: Any = 1
    is_causal: Any = False

    def options(self) -> dict[str, Any]:
        return {key: x for key, x in self._asdict().items() if key != "shape"}

    def mask(self) -> Tensor:
        """(n, n) booleans, by enumeration."""
        each = [x if isinstance(x, tuple) else (x,) * len(self.shape) for x in self[1:]]
        return torch.from_numpy(dense(self.shape, *each))


GRIDS = {
    "1-D": Windows((11,), 4),
    "1-D, causal, stride": Windows((13,), 5, 3, 2, True),
    "1-D, whole window": Windows((6,), 6),
    "2-D": Windows((7, 5), 3),
    "2-D, even kernel": Windows((8, 5), (4, 2)),
    "2-D, all options": Windows((9, 11), (3, 4), (2, 1), (3, 2), (False, True)),
    "3-D": Windows((4, 5, 3), (3, 2, 3)),
    "3-D, all options": Windows((4, 5, 6), (2, 3, 3), (1, 3, 2), (2, 1, 2), (True, False, True)),
}
BLOCKED = Windows((10, 13), (5, 6), (2, 3), 1, (False, True))
NAMES = {1: na1d, 2: na2d, 3: na3d}


@pytest.fixture(autouse=True)
def small_grids_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk the grid of `BLOCKED` in blocks, and dilated ones in groups."""
    monkeypatch.setattr(natten_grid, "LEAST", 10)
    monkeypatch.setattr(natten_grid, "SPREAD", 1)


def operands(grid: Windows, h: int = 4, h_kv: int = 2, d: int = 5, d_v: int = 3) -> list[Tensor]:
    return [
        torch.randn(2, *grid.shape, heads, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((h, d), (h_kv, d), (h_kv, d_v))
    ]


def additional(h_kv: int = 2, d: int = 5, d_v: int = 3) -> list[Tensor]:
    return [torch.randn(2, 7, h_kv, size, dtype=torch.float64, requires_grad=True) for size in (d, d_v)]


def reference(grid: Windows, q: Tensor, k: Tensor, v: Tensor, *more: Tensor, scale: float | None = None) -> Any:
    """Out and lse by a dense softmax over all keys of the grid, and additional ones."""
    mask = grid.mask()
    flat = [x.flatten(1, -3) for x in (q, k, v)]
    if more:
        flat[1:] = [torch.cat(pair, 1) for pair in zip(flat[1:], more, strict=True)]
        mask = torch.cat([mask, mask.new_ones(len(mask), more[0].shape[1])], 1)
    out, lse = attention(*flat, scale=scale, visible=mask, layout="bnhd")
    return out.reshape(*q.shape[:-1], -1), lse.transpose(1, 2).reshape(q.shape[:-1])


def called(grid: Windows, *x: Tensor, **options: Any) -> Any:
    more = dict(zip(("additional_keys", "additional_values"), x[3:], strict=False))
    return NAMES[len(grid.shape)](*x[:3], **grid.options(), **more, **options)


@pytest.mark.parametrize("extra", [False, True], ids=["", "additional keys"])
@pytest.mark.parametrize("name", on_cpu([*GRIDS, "blocks"], "1-D", "2-D, all options"))
def test_outputs_and_gradients(name: str, extra: bool) -> None:
    grid = GRIDS.get(name, BLOCKED)
    x = operands(grid) + (additional() if extra else [])
    ours, theirs = called(grid, *x, scale=0.4, return_lse=True), reference(grid, *x, scale=0.4)
    same(ours, theirs, x)


@pytest.mark.parametrize("name", ["2-D, all options", "3-D, all options", "blocks"])
def test_second_derivatives_and_jvp(name: str) -> None:
    grid = GRIDS.get(name, BLOCKED)
    x = operands(grid, h=1, h_kv=1, d=2, d_v=2) + additional(h_kv=1, d=2, d_v=2)
    tangents = tuple(torch.randn_like(y) for y in x)

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *y: function(grid, *y)[0].square().sum()

    def out(*y: Tensor) -> Any:
        return called(grid, *y, return_lse=True)

    for function in (called, reference):
        assert loss(function)(*x).isfinite()
    jvps = [torch.func.jvp(f, tuple(x), tangents)[1] for f in (out, lambda *y: reference(grid, *y))]
    for y, z in zip(*jvps, strict=True):
        torch.testing.assert_close(y, z)
    hvps = []
    for f in (out, lambda *y: reference(grid, *y)):
        first = torch.autograd.grad(sum(y.square().sum() for y in f(*x)), x, create_graph=True)
        hvps.append(torch.autograd.grad(first, x, tangents))
    for y, z in zip(*hvps, strict=True):
        torch.testing.assert_close(y, z)


@pytest.mark.parametrize("name", ["2-D", "blocks"])
def test_what_no_window_has_changes_nothing(name: str) -> None:
    grid = GRIDS.get(name, BLOCKED)
    q, k, v = (x.detach() for x in operands(grid))
    expected = called(grid, q, k, v)
    k[:, 2, 3], v[:, 2, 3] = torch.nan, torch.inf
    blind = ~grid.mask()[:, 2 * grid.shape[1] + 3].reshape(grid.shape)
    out = called(grid, q, k, v)
    assert torch.equal(out[:, blind], expected[:, blind])
    assert out[:, ~blind].isnan().all()


def test_defaults_of_scale_and_of_arguments() -> None:
    grid = GRIDS["2-D"]
    x = operands(grid)
    expected = called(grid, *x)
    torch.testing.assert_close(expected, reference(grid, *x)[0])
    assert torch.equal(na2d(*x, 3, None, None, None, 0.0), expected)
    ignored = {"backend": "cutlass-fna", "q_tile_shape": (8, 8), "kernel_schedule": "pp", "torch_compile": True}
    assert torch.equal(na2d(*x, (3, 3), attention_kwargs={"backend": "flex-fmha"}, **ignored), expected)


@pytest.mark.engine("cpu")
@pytest.mark.parametrize(
    ("name", "order"), [("blocks", "blocks"), ("2-D, all options", "groups"), ("3-D, all options", "groups")]
)
def test_the_order_of_rows_changes_nothing_else(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = GRIDS.get(name, BLOCKED)
    assert natten_grid.grid_of(grid.shape, **grid.options()).order == order
    x = operands(grid) + additional()
    out = called(grid, *x)
    monkeypatch.undo()
    assert natten_grid.grid_of(grid.shape, **grid.options()).order == "rows"
    torch.testing.assert_close(out, called(grid, *x))


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        (((48, 48), 3, 1, 1, False), "blocks"),
        (((47, 99), 3, 1, 1, False), "rows"),
        (((64, 64, 64), 3, 1, 1, False), "rows"),
        (((56, 56), 7, 1, 2, False), "groups"),
        (((56, 56), 3, 1, (1, 8), False), "rows"),
        (((4096,), 31, 1, 16, False), "groups"),
    ],
)
def test_the_order_of_grids(arguments: Any, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert natten_grid.grid_of(*arguments).order == order


def test_one_graph_for_grids_of_two_sizes() -> None:
    compiled = torch.compile(lambda *y: na2d(*y, 5, 2, return_lse=True), fullgraph=True, backend="eager")
    for shape in ((10, 13), (11, 6)):
        x = operands(Windows(shape, 5))
        for y, z in zip(compiled(*x), na2d(*x, 5, 2, return_lse=True), strict=True):
            torch.testing.assert_close(y, z)


def test_batches_of_a_transform() -> None:
    grid = BLOCKED
    x = [y.detach()[None].repeat(3, 1, 1, 1, 1, 1) for y in operands(grid, h=1, h_kv=1)]
    x[0] = x[0] * torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1, 1, 1, 1)
    out = torch.func.vmap(lambda *y: called(grid, *y))(*x)
    torch.testing.assert_close(out[2], called(grid, *(y[2] for y in x)))


X = torch.zeros(1, 6, 7, 2, 4)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kernel of one": ({"kernel_size": (3, 1)}, ValueError, "kernel_size must be at least 2, got 1"),
    "kernel of a float": ({"kernel_size": 3.0}, ValueError, "kernel_size must be an integer, got 3.0"),
    "kernels of three axes": ({"kernel_size": (3, 3, 3)}, ValueError, "kernel_size must be one value, or one for each"),
    "large kernel": ({"kernel_size": 7}, ValueError, "kernel_size times dilation must be at most shape, 6 on axis 0"),
    "large dilation": ({"dilation": (2, 3)}, ValueError, "must be at most shape, 7 on axis 1, got 3 · 3"),
    "no dilation": ({"dilation": 0}, ValueError, "dilation must be at least 1, got 0"),
    "large stride": ({"stride": 4}, ValueError, "stride must be at most kernel_size, 3 on axis 0, got 4"),
    "causal by a number": ({"is_causal": 1}, ValueError, "is_causal must be a bool, got 1"),
    "other grids": ({"key": X[:, :5]}, ValueError, "must have the same batch and grid"),
    "other batches": ({"value": X.repeat(2, 1, 1, 1, 1)}, ValueError, "must have the same batch and grid"),
    "other ranks": ({"key": X[0]}, ValueError, "must be (b, *shape, heads, d) with 1 to 3 sizes"),
    "a matrix": (dict.fromkeys(("query", "key", "value"), X[0, 0, 0]), ValueError, "with 1 to 3 sizes"),
    "other head sizes": ({"key": X[..., :3]}, ValueError, "query and key must have the same head size"),
    "other heads": ({"value": X[..., :1, :]}, ValueError, "key and value must have the same heads, a divisor"),
    "fewer query heads": ({"query": X[..., :1, :]}, ValueError, "a divisor of those of query"),
    "other dtypes": ({"key": X.double()}, ValueError, "key must have the device and dtype of query"),
    "a sparse tensor": ({"key": X.to_sparse()}, NotImplementedError, "key must be a dense tensor, got"),
    "additional keys alone": ({"additional_keys": X[:, 0]}, ValueError, "must be both given, or none"),
    "additional keys of other lengths": (
        {"additional_keys": X[:, 0], "additional_values": X[:, 0, :3]},
        ValueError,
        "must be (b, m, heads, d) of the same b, m and heads",
    ),
    "additional keys of other heads": (
        dict.fromkeys(("additional_keys", "additional_values"), X[:, 0, :, :1]),
        ValueError,
        "additional_keys must have the batch, heads and head size of key",
    ),
    "additional keys of another dtype": (
        dict.fromkeys(("additional_keys", "additional_values"), X[:, 0].double()),
        ValueError,
        "additional_keys must have the device and dtype of key",
    ),
    "another backend": ({"backend": "fast"}, NotImplementedError, "backend must be one of cutlass-fna, hopper-fna"),
    "another schedule": ({"kernel_schedule": "p"}, ValueError, "kernel_schedule must be None, 'non', 'coop' or 'pp'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use(name: str) -> None:
    wrong, error, message = WRONG[name]
    good = {"query": X, "key": X, "value": X, "kernel_size": 3}
    with pytest.raises(error) as raised:
        na2d(**good | wrong)
    assert message in str(raised.value)
    if INSTALLED:
        theirs = importlib.import_module("natten.functional").na2d
        with pytest.raises(error):
            theirs(**good | wrong)


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"value must be a torch\.Tensor, got list"):
        na2d(X, X, [0.0], 3)


@pytest.mark.skipif(not INSTALLED, reason="NATTEN is not installed")
@pytest.mark.filterwarnings("ignore")  # PyTorch's, of the FlexAttention that NATTEN calls
@pytest.mark.parametrize("extra", [False, True], ids=["", "additional keys"])
@pytest.mark.parametrize("name", [*GRIDS, "blocks"])
def test_the_same_as_natten(name: str, extra: bool) -> None:
    grid = GRIDS.get(name, BLOCKED)
    sizes = {"d": 16, "d_v": 16}  # on a CPU NATTEN has no other
    x = [y.detach().float() for y in operands(grid, **sizes) + (additional(**sizes) if extra else [])]
    options = dict(zip(("additional_keys", "additional_values"), x[3:], strict=False))
    theirs = getattr(importlib.import_module("natten"), f"na{len(grid.shape)}d")
    expected = theirs(*x[:3], **grid.options(), **options, return_lse=True)
    with regard.torch.stand_in("natten"):
        ours = theirs(*x[:3], **grid.options(), **options, return_lse=True)
    for y, z in zip(ours, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=4e-6)


@pytest.mark.skipif(INSTALLED, reason="NATTEN is installed")
def test_without_natten_its_names_are_provided() -> None:
    with regard.torch.stand_in("natten"):
        natten, functional = importlib.import_module("natten"), importlib.import_module("natten.functional")
    assert natten.na2d is functional.na2d is na2d
    assert natten.NeighborhoodAttention2D is NeighborhoodAttention2D


def test_modules() -> None:
    module = NeighborhoodAttention2D(6, 2, (3, 4), dilation=(2, 1), is_causal=(False, True), qkv_bias=False).double()
    x = torch.randn(2, 7, 5, 6, dtype=torch.float64)
    query, key, value = module.qkv(x).reshape(2, 7, 5, 3, 2, 3).movedim(-3, 0)
    expected, _ = reference(Windows((7, 5), (3, 4), 1, (2, 1), (False, True)), query, key, value)
    torch.testing.assert_close(module(x), module.proj(expected.flatten(-2)))
    assert "kernel_size=(3, 4), stride=1, dilation=(2, 1)" in repr(module)
    assert set(module.state_dict()) == {"qkv.weight", "proj.weight", "proj.bias"}


def test_modules_refuse_other_shapes() -> None:
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 7 and 2"):
        NeighborhoodAttention2D(7, 2, 3)
    with pytest.raises(ValueError, match=r"x of NeighborhoodAttention1D must be \(b, \*shape, 6\) with 1 sizes, got"):
        NeighborhoodAttention1D(6, 2, 3)(torch.zeros(2, 7, 5, 6))


@pytest.mark.skipif(not INSTALLED, reason="NATTEN is not installed")
@pytest.mark.filterwarnings("ignore")
def test_modules_of_natten() -> None:
    theirs, ours = importlib.import_module("natten").NeighborhoodAttention2D, NeighborhoodAttention2D
    module, own = (x(32, 2, 3, dilation=2) for x in (theirs, ours))
    own.load_state_dict(module.state_dict())
    x = torch.randn(1, 8, 9, 32)
    with torch.no_grad():
        expected = module(x)
    with regard.torch.stand_in("natten"):
        out = module(x)
        out.sum().backward()
    assert not torch.equal(out, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(own(x), expected, rtol=0, atol=4e-6)
