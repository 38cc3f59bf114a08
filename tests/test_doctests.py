"""The examples in the docstrings run, in every module of the package as it is installed."""

import doctest
import importlib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import regard
from sources import modules
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")


def installed(name: str) -> bool:
    """Whether there is such a package; a folder of tests of that name is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


MISSING = tuple(f"regard.{name}" for name in ("torch", "jax") if not installed(name))
FILES = modules(Path(regard.__file__).parents[1])
MODULES = [x for x, file in FILES.items() if ">>> " in file.read_text("utf-8") and not x.startswith(MISSING)]
EXPLAINED_BY_EXAMPLES = [
    "regard.ops.attention",
    "regard.ops.exporting",
    "regard.interpret.capture.captured",
    "regard.interpret.capture.layers",
    "regard.engines",
    "regard.interpret.examplemodel.model",
    "regard.interpret.heads",
    "regard.ops.linear",
    "regard.ops.merging",
    "regard.ops.multihead",
    "regard.core.statistics",
    "regard.ops.planning",
    "regard.ops.retrieval",
    "regard.positions.distances",
    "regard.positions.rotary",
    "regard.positions.sinusoids",
    "regard.core.problem",
    "regard.rules.bounds",
    "regard.rules.buckets",
    "regard.rules.derivative",
    "regard.rules.expression",
    "regard.rules.intervals",
    "regard.rules.grids",
    "regard.rules.masks",
    "regard.rules.program",
    "regard.rules.scores",
    "regard.rules.tracing",
    "regard.ops.stepping",
    "regard.runtime.threads",
    "regard.viewer.looking",
]


def run(module: ModuleType) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", on_cpu(MODULES, "regard.engines", "regard.ops.attention", "regard.ops.planning"))
def test_examples(name: str) -> None:
    failed, attempted = run(importlib.import_module(name))
    assert failed == 0
    assert attempted or name not in EXPLAINED_BY_EXAMPLES


def test_no_module_of_the_list_is_missing() -> None:
    homes = {getattr(regard, name).__module__ for name in regard.__all__ if callable(getattr(regard, name))}
    homes.remove("regard.warning")  # its class has no example
    assert homes <= set(EXPLAINED_BY_EXAMPLES) <= set(MODULES)


def test_a_wrong_example_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ModuleType("wrong", ">>> 1 + 1\n3\n")).failed == 1
    assert "Got:\n    2" in capsys.readouterr().out
