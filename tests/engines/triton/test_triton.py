"""The triton engine without a GPU: kernels compiled for several, bounds, and arrays that lie on a device."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from cases import CASES, case
from interpreter import language_patched_once
from regard import engines

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from regard.core import tensors as arrays  # noqa: E402
from regard.engines import triton as engine  # noqa: E402
from regard.engines.triton.kernels import forward  # noqa: E402
from regard.engines.triton.launch import forward_launch, launching  # noqa: E402
from regard.ops.normalization import problem_from  # noqa: E402

HOST = arrays.HostMemory
KERNELS = {
    80: ["forward", "large query"],
    90: ["large forward", "merge", "jvp_jvp", "rows", "deep bias"],
    100: ["large key_value", "table", "part", "tangent of rows"],
}


def test_kernels_compile_without_a_device() -> None:
    """In one process, for it takes seconds to start. REGARD_COMPILE=all: every kernel for every target and dtype."""
    everything = os.environ.get("REGARD_COMPILE") == "all"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_kernels.py")
    wanted = [f"{capability}:{'' if everything else ','.join(names)}" for capability, names in KERNELS.items()]
    for kind in ("bfloat16", "float16", "float32", "float64") if everything else ("bfloat16",):
        command = [sys.executable, "-W", "ignore", str(script), kind, *wanted]
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr[-3000:]
        lines = [line.split(":") for line in found.stdout.splitlines()]
        compiled = {(name, line.split()[0]) for name, line in lines}
        assert compiled >= {(name, f"sm_{capability},") for capability, names in KERNELS.items() for name in names}
        for name, line in lines:
            shared, copies = int(line.split()[1]), int(line.split()[4])
            assert shared <= 163 * 1024, "more than a block of sm_80 may have"
            if name.startswith("large") and name != "large rows" and kind.endswith("16"):
                assert copies > 0, "loads are wide, and run behind the products"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not engine.interpreted():
        pytest.skip("a GPU is there")
    language_patched_once(monkeypatch)


def visited(p: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many tiles forward looks at, and in how many of them at the mask."""
    seen: list[bool] = []
    add = forward.add

    def counted(*args: Any) -> Any:
        seen.append(bool(args[3]))
        return add(*args)

    monkeypatch.setitem(forward.forward.fn.__globals__, "add", counted)
    forward_launch.forward(p)
    monkeypatch.undo()
    return len(seen), sum(seen)


@pytest.mark.parametrize(
    ("name", "sizes", "tiles", "mixed"),
    [
        ("causal over tiles", {"n_q": 256, "n_k": 256, "h": 1}, 10, 4),
        ("window over tiles", {"n_q": 256, "n_k": 320, "h": 1}, 11, 11),
        ("documents", {"n_q": 192, "n_k": 192, "h": 1, "lead": ()}, 3, 3),
        ("score that hides", {"n_q": 192, "n_k": 192, "h": 1, "lead": ()}, 6, 0),
        ("blocks", {"n_q": 24, "n_k": 24, "h": 1, "lead": ()}, 1, 1),
    ],
)
def test_bounds_visit_no_more_tiles_than_they_must(
    name: str, sizes: dict[str, Any], tiles: int, mixed: int, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, options = case(name, **sizes).inputs(np.float32)
    assert visited(problem_from(q, k, v, **options), monkeypatch) == (tiles, mixed)


def test_keys_that_are_split_between_programs(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 8), np.float32) for n in (1, 300, 300))
    names = ["lse", "entropy", "visible", "argmax", "max"]
    for options in ({}, {"mask": regard.window(200), "sink": np.array([0.3, -1.0])}):
        monkeypatch.setattr(forward_launch, "splits", lambda *args: 1)
        whole, one = regard.attention(q, k, v, **options, observe=names, engine="triton")
        monkeypatch.setattr(forward_launch, "splits", lambda *args: 4)
        parts, four = regard.attention(q, k, v, **options, observe=names, engine="triton")
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)
        for name in names:
            np.testing.assert_allclose(four[name], one[name], rtol=0, atol=1e-6)


# Arrays on a device: here memory of the host, which the arrays only view


