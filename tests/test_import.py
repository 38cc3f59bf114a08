"""`import regard` imports NumPy and nothing else of others, and a call imports no framework, and no compiler of one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard

PACKAGE = Path(regard.__file__).parent
CALL = "x = numpy.ones((2, 8, 4), numpy.float32); regard.attention(x, x, x, causal=True, observe=['entropy'])"
CHECK = """
import json, sys
import {}
before = set(sys.modules)
import regard
{}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
COMPILERS = {
    "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes",
    "torch.nn.attention.bias", "torch.nn.attention.flex_attention",
}  # fmt: skip
"""Modules that cost as much as the rest of PyTorch, and those that load them."""


def loaded(root: Path, first: str, then: str) -> set[str]:
    """The modules that `import regard` (from `root`) and `then` load after `import first`."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", CHECK.format(first, then)]
    return {*json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)}


def foreign(root: Path, then: str = "") -> set[str]:
    """The packages that `import regard` (from `root`) and `then` load, beyond NumPy and the standard library."""
    packages = {name.partition(".")[0] for name in loaded(root, "numpy", then)}
    return packages - sys.stdlib_module_names - {"regard", "numpy"}


def test_importing_loads_nothing_of_others() -> None:
    assert foreign(PACKAGE.parent) == set()


def test_a_call_loads_no_framework() -> None:
    assert foreign(PACKAGE.parent, CALL) <= {"threadpoolctl", "llvmlite"}
    assert foreign(PACKAGE.parent, "from regard import *") == set()


def test_tensors_load_no_compiler() -> None:
    calls = """
import torch, regard.torch
x = torch.ones(2, 8, 4, requires_grad=True)
regard.attention(x, x, x, engine="tiled").sum().backward()
with regard.torch.sdpa():
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
"""
    modules = loaded(PACKAGE.parent, "torch", calls)
    assert "regard.torch.public.attention" in modules
    assert modules & COMPILERS == set()


def test_doctor_is_there_after_an_import() -> None:
    assert foreign(PACKAGE.parent, "regard.doctor.report") == set()


def test_a_plain_call_loads_one_engine() -> None:
    code = """
import sys, numpy, regard
x = numpy.ones((2, 8, 4), numpy.float32)
regard.attention(x, x, x)
print(*(name for name in ("cpu", "tiled", "device", "specification") if f"regard.engines.{name}" in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "cpu\n"


def test_the_first_view_of_a_page_loads_no_framework() -> None:
    view = """
from regard.viewer.serve.answers import Answers
from regard.viewer.scene.sources import Settings, example
answers = Answers([example(Settings("abab"))], patience=None)
for path in ("scenes", "example/heads", "example/thumbs/0"):
    assert answers.get(path).status == 200
"""
    assert not foreign(PACKAGE.parent, view) & {"torch", "jax", "transformers", "matplotlib"}


@pytest.mark.parametrize(
    "file", ["__init__.py", "ops/attention.py", "rules/expression.py", "engines/tiled/forward_pass.py"]
)
def test_these_tests_can_fail(tmp_path: Path, file: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "regard", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    (tmp_path / "some_framework.py").touch()
    changed = tmp_path / "regard" / file
    changed.write_text(changed.read_text() + "\nimport some_framework\n")
    then = "" if file == "__init__.py" else CALL
    assert "some_framework" in foreign(tmp_path, then)
