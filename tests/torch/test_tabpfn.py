"""Registration with TabPFN, whose registry is imitated, as it is not installed where the tests run."""

import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import regard.torch

pytestmark = pytest.mark.engine("tiled")

SHARED = "tabpfn.architectures.shared"


@dataclass
class Spec:
    """What TabPFN tells a backend of a call, as far as ours reads it."""

    device: torch.device
    seq_len_kv: int | None = 5
    dtype: torch.dtype = torch.float32


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backends that were registered with a package in the place of TabPFN."""
    backends: list[Any] = []

    def register(backend: Any) -> None:
        if backend not in backends:
            backends.append(backend)

    for name, attributes in {
        "attention_backends": {"register_attention_backend": register},
        "scaled_dot_product_attention": {},
    }.items():
        monkeypatch.setitem(sys.modules, f"{SHARED}.{name}", types.ModuleType(name))
        vars(sys.modules[f"{SHARED}.{name}"]).update(attributes)
    for name in "tabpfn", "tabpfn.architectures", SHARED:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return backends


def test_one_backend_serves_calls_on_the_cpu(registered: list[Any]) -> None:
    regard.torch.register_tabpfn()
    regard.torch.register_tabpfn()
    (backend,) = registered
    assert backend.name == "regard"
    cpu = torch.device("cpu")
    specs = Spec(cpu), Spec(torch.device("cuda")), Spec(cpu, seq_len_kv=None), Spec(cpu, dtype=torch.int8)
    assert [backend.is_preferred(spec) for spec in specs] == [True, False, False, False]


def test_grouped_heads_in_the_package_s_layout_and_gradients(registered: list[Any]) -> None:
    regard.torch.register_tabpfn()
    q = torch.randn(2, 7, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 5, 2, 8, dtype=torch.float64)
    out = registered[0].run(q, k, v, quantized_kv=None)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (out, expected)))


def test_without_tabpfn_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tabpfn", None)
    with pytest.raises(ImportError, match="register_tabpfn needs tabpfn with a registry of attention backends"):
        regard.torch.register_tabpfn()