@pytest.fixture
def device(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU are treated as those of a device are."""
    monkeypatch.setattr(arrays, "HostMemory", arrays.DeviceMemory)


def test_arrays_of_a_device_and_back(device: None) -> None:
    for x in (torch.arange(24.0).reshape(2, 3, 4), torch.arange(6).bfloat16(), torch.zeros(0, 3), torch.tensor(2)):
        found = arrays.tensor(arrays.array(x))
        assert found.dtype is x.dtype
        assert torch.equal(found, x)
        assert found.data_ptr() == x.data_ptr()
    x = torch.arange(24.0).reshape(2, 3, 4)
    view = arrays.array(x).swapaxes(-1, -2)[None, :, 1:]
    assert torch.equal(arrays.tensor(view), x.mT[None, :, 1:])


def test_tensors_of_a_device_go_to_the_engine(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, statistics, both modes and double backward, against the engine on arrays of the host."""
    options = {"causal": True, "observe": ["lse", "normalized_entropy", regard.top(2)]}
    q, k, v = (torch.randn(2, 12, 4, dtype=torch.float64, generator=torch.manual_seed(0)) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)

    def loss(q: Any, k: Any, slopes: Any) -> Any:
        out = regard.attention(q, k, v, causal=True, score=regard.alibi(regard.table(slopes)))
        return (out**2).sum()

    def found() -> list[Any]:
        out, seen = regard.attention(q, k, v, **options)
        best = seen[regard.top(2)]
        x = [y.clone().requires_grad_() for y in (q, k, slopes)]
        first = torch.autograd.grad(loss(*x), x, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), x)
        forward = torch.func.jvp(loss, (q, k, slopes), (k, q, slopes))
        return [out, seen.lse, seen.normalized_entropy, best.values, best.indices, *first, *second, *forward]

    there = [x.detach().clone() for x in found()]
    monkeypatch.setattr(arrays, "HostMemory", HOST)
    for x, y in zip(there, found(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_other_engines_refuse_arrays_of_a_device(device: None) -> None:
    x = torch.ones(1, 2, 2)
    with pytest.raises(ValueError, match="engine 'cpu' refuses this call: the arrays are on the device cpu"):
        regard.attention(x, x, x, engine="cpu")


def test_the_engine_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if not torch.cuda.is_available():
        assert engine.state.__wrapped__() == ("no CUDA device (TRITON_INTERPRET=1 runs the kernels on the processor)")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    assert engine.state.__wrapped__() == (
        "Triton 3.6.0 compiles no function that returns None: pip install 'triton>=3.8'"
    )
    monkeypatch.setattr("triton.__version__", "3.10.1")
    assert engine.state.__wrapped__() is None
    monkeypatch.setattr(engine, "find_spec", lambda name: None if name == "triton" else object())
    assert engine.state.__wrapped__() == "triton is missing: pip install triton"


def test_an_empty_array_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of a device refuses addresses of the host, and of arrays without entries there are no others."""
    monkeypatch.setattr(launching, "INTERPRETED", False)
    x = np.zeros((2, 3), np.float32)
    assert launching.pointer(x[:, :0]).data_ptr() == 0
    assert launching.pointer(x).data_ptr() == x.ctypes.data


def test_host_arrays_are_never_left_to_it(interpreted: None) -> None:
    q, k, v, options = CASES[0].inputs(np.float32)
    p = problem_from(q, k, v, **options)
    assert engines.choose(p, None).NAME != "triton"
    assert engines.refusal(engine, p) == "runs only when named"  # type: ignore[arg-type]


def test_tables_of_a_device_may_be_views(device: None) -> None:
    q = torch.randn(2, 9, 4, generator=torch.manual_seed(0))
    table = torch.randn(5, 2, generator=torch.manual_seed(1))

    def found(table: Any) -> Any:
        x = table.clone(memory_format=torch.preserve_format).requires_grad_()
        out = regard.attention(q, q, q, score=lambda s, b, h, i, j: s * regard.table(x)[h, (i - j) % 5])
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    for x, y in zip(found(table.mT), found(table.mT.contiguous()), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("given", [False, True], ids=["lse made", "lse given"])
def test_weights_stay_on_the_device(given: bool, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (torch.randn(2, 9, 4, generator=torch.manual_seed(n)).bfloat16() for n in range(2))
    bias = torch.randn(9, 9, generator=torch.manual_seed(2))
    options = {"causal": True, "bias": bias, "offset": torch.tensor(1)}
    if given:
        options["lse"] = regard.attention(q, k, k, **options, observe=["lse"])[1].lse
    host = monkeypatch.context()
    expected = regard.weights(q, k, **options, engine="triton")
    tile = regard.weights(q, k, **options, rows=slice(2, 7, 2), cols=slice(1, None))
    assert tile.dtype is torch.bfloat16
    assert torch.equal(tile, expected[:, 2:7:2, 1:])
    with host as patch:
        patch.setattr(arrays, "HostMemory", HOST)
        torch.testing.assert_close(expected, regard.weights(q, k, **options), rtol=0.01, atol=0)


@pytest.mark.parametrize(
    "options",
    [{"causal": True, "offset": 1}, {"mask": regard.window(64, None), "offset": 63}],
    ids=["the last row alone sees the first key", "the first row alone sees the last key"],
)
def test_a_single_pair_of_a_tile_is_seen(options: dict[str, Any], interpreted: None) -> None:
    """At the corners of tiles, where bounds that are off by one skip it, in both directions."""
    q, k, v, dout = (np.random.default_rng(n).standard_normal((1, 128, 4), np.float32) for n in range(4))
    out = regard.attention(q, k, v, engine="triton", **options)
    got = regard.attention_vjp(q, k, v, dout, engine="triton", **options)
    expected = regard.attention_vjp(q, k, v, dout, engine="spec", **options)
    np.testing.assert_allclose(out, regard.attention(q, k, v, engine="spec", **options), rtol=0, atol=1e-5)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=0, atol=1e-5)
