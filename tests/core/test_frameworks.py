"""Frameworks are found only where the caller has them."""

import subprocess
import sys

import numpy as np
import pytest

import regard
from regard.arguments.frameworks import adapter


class Array:
    """An array of a framework that pretends to be imported."""


def test_numpy_has_no_adapter() -> None:
    assert adapter(np.ones(3), None, "causal", [1]) is None


def test_a_module_without_arrays_is_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", type(sys)("jax"))
    assert adapter(Array()) is None


def test_an_array_of_a_framework_finds_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    framework, package, own = (type(sys)(name) for name in ("jax", "regard.jax", "regard.jax.adapter"))
    framework.Array, package.adapter = Array, own  # type: ignore[attr-defined]
    own.attention = lambda *args, **options: "theirs"  # type: ignore[attr-defined]
    for module in (framework, package, own):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(regard, "jax", package, raising=False)
    x = np.ones((1, 2, 2), np.float32)
    assert regard.attention(Array(), x, x) == "theirs"
    assert regard.attention(x, x, x).shape == (1, 2, 2)


def test_calls_on_numpy_arrays_import_no_adapter() -> None:
    program = (
        "import sys, numpy, regard\n"
        "try:\n    import jax\nexcept ImportError:\n    pass\n"
        "x = numpy.ones((1, 4, 2), numpy.float32)\n"
        "regard.attention(x, x, x, score=regard.alibi(numpy.ones(1)), mask=numpy.ones((4, 4), bool))\n"
        "assert not [name for name in sys.modules if name.startswith(('regard.jax', 'regard.torch'))]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
