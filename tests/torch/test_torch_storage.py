"""A call reads tensors while it runs and never after: their storages are the caller's to free, as FSDP does."""

import gc
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import regard
import regard.torch
from regard.core import tensors
from regard.reference import specification
from regard.rules import Table
from regard.viewer import looking
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
A, SDPA = regard.attention, regard.torch.scaled_dot_product_attention
MODULES = {
    name: regard.torch.Transformer(1, 32, 4, causal=True, positions=name) for name in ("rope", "alibi", "relative")
}
TERMS = specification.terms  # not that of the suite, which keeps a problem for the next test
MULTIHEAD = regard.torch.MultiHeadAttention(32, 4)


def given(dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Tensors that own their storages: (2, 4, 12, 8) operands and what calls take beside them."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    return SimpleNamespace(
        q=normal(2, 4, 12, 8), k=normal(2, 4, 12, 8), v=normal(2, 4, 12, 8), t=normal(2, 4, 12, 8),
        x=normal(2, 12, 32), one=normal(2, 4, 1, 8), rows=normal(10, 4, 8), metric=normal(8, 8),
        bias=normal(4, 12, 12), sink=normal(4), slopes=normal(4), table=normal(4, 12), degrees=normal(4, 5),
        mask=torch.rand((12, 12), generator=g) < 0.8, real=torch.rand((2, 12), generator=g) < 0.8,
        numbers=torch.arange(12) // 4, lengths=torch.tensor([3, 4]), seed=torch.tensor(3),
        blocks=torch.ones(3, 3, dtype=torch.bool), ends=torch.tensor([0, 4, 10]),
    )  # fmt: skip


def differentiable(x: SimpleNamespace) -> dict[str, Any]:
    """All options that have a gradient, and a mask."""
    for name in ("q", "k", "v", "bias", "sink", "slopes"):
        getattr(x, name).requires_grad_()
    return {"bias": x.bias, "sink": x.sink, "mask": x.mask, "score": regard.alibi(x.slopes)}


def backward(x: SimpleNamespace) -> None:
    A(x.q, x.k, x.v, **differentiable(x)).square().sum().backward()


def double_backward(x: SimpleNamespace) -> Any:
    out = A(x.q, x.k, x.v, **differentiable(x))
    gradients = torch.autograd.grad(out.square().sum(), (x.q, x.bias, x.slopes), create_graph=True)
    sum(g.square().sum() for g in gradients).backward()  # type: ignore[union-attr]
    return gradients


def of_integers(x: SimpleNamespace) -> torch.Tensor:
    table = regard.table(x.numbers)
    return A(x.q, x.k, x.v, score=lambda s, b, h, i, j: s + table[j])


def of_lse(x: SimpleNamespace) -> Any:
    lse = A(x.q, x.k, x.v, observe=["lse"])[1].lse
    return regard.weights(x.q, x.k, lse=lse, rows=slice(1, 3)), lse


def jagged(x: SimpleNamespace) -> Any:
    return torch.nested.nested_tensor_from_jagged(x.rows, x.ends).transpose(1, 2)


