"""Another framework enters by a row of `FRAMEWORKS` and an adapter: here host arrays that are no NumPy arrays."""

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import regard
from regard.arguments import frameworks
from regard.loaders import loaders
from regard.ops import callcache


class HostArray:
    """Memory of the host with a dtype, a shape, strides and an address; NumPy cannot read it by itself."""

    __array_ufunc__ = None

    def __init__(self, owner: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], address: int):
        self.owner, self.dtype, self.shape, self.strides, self.address = owner, dtype, shape, strides, address

    @classmethod
    def of(cls, x: Any) -> "HostArray":
        return cls(x, x.dtype, x.shape, x.strides, x.ctypes.data)


def view(x: Any) -> Any:
    """The memory of a host array as NumPy's; other values as they are."""
    if not isinstance(x, HostArray):
        return x
    size = sum((n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)) + x.dtype.itemsize
    return np.ndarray(x.shape, x.dtype, (ctypes.c_char * size).from_address(x.address), 0, x.strides)


def hosted(x: Any) -> Any:
    """Results with host arrays in place of NumPy's."""
    if isinstance(x, np.ndarray):
        return HostArray.of(x)
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return tuple(map(hosted, x))
    if isinstance(x, regard.Seen):
        return {s.name: hosted(value) for s, value in x.items()}
    if isinstance(x, regard.Differential):
        return [hosted(getattr(x, name)) for name in ("query", "key", "value", "bias", "sink")]
    return x


def on_host_arrays(name: str) -> Callable[..., Any]:
    function = getattr(regard, name)
    return lambda *args, **options: hosted(
        function(*map(view, args), **{option: view(x) for option, x in options.items()})
    )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The framework: its module, its adapter, and the row."""
    package, adapter = ModuleType("hostarrays"), ModuleType("adapter")
    package.HostArray = HostArray  # type: ignore[attr-defined]
    for name in ("attention", "attention_vjp"):
        setattr(adapter, name, on_host_arrays(name))
    monkeypatch.setitem(sys.modules, "hostarrays", package)
    monkeypatch.setitem(loaders, "host", lambda: adapter)
    monkeypatch.setattr(frameworks, "FRAMEWORKS", (*frameworks.FRAMEWORKS, ("hostarrays", "HostArray", "host")))


@pytest.fixture
def inputs() -> list[Any]:
    return list(np.random.default_rng(0).standard_normal((4, 2, 6, 8)).astype(np.float32).transpose(0, 1, 3, 2))


def test_calls_have_the_bits_of_numpy(host: None, inputs: list[Any]) -> None:
    q, k, v, dout = inputs
    mask, bias, sink = np.tril(np.ones((8, 8), bool)), np.eye(8, dtype=np.float32), np.ones(2, np.float32)
    arrays = {"mask": mask, "bias": bias, "sink": sink}
    host_arrays: Any = {name: HostArray.of(x) for name, x in arrays.items()}
    a, b, c, d = map(HostArray.of, inputs)
    out, seen = regard.attention(a, b, c, observe=["entropy"], **host_arrays)  # type: ignore[call-overload]
    expected, statistics = regard.attention(q, k, v, observe=["entropy"], **arrays)
    gradients = regard.attention_vjp(a, b, c, d, **host_arrays)  # type: ignore[arg-type]
    g = regard.attention_vjp(q, k, v, dout, **arrays)
    ours = [out, seen["entropy"], *gradients]  # type: ignore[misc]
    theirs = [expected, statistics.entropy, g.query, g.key, g.value, g.bias, g.sink]
    for x, y in zip(ours, theirs, strict=True):
        assert type(x) is HostArray
        assert view(x).tobytes() == y.tobytes()


def test_a_known_call_is_numpys(host: None, inputs: list[Any]) -> None:
    for _ in range(2):
        regard.attention(*inputs[:3], causal=True)
    stored = len(callcache.entries())
    out: Any = regard.attention(*map(HostArray.of, inputs[:3]), causal=True)  # type: ignore[call-overload]
    assert view(out).tobytes() == regard.attention(*inputs[:3], causal=True).tobytes()
    assert len(callcache.entries()) == stored
