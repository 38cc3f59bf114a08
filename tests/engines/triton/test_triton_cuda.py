"""CUDA tensors without a GPU: fake ones, which have shapes, strides and a device, go all the way to the launches.

What would make the host wait for the device raises: a fake tensor has no values to give.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import regard

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402

from regard.engines import triton as engine  # noqa: E402
from regard.engines.triton.launch import devices, forward_launch, launching, tuning  # noqa: E402
from regard.engines.triton.launch.launching import Launch  # noqa: E402
from regard.torch import adapter, autograd, kernels  # noqa: E402
from regard.torch.graph import operators, traced  # noqa: E402

CUDA = torch.device("cuda", 0)
MEMORY = np.zeros(2**28, np.uint8)  # where all of them seem to lie, so that a failure can be printed


class Device:
    """What a device is asked to do: the launches, each with the device that was current."""

    def __init__(self) -> None:
        self.current: Any = None
        self.launches: list[tuple[Any, Launch]] = []

    @contextmanager
    def used(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def run(self, launch: Launch) -> None:
        self.launches.extend((self.current, one) for one in (launch, *launch.then))

    @property
    def names(self) -> list[str]:
        return [str(launch.kernel.__name__) for _, launch in self.launches]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()

    def waits(x: Any, *args: Any, **kwargs: Any) -> Any:
        pytest.fail("the host would wait for the device")

    def guarded(name: str) -> Any:
        method = getattr(torch.Tensor, name)
        return lambda x, *args, **more: (waits if x.device.type == "cuda" else method)(x, *args, **more)

    to = torch.Tensor.to

    def moved(x: Any, to_what: Any, non_blocking: bool = False) -> Any:
        if not isinstance(to_what, torch.device) or to_what == x.device:
            return to(x, to_what)
        assert non_blocking, "the host would wait for the device"
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=to_what)

    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, guarded(name))
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda x: MEMORY.ctypes.data + x.storage_offset() * x.element_size())
    monkeypatch.setattr(torch.cuda, "device", device.used)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the caller's tensors say where"))
    monkeypatch.setattr(engine, "state", lambda: None)
    for module in (launching, tuning, forward_launch, devices):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(tuning, "target", lambda device: tuning.DeviceTarget(90, "fake"))
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setenv("REGARD_CACHE", "off")
    monkeypatch.setattr(Launch, "run", lambda launch: device.run(launch))
    for name in ("watched", "fake"):  # calls are computed: FakeTensorMode is here for its tensors alone
        monkeypatch.setattr(operators, name, lambda *_: False)
    with FakeTensorMode():
        yield device


def operands(n: int = 300, dtype: Any = torch.bfloat16) -> list[torch.Tensor]:
    """Of which query lies as (batch, n, h, d) does, and key and value have fewer heads."""
    q = torch.empty(2, n, 4, 64, dtype=dtype, device=CUDA).transpose(1, 2)
    return [q, *(torch.empty(2, 2, n, 64, dtype=dtype, device=CUDA) for _ in range(2))]


def trained(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device=CUDA).requires_grad_()


OPTIONS: dict[str, Any] = {
    "plain": dict,
    "grouped and causal": lambda: {"causal": True},
    "window and softcap": lambda: {"mask": regard.window(64), "score": regard.softcap(30.0), "dropout": 0.1, "seed": 3},
    "bias and sink": lambda: {"bias": trained(4, 1, 300), "sink": trained(4)},
    "a table": lambda: {"score": regard.relative(regard.table(trained(4, 99)))},
    "a dense mask": lambda: {"mask": torch.empty(300, 300, dtype=torch.bool, device=CUDA)},
    "documents": lambda: {"mask": regard.documents([0] * 100 + [1] * 200)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_call_and_its_derivatives_reach_the_device(
    option: str, cuda: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for it; results have their shapes, dtypes and strides, and lie there."""
    made: list[Any] = []
    # Nothing is differentiated by PyTorch: its engine wants the device.
    monkeypatch.setattr(adapter, "applied", lambda *args: made.append(args) or kernels.attention(*args))
    q, k, v = operands()
    out, seen = regard.attention(q, k, v, **OPTIONS[option](), observe=["lse"])
    assert (out.device, out.dtype, out.shape) == (CUDA, torch.bfloat16, q.shape)
    assert (seen.lse.device, seen.lse.dtype, seen.lse.shape) == (CUDA, torch.float32, q.shape[:-1])
    launch = cuda.launches[0][1]
    assert launch.options == {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
    assert launch.grid == (3 * 8, 1)
    assert launch.arguments[0].q[1:] == ((300 * 256,), 64, 256, 1)

    call, *inputs = made[0]
    trains = inputs[: len(call.floats)]
    along = [torch.empty_like(x) for x in trains]
    known = *inputs, out, seen.lse, None, None
    ct = torch.empty_like(out), None, None
    gradients = autograd.BackwardFunction.forward(call, *known, *ct)
    tangents = autograd.TangentFunction.forward(call, *known, *along)
    second = autograd.BackwardTangentFunction.forward(call, *known, *ct, *along, *tangents, None, *autograd.NONE)
    both = autograd.TangentTangentFunction.forward(call, *known, *along, *tangents, None, *along, *tangents, None)
    for found, like in ((gradients, trains), (second, trains), (tangents, (out, seen.lse)), (both, (out, seen.lse))):
        for x, y in zip(found, like, strict=True):
            assert (x.device, x.dtype, x.shape) == (CUDA, y.dtype, y.shape)
    backward = ["rows", "query", "key_value", *["bias"] * ("bias" in option), *["table"] * (option == "a table")]
    assert cuda.names == ["forward", *backward, "tangent", "rows", *backward, "jvp_jvp"]
    assert {device for device, _ in cuda.launches} == {CUDA}, "launched where the tensors lie, on the current stream"


def test_few_queries_are_split(cuda: Device) -> None:
    q = torch.empty(2, 4, 1, 64, dtype=torch.bfloat16, device=CUDA)
    regard.attention(q, *operands(8192)[1:])
    assert cuda.names == ["forward", "merge"]
    assert cuda.launches[0][1].grid == (8, 32)


def test_statistics_and_weights_reach_the_device(cuda: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = operands()
    _, seen = regard.attention(q, k, v, observe=["entropy", "argmax", "received", "visible"])
    assert all(x.device == CUDA for x in seen.values())
    monkeypatch.setattr(adapter, "concrete", lambda x: True)
    tile = regard.weights(q, k, causal=True, rows=slice(3, 9))
    assert (tile.device, tile.dtype, tile.shape) == (CUDA, torch.bfloat16, (2, 4, 6, 300))
    assert cuda.names[-1] == "part"


def test_that_waiting_is_seen(cuda: Device) -> None:
    x = torch.empty(3, device=CUDA)
    for wait in (x.cpu, x.item, x.tolist, x.sum().__bool__):
        with pytest.raises(pytest.fail.Exception, match="wait for the device"):
            wait()
    with pytest.raises(AssertionError, match="wait for the device"):
        torch.zeros(3).to(CUDA)
    with pytest.raises((RuntimeError, DataDependentOutputException)):
        torch.bincount(x.long())


def test_operations_of_a_graph_know_the_device(cuda: Device) -> None:
    """What `torch.compile` asks of them."""
    q, k, v = operands()
    bias = torch.empty(4, 300, 300, device=CUDA)
    text = traced.name_of_call(None, None, (), ("bias",), None, False, (), (("causal", True),), ())
    out, lse = operators.compute("attention", [q, k, v, bias], text)
    assert (out.device, out.dtype, out.shape, out.is_contiguous()) == (CUDA, torch.bfloat16, q.shape, True)
    assert (lse.device, lse.dtype, lse.shape) == (CUDA, torch.float32, q.shape[:-1])
    found = operators.compute("attention_backward", [q, k, v, bias, out, lse, None, None, out, None, None], text)
    for x, g in zip((q, k, v, bias), found, strict=True):
        assert (g.device, g.dtype, g.shape, g.is_contiguous()) == (CUDA, x.dtype, x.shape, True)
    with pytest.raises(ValueError, match="bias must be on the device of query, cuda:0, got cpu"):
        operators.compute("attention", [q, k, v, torch.empty(4, 300, 300)], text)
