"""The engine of devices without a device: no number is read, and nothing but its protocol is used."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import regard
from benchmarks.memory import D, extra
from cases import case

torch = pytest.importorskip("torch")

from regard import engines  # noqa: E402
from regard.core import tensors as arrays  # noqa: E402
from regard.engines.device import call as calls  # noqa: E402
from regard.engines.device.formula import Block  # noqa: E402
from regard.ops.normalization import problem_from  # noqa: E402
from regard.torch.tensors.modes import below_autograd  # noqa: E402

FAR = 1 << 46  # bytes from a tensor's memory to an address where nothing is mapped


def of_far(x: Any) -> Any:
    """`arrays.on_device` of an array whose address is off by FAR."""
    owner = x
    while isinstance(owner, np.ndarray):
        owner = owner.base
    whole, size = owner.tensor.detach(), x.itemsize
    begin = (x.__array_interface__["data"][0] - FAR - whole.data_ptr()) // size if x.size else 0
    return whole.as_strided(x.shape, [step // size for step in x.strides], whole.storage_offset() + begin)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host travel as arrays of a device, at addresses where a reader would crash."""
    memory = SimpleNamespace(from_address=lambda at: arrays.DeviceMemory.from_address(at + FAR))
    monkeypatch.setattr(arrays, "HostMemory", memory)
    monkeypatch.setattr(arrays, "on_device", of_far)


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SIZES = (2, 3, 20, 8)
SLOPES = torch.nn.Parameter(torch.rand(3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)))
OBSERVE = ["entropy", "received", "profile", "normalized_entropy", regard.top(3), regard.pooled(4, 3)]


def with_options(*x: Any) -> Any:
    score = regard.alibi(regard.table(SLOPES))
    return regard.attention(*x, causal=True, score=score, dropout=0.2, seed=3, observe=OBSERVE)


def plain(*x: Any) -> Any:
    return regard.attention(*x, causal=True, mask=regard.window(5))


def everything() -> list[Any]:
    """Outputs, statistics, gradients, second ones, tangents and batches of some calls."""
    x = [normal(*SIZES, seed=n).requires_grad_() for n in range(3)]
    out, seen = with_options(*x)
    first = torch.autograd.grad(out.square().sum() + seen.entropy.sum(), [*x, SLOPES], create_graph=True)
    second = torch.autograd.grad(sum(a.square().sum() for a in first), [*x, SLOPES])
    along = torch.func.jvp(plain, tuple(a.detach() for a in x), tuple(normal(*SIZES, seed=n) for n in range(3, 6)))
    twice = torch.func.jvp(lambda a: torch.func.jvp(lambda b: plain(b, *x[1:]), (a,), (x[1],))[1], (x[0],), (x[2],))
    batch = torch.func.vmap(plain)(*x)
    top, profile = seen[regard.top(3)], seen.profile
    numbers = [seen.entropy, seen.received, seen.normalized_entropy, seen[regard.pooled(4, 3)], profile.values]
    return [out, *numbers, profile.distances, top.values, top.indices, *first, *second, *along, *twice, batch]


