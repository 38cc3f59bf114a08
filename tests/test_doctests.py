"""The examples in the docstrings run, in every module of the package as it is installed."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import regard

MODULES = ["regard", *(module.name for module in pkgutil.walk_packages(regard.__path__, "regard."))]
EXPLAINED_BY_EXAMPLES = [
    "regard.api",
    "regard.engines",
    "regard.examplemodel.model",
    "regard.insight.heads",
    "regard.linear",
    "regard.merging",
    "regard.multihead",
    "regard.observing",
    "regard.planning",
    "regard.positions",
    "regard.problem",
    "regard.rules.bounds",
    "regard.rules.derivative",
    "regard.rules.expression",
    "regard.rules.intervals",
    "regard.rules.masks",
    "regard.rules.program",
    "regard.rules.scores",
    "regard.rules.tracing",
    "regard.stepping",
    "regard.threads",
]


def run(module: ModuleType) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples(name: str) -> None:
    failed, attempted = run(importlib.import_module(name))
    assert failed == 0
    assert attempted or name not in EXPLAINED_BY_EXAMPLES


def test_no_module_of_the_list_is_missing() -> None:
    homes = {getattr(regard, name).__module__ for name in regard.__all__ if callable(getattr(regard, name))}
    assert homes <= set(EXPLAINED_BY_EXAMPLES) <= set(MODULES)


def test_a_wrong_example_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ModuleType("wrong", ">>> 1 + 1\n3\n")).failed == 1
    assert "Got:\n    2" in capsys.readouterr().out