OBSERVED = ["lse", "entropy", "max", "argmax", "received", "visible", "profile", regard.top(3), regard.pooled(2, 2)]
KINDS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "repeated": lambda x: [A(x.q, x.k, x.v) for _ in range(3)],
    "repeated, a mask": lambda x: [A(x.q, x.k, x.v, mask=x.mask) for _ in range(3)],
    "repeated, a bias": lambda x: [A(x.q, x.k, x.v, bias=x.bias) for _ in range(3)],
    "repeated, causal, with a derivative": lambda x: [A(x.q.requires_grad_(), x.k, x.v, causal=True) for _ in range(3)],
    "decode steps": lambda x: [A(x.one, x.k[:, :, :n], x.v[:, :, :n]) for n in (3, 4, 5)],
    "strides": lambda x: A(x.q.mT, x.k.mT, x.v.mT, layout="bnhd", observe=["lse"]),
    "mask": lambda x: A(x.q, x.k, x.v, mask=x.mask, sink=x.sink, causal=True),
    "mask of integers": lambda x: A(x.q, x.k, x.v, mask=x.mask.int()),
    "mask in a rule": lambda x: A(x.q, x.k, x.v, mask=regard.causal() | x.mask),
    "bias": lambda x: A(x.q, x.k, x.v, bias=x.bias, dropout=0.0),
    "sink": lambda x: A(x.q, x.k, x.v, sink=x.sink),
    "metric": lambda x: A(x.q, x.k, x.v, metric=x.metric),
    "float tables": lambda x: A(x.q, x.k, x.v, score=[regard.alibi(x.slopes), regard.relative(x.degrees)]),
    "integer table": of_integers,
    "masks of lengths": lambda x: A(
        x.q, x.k, x.v, mask=regard.documents(x.numbers) & regard.padding(x.lengths) & regard.blocks(x.blocks, 4)
    ),
    "offset": lambda x: A(x.q, x.k, x.v, causal=True, offset=x.lengths),
    "dropout": lambda x: A(x.q, x.k, x.v, dropout=0.5),
    "seed": lambda x: A(x.q, x.k, x.v, dropout=0.5, seed=x.seed),
    "observe": lambda x: A(x.q, x.k, x.v, observe=[*OBSERVED, regard.mass(x.mask), regard.weights_of([1])]),
    "return_weights": lambda x: A(x.q, x.k, x.v, return_weights=True, mask=x.mask, bias=x.bias),
    "weights": lambda x: regard.weights(x.q, x.k, mask=x.mask, sink=x.sink, score=regard.alibi(x.slopes)),
    "weights, of an lse": of_lse,
    "plan": lambda x: regard.plan(x.q, x.k, x.v, mask=x.mask, bias=x.bias, sink=x.sink),
    "steps": lambda x: regard.steps(x.q, x.k, x.v, mask=x.mask, bias=x.bias, score=regard.alibi(x.slopes), dout=x.t),
    "merge": lambda x: regard.merge((x.q, x.q[..., 0]), (x.k, x.k[..., 0]), sink=x.sink),
    "multihead_attention": lambda x: regard.multihead_attention(x.x, x.x, x.x, 4),
    "with a graph": lambda x: A(x.q, x.k, x.v, **differentiable(x)),
    "backward": backward,
    "double backward": double_backward,
    "grad": lambda x: grad(lambda q: A(q, x.k, x.v, mask=x.mask, sink=x.sink).sum())(x.q),
    "jvp": lambda x: jvp(lambda q, b: A(q, x.k, q, mask=x.mask, bias=b), (x.q, x.bias), (x.t, x.bias)),
    "jvp of jvp": lambda x: jvp(lambda y: jvp(lambda q: A(q, q, q, mask=x.mask), (y,), (x.t,))[1], (x.q,), (x.t,)),
    "hessian": lambda x: hessian(lambda q: A(q, q, q, mask=x.mask[:3, :3]).square().sum())(x.q[0, :1, :3, :2]),
    "vmap": lambda x: vmap(lambda q, m: A(q, q, q, mask=m, sink=x.sink), (0, None))(x.q, x.mask),
    "drop-in": lambda x: [SDPA(x.q, x.k, x.v, m) for m in (x.mask, x.bias) for _ in range(2)],
    "drop-in, with a graph": lambda x: SDPA(x.q.requires_grad_(), x.k, x.v, x.bias.requires_grad_()),
    "drop-in, nested": lambda x: SDPA(jagged(x), jagged(x), jagged(x)),
    "jagged": lambda x: regard.torch.jagged_attention(jagged(x), jagged(x), jagged(x), causal=True),
    "varlen": lambda x: regard.torch.varlen_attention(x.rows, x.rows, x.rows, x.ends, mask=x.mask[:10, :10]),
    "module": lambda x: MULTIHEAD(x.x, mask=x.mask, key_padding_mask=x.real),
    "modules with positions": lambda x: [m(x.x).sum().backward() for m in MODULES.values()],
    "compiled": lambda x: torch.compile(lambda q: A(q, q, q, mask=x.mask, sink=x.sink), backend="eager")(x.q),
    "look": lambda x: looking.numpy_of(x.q),
}  # fmt: skip
CACHED = [name for name in KINDS if name.startswith(("repeated", "decode"))]
KINDS |= {
    f"{engine}, {name}": lambda x, engine=engine: A(x.q, x.k, x.v, engine=engine, causal=True)
    for engine in ("cpu", "tiled", "spec")
    for name in DTYPES
}


