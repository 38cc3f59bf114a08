"""PyTorch's function on the CPU is regard's in the whole process: calls, modules, and graphs that were there before."""

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl
from torch.overrides import TorchFunctionMode

import regard
import regard.doctor
import regard.torch
from regard.torch.dropins import activation, cpu_operator
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

Tensor = torch.Tensor
THEIRS = F.scaled_dot_product_attention


class Seen(Exception):
    pass


def scripted(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


@pytest.fixture(autouse=True)
def inactive_afterwards() -> Iterator[None]:
    yield
    assert not activation.active()
    assert torch.backends.mha.get_fastpath_enabled()


# Who computes


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions of ours that compute."""
    made: list[str] = []

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(activation, "attended")
    counted(cpu_operator, "forward")
    counted(cpu_operator, "backward")
    return made


def heads(*shape: int, **more: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*(shape or (2, 4, 9, 8)), requires_grad=True, **more) for _ in range(3))
    return q, k, v


EAGER: dict[str, Callable[..., Any]] = {
    "plain": lambda f, q, k, v: f(q, k, v),
    "inference mode": torch.inference_mode()(lambda f, q, k, v: f(q.detach(), k.detach(), v.detach())),
    "dropout": lambda f, q, k, v: f(q, k, v, dropout_p=0.1),
    "a mask that trains": lambda f, q, k, v: f(q, k, v, torch.zeros(9, 9, requires_grad=True)).sum().backward(),
    "values of another size": lambda f, q, k, v: f(q, k, v[..., :3]),
    "three dimensions": lambda f, q, k, v: f(q[0], k[0], v[0]),
    "five dimensions": lambda f, q, k, v: f(q[None], k[None], v[None]),
    "forward mode": lambda f, q, k, v: torch.func.jvp(lambda q: f(q, k, v), (q,), (q,)),
    "a Hessian": lambda f, q, k, v: torch.func.hessian(lambda q: f(q, k[:1], v[:1]).sum())(q[:1, :1, :2]),
    "checkpoint": lambda f, q, k, v: torch.utils.checkpoint.checkpoint(f, q, k, v, use_reentrant=False),
}


@pytest.mark.parametrize("name", EAGER)
def test_calls_outside_of_graphs(name: str, calls: list[str]) -> None:
    given = heads()
    torch.manual_seed(0)
    with regard.torch.activate():
        found = EAGER[name](THEIRS, *given)
    assert set(calls) == {"attended"}
    if name == "dropout" or found is None:
        return
    expected = EAGER[name](regard.torch.scaled_dot_product_attention, *given)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_in_training_and_evaluation(calls: list[str]) -> None:
    """The fused path of both modules, which calls no function, is off."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    x, padding = torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[5], [7]])
    for training in (True, False):
        encoder.train(training)
        with torch.set_grad_enabled(training):
            expected = encoder(x, src_key_padding_mask=padding)
            calls.clear()
            with regard.torch.activate():
                found = encoder(x, src_key_padding_mask=padding)
            torch.testing.assert_close(found[1], expected[1])
            torch.testing.assert_close(found[0, :5], expected[0, :5])
            assert calls == ["attended"] * 2


# Graphs


def compiled() -> Any:
    """Return a function that is compiled as in a new process, whatever was compiled before."""
    torch._dynamo.reset()
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    return torch.compile(
        lambda q, k, v, m: F.scaled_dot_product_attention(q.sin(), k.sin(), v.sin(), m).cos(), backend="aot_eager"
    )


def hidden() -> Tensor:
    """A mask under which two queries see nothing."""
    return torch.zeros(9, 9).masked_fill(torch.arange(9)[:, None] % 5 == 3, -torch.inf)


LAYOUTS = {"bhnd": heads, "bnhd": lambda: tuple(x.transpose(1, 2) for x in heads(2, 9, 4, 8))}


@pytest.mark.parametrize("order", on_cpu(["forward", "backward", "both", "compiled in it"], "both"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_compiled_graph_in_training(order: str, layout: str, masked: bool, calls: list[str]) -> None:
    """Forward and backward each by PyTorch or by regard, with queries that see nothing."""
    q, k, v = (x.detach().requires_grad_() for x in LAYOUTS[layout]())
    mask = hidden() if masked else None
    function, dout = compiled(), torch.randn(2, 4, 9, 8)
    if order != "compiled in it":
        expected = function(q, k, v, mask)
        gradients = torch.autograd.grad(expected, (q, k, v), dout)

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        with active_if(order != "backward"):
            out = function(q, k, v, mask)
        with active_if(order != "forward"):
            return out, torch.autograd.grad(out, (q, k, v), dout)

    out, found = run()
    assert set(calls) == {"forward": {"forward"}, "backward": {"backward"}}.get(order, {"forward", "backward"})
    if order == "compiled in it":
        torch._dynamo.reset()
        expected = function(q, k, v, mask)
        gradients = torch.autograd.grad(expected, (q, k, v), dout)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, gradients)


def active_if(wanted: bool) -> Any:
    return regard.torch.activate() if wanted else torch.enable_grad()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_have_pytorchs_strides_and_dtypes(layout: str, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in LAYOUTS[layout]())
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def run() -> list[Tensor]:
        out, lse = forward(q, k, v, 0.0, True)
        return [out, lse, *backward(torch.ones_like(out), q, k, v, out, lse, 0.0, True)]

    expected = run()
    with regard.torch.activate():
        found = run()
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        torch.testing.assert_close(x, y, atol=3e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-5)


def test_lse_of_a_query_that_sees_nothing_is_zero() -> None:
    q, k, v = (x.detach() for x in heads())
    with regard.torch.activate():
        _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=hidden())
    assert torch.equal(lse[:, :, [3, 8]], torch.zeros(2, 4, 2))


def test_an_exported_program(calls: list[str]) -> None:
    """Saved before; and exported meanwhile, when it holds PyTorch's operations alone."""
    layer, x = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval(), torch.randn(2, 9, 16)
    expected = layer(x)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    calls.clear()
    with regard.torch.activate():
        torch.testing.assert_close(program(x), expected)
        assert calls
        meanwhile = torch.export.export(layer, (x,))
    assert "regard" not in str(meanwhile.graph)
    torch.testing.assert_close(meanwhile.module()(x), expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_was_scripted_before(calls: list[str]) -> None:
    script, (q, _, _) = torch.jit.script(scripted), heads()
    with regard.torch.activate():
        torch.testing.assert_close(script(q), scripted(q))
    assert calls == ["attended"] * 2


# On and off


def test_activation_is_undone() -> None:
    before = torch.nn.MultiheadAttention.forward
    regard.torch.deactivate()
    for _ in range(2):
        regard.torch.activate()
    with regard.torch.activate():
        pass
    assert activation.active()
    with regard.torch.sdpa():
        regard.torch.deactivate()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.nn.MultiheadAttention.forward is before
    with pytest.raises(Seen), regard.torch.activate():
        raise Seen


def test_all_threads_are_served(calls: list[str]) -> None:
    q, k, v = heads()
    with regard.torch.activate():
        thread = threading.Thread(target=lambda: THEIRS(q, k, v))
        thread.start()
        thread.join()
    assert calls == ["attended"]


def test_by_the_name_in_pytorchs_registry(calls: list[str]) -> None:
    activate_flash_attention_impl("regard")
    try:
        assert current_flash_attention_impl() == "regard"
        THEIRS(*heads())
        assert calls == ["attended"]
    finally:
        restore_flash_attention_impl()
    THEIRS(*heads())
    assert calls == ["attended"]


def test_the_doctor_says_what_is_active() -> None:
    name = "SDPA"
    assert regard.doctor.report()["engines"][name] == "PyTorch's: regard.torch.activate() replaces it on the CPU"
    with regard.torch.activate():
        assert regard.doctor.report()["engines"][name] == "regard's on the CPU: regard.torch.activate() is in force"


def test_a_mode_sees_one_function() -> None:
    seen: list[Any] = []

    class Log(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with regard.torch.activate(), Log():
        THEIRS(*heads())
    assert seen[-1:] == [THEIRS]
    assert seen.count(THEIRS) == 1