def test_no_number_of_a_device_is_read_by_the_host(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, statistics, gradients, double backward, both modes and vmap; one question for each call."""
    there = everything()
    monkeypatch.undo()
    for x, y in zip(there, everything(), strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_calls_on_a_device_in_compiled_functions(device: None, backend: str) -> None:
    """Inside of an operation autograd is off; without it on again all gradients would be 0."""
    x = [normal(*SIZES, seed=n) for n in range(3)]

    def gradients(f: Callable[..., Any]) -> Any:
        given = [a.clone().requires_grad_() for a in x]
        return torch.autograd.grad(f(*given).square().sum(), given)

    found = gradients(torch.compile(plain, fullgraph=True, backend=backend))
    for a, b in zip(found, gradients(plain), strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is known on Linux alone")
def test_memory_is_linear() -> None:
    """A window with entropy, received and top weights; the scores alone would be 2 GiB."""
    n = 16_384
    operands = 3 * 2 * n * D * 4  # query, key and value of two heads, float32
    assert extra("regard, window and statistics", n, "device") <= 2.5 * operands


def test_a_derivative_that_records_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    q = normal(2, 5, 4).numpy()
    with below_autograd():
        assert regard.attention_vjp(q, q, q, q, engine="device").query.any()
        monkeypatch.setattr(torch, "inference_mode", nullcontext)
        with pytest.raises(RuntimeError, match="recorded nothing"):
            regard.attention_vjp(q, q, q, q, engine="device")


def test_the_formula_reads_no_number() -> None:
    """On `meta`, where there are none, with care for what is not finite and without."""
    q, k, v, options = case("everything").inputs(np.float32)
    p = problem_from(q, k, v, **options)
    for finite in (True, False):
        call = calls.DeviceCall(p, entropy=True)
        given = {
            name: x for name, x in vars(call.formula).items() if name not in ("b", "h", "offset", "seed", "constants")
        }
        meta = {name: getattr(call.formula, name).to("meta") for name in ("b", "h", "offset", "seed")}
        constants = {n: x.to("meta") for n, x in call.formula.constants.items()}
        formula = type(call.formula)(**given | meta | {"constants": constants, "finite": finite})
        block = Block(formula, range(2, 9), range(4, 20))
        y = block.outputs({n: block.part(n, x.to("meta")) for n, x in call.x.items()})
        assert {x.device.type for x in y} == {"meta"}
        assert y.P.shape == (2, 4, 7, 16)


# What the adapters of PyTorch hand to it


def test_arrays_of_a_device_and_back(device: None) -> None:
    for x in (torch.arange(24.0).reshape(2, 3, 4), torch.arange(6).bfloat16(), torch.zeros(0, 3), torch.tensor(2)):
        found = arrays.tensor(arrays.array(x))
        assert found.dtype is x.dtype
        assert torch.equal(found, x)
        assert found.data_ptr() == x.data_ptr()
    x = torch.arange(24.0).reshape(2, 3, 4)
    view = arrays.array(x).swapaxes(-1, -2)[None, :, 1:]
    assert torch.equal(arrays.tensor(view), x.mT[None, :, 1:])


def test_other_engines_refuse_arrays_of_a_device(device: None) -> None:
    x = torch.ones(1, 2, 2)
    with pytest.raises(ValueError, match="engine 'cpu' refuses this call: the arrays are on the device cpu"):
        regard.attention(x, x, x, engine="cpu")


def test_host_arrays_are_never_left_to_it() -> None:
    p = problem_from(*case("plain").inputs(np.float32)[:3])
    assert engines.choose(p, None).NAME != "device"
    assert engines.refusals(p)["device"] == "runs only when named"


def test_tables_of_a_device_may_be_views(device: None) -> None:
    q, table = normal(2, 9, 4), normal(5, 2)

    def found(table: Any) -> Any:
        x = table.clone(memory_format=torch.preserve_format).requires_grad_()
        out = regard.attention(q, q, q, score=lambda s, b, h, i, j: s * regard.table(x)[h, (i - j) % 5])
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    for x, y in zip(found(table.mT), found(table.mT.contiguous()), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_weights_stay_on_the_device(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, bias = normal(2, 9, 4).bfloat16(), normal(2, 9, 4, seed=1).bfloat16(), normal(9, 9).float()
    options = {"causal": True, "bias": bias, "offset": 1}
    tile = regard.weights(q, k, **options, rows=slice(2, 7, 2), cols=slice(1, None))
    backward = regard.weights(q, k, **options, rows=slice(6, 1, -2), cols=slice(1, None))
    monkeypatch.undo()
    assert tile.dtype is torch.bfloat16
    torch.testing.assert_close(tile, regard.weights(q, k, **options)[:, 2:7:2, 1:], rtol=0.01, atol=0)
    assert torch.equal(backward.flip(-2), tile)


def test_bounds_narrow_the_keys_of_a_block() -> None:
    q, k, v, options = case("window over tiles", n_q=4096, n_k=4096, h=1).inputs(np.float32)
    call = calls.DeviceCall(problem_from(q, k, v, **options), entropy=False)
    blocks = list(call.blocks())
    assert [r for block in blocks for r in block.rows] == list(range(4096))
    assert sum(len(block.rows) * len(block.keys) for block in blocks) < 4096 * 4096 / 3
    for block in blocks:
        assert block.keys.start <= max(0, block.rows.start - 40)
        assert block.keys.stop > min(4095, block.rows.stop - 1 + 3)