@pytest.fixture(scope="module", autouse=True)
def small_garbage() -> None:
    """Leave what other tests made out of garbage collections: each test sets one off, which would take 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[torch.Tensor]]:
    """Return the tensors with an array that is alive."""
    made: list[Any] = []

    class Watched(tensors.HostMemory):
        __slots__ = ("__weakref__",)

        def __setattr__(self, name: str, x: Any) -> None:
            made.append(weakref.ref(self))
            super().__setattr__(name, x)

    def alive() -> list[torch.Tensor]:
        gc.collect()
        return [owner.tensor for owner in (ref() for ref in made) if owner is not None]

    monkeypatch.setattr(tensors, "HostMemory", Watched)
    monkeypatch.setattr(specification, "terms", TERMS)
    return alive


def free(*given: torch.Tensor) -> None:
    assert not [tuple(x.shape) for x in given if not x.untyped_storage().resizable()]  # pytest cannot print freed ones
    for x in given:
        x.untyped_storage().resize_(0)


@pytest.mark.parametrize("name", on_cpu(KINDS, *CACHED))
def test_storages_are_free_after_a_call(name: str, live: Callable[[], list[torch.Tensor]]) -> None:
    x = given(DTYPES.get(name.partition(", ")[2], torch.float32))
    parameters = [y for m in (MULTIHEAD, *MODULES.values()) for y in m.parameters()]
    result = KINDS[name](x)
    own = {y.untyped_storage().data_ptr() for y in (*vars(x).values(), *parameters)}
    assert not [tuple(y.shape) for y in live() if y.untyped_storage().data_ptr() in own]
    free(*vars(x).values())
    assert all(y.untyped_storage().resizable() for y in parameters)
    del result


def test_rules_that_are_kept() -> None:
    """Integers and masks are copied when the rule is made; floats are read in each call."""
    x = given()
    masks = [regard.mask(x.mask), regard.documents(x.numbers), regard.padding(x.lengths), regard.blocks(x.blocks, 4)]
    table = regard.table(x.numbers)
    assert type(table) is Table
    rules = [{"mask": m} for m in masks] + [{"score": lambda s, b, h, i, j: s + table[j]}]
    before = [A(x.q, x.k, x.v, **rule) for rule in rules]
    free(x.mask, x.numbers, x.lengths, x.blocks)
    for rule, out in zip(rules, before, strict=True):
        assert torch.equal(A(x.q, x.k, x.v, **rule), out)


def test_steps_and_pictures_outlive_their_tensors() -> None:
    x = given()
    steps = regard.steps(x.q, x.k, x.v, mask=x.mask, bias=x.bias, dout=x.t)
    before = [step.value.copy() for step in steps]
    shown = looking.numpy_of(x.q)
    kept = shown.copy()
    for y in vars(x).values():
        y.zero_()
    assert all((step.value == old).all() for step, old in zip(steps, before, strict=True))
    assert (shown == kept).all()


def test_storages_that_are_freed_between_forward_and_backward() -> None:
    """As FSDP does: the parameters come back, in the same storages, before backward."""

    def gradients(freed: bool) -> list[torch.Tensor]:
        x = given()
        options = differentiable(x)
        out = A(x.q, x.k, x.v, **options)
        if freed:
            names = ("bias", "sink", "slopes", "mask", "q")
            values = {name: getattr(x, name).detach().clone() for name in names}
            free(*(getattr(x, name) for name in names))
            for name, value in values.items():
                y = getattr(x, name)
                y.untyped_storage().resize_(value.untyped_storage().nbytes())
                y.data.copy_(value)
        out.square().sum().backward()
        return [getattr(x, name).grad for name in ("q", "k", "v", "bias", "sink", "slopes")]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(a, b)


def test_a_mask_that_changes_before_backward() -> None:
    x = given()
    out = A(x.q.requires_grad_(), x.k, x.v, mask=x.mask)
    x.mask[:, 0] = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_freed_tensor_is_refused() -> None:
    x = given()
    free(x.sink)
    expected = (
        "a tensor of shape (4,) has no numbers: its storage was freed, as FSDP frees parameters outside of their "
        "module's forward and backward; give it inside, or call unshard() first"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        A(x.q, x.k, x.v, sink=x.sink)


def test_numbers_that_are_not_stored_as_they_are() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag, torch._efficientzerotensor(3)):
        assert torch.equal(tensors.tensor(tensors.array(lazy)), lazy.clone())
    for empty in (x[:0], x[:, 4:]):
        assert tensors.array(empty).shape == empty.shape


@pytest.mark.engine("cpu")
def test_tensors_may_be_swapped_after_a_call() -> None:
    """`torch.__future__.set_swap_module_params_on_conversion` does so, and asks that nothing holds the tensors."""
    x = given()
    with torch.no_grad():
        A(x.q, x.k, x.v, bias=x.bias, mask=x.mask, sink=x.sink, score=regard.alibi(x.slopes))
    for name in ("q", "bias", "mask", "sink", "slopes"):
        old = getattr(x, name)
        other = ~old if old.dtype is torch.bool else old + 1
        expected = other.clone()
        torch.utils.swap_tensors(old, other)
        assert torch.equal(old, expected)


class Biased(torch.nn.Module):
    """A layer that writes its bias into a buffer which all layers share."""

    def __init__(self, buffer: torch.Tensor, factor: float) -> None:
        super().__init__()
        self.shared, self.factor = buffer, factor

    def forward(self, x: torch.Tensor) -> Any:
        self.shared.copy_(self.factor * torch.arange(12.0))
        return A(x, x, x, bias=self.shared)


@pytest.mark.parametrize("heads", [None, [1, 3]])
def test_a_capture_copies_what_the_model_writes_again(
    heads: list[int] | None, live: Callable[[], list[torch.Tensor]]
) -> None:
    x = given()
    buffer = torch.zeros(4, 12, 12)
    model = torch.nn.Sequential(Biased(buffer, 1.0), Biased(buffer, -1.0), Biased(buffer, -1.0))
    with torch.no_grad(), regard.capture(model, heads=heads) as seen:
        model(x.q)
        assert not live()
    free(x.q, buffer)
    for layer, module in zip(seen, model, strict=True):
        assert (layer.options["bias"] == module.factor * np.arange(12)).all()
    assert seen[1].options["bias"] is seen[2].options["bias"]  # one copy of what stayed the same
