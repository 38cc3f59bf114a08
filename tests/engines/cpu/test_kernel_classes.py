"""Kernels are composed of parts: no towers of classes, no untyped state, no processor's name."""

import ast
import inspect
import pkgutil
import re
from importlib import import_module
from pathlib import Path

import pytest

from regard.engines.cpu import kernels, schedule, spec
from regard.engines.cpu.target.instructions import OWN, targets

CHAIN, METHODS = 2, 45
PROCESSORS = "zen", "granite", "sapphire", "epyc", "xeon", "ryzen", "graviton", "apple"

FOLDER = Path(kernels.__file__).parent
MODULES = [x.name for x in pkgutil.iter_modules([str(FOLDER)])]
ENGINE = kernels.__name__.rpartition(".")[0]
EVERY = [f"{x.__name__}.{y.name}" for x in (kernels, schedule, spec) for y in pkgutil.iter_modules(x.__path__)]


def classes(module: str) -> list[type]:
    """Return the classes that a module of the engine defines."""
    found = vars(import_module(module)).values()
    return [x for x in found if isinstance(x, type) and x.__module__ == module]


def own(kind: type) -> list[type]:
    """Return a class and its bases that are classes of the engine."""
    return [x for x in kind.__mro__ if x.__module__.startswith(ENGINE)]


def methods(kind: type) -> set[str]:
    """Return the methods and properties of a class, inherited ones too."""
    return {name for x in own(kind) for name, y in vars(x).items() if inspect.isroutine(y) or isinstance(y, property)}


@pytest.mark.parametrize("module", EVERY)
def test_classes_are_small(module: str) -> None:
    for kind in classes(module):
        assert len(own(kind)) <= CHAIN, kind
        assert len(methods(kind)) <= METHODS, kind


@pytest.mark.parametrize("module", MODULES)
def test_sources_name_no_processor_and_no_namespace(module: str) -> None:
    text = (FOLDER / f"{module}.py").read_text("utf-8")
    named = {*PROCESSORS, *OWN, *(x.cpu for x in targets().values())} - {"generic"}
    assert not re.findall(rf"(?i)\b({'|'.join(sorted(named))})\w*", text)
    assert "SimpleNamespace" not in text


@pytest.mark.parametrize("module", MODULES)
def test_attributes_are_set_by_constructors_alone(module: str) -> None:
    found = []
    for x in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text("utf-8"))):
        if isinstance(x, ast.FunctionDef) and x.name != "__init__":
            set_here = (y for y in ast.walk(x) if isinstance(y, ast.Attribute) and isinstance(y.ctx, ast.Store))
            found += [ast.unparse(y) for y in set_here if isinstance(y.value, ast.Name) and y.value.id == "self"]
    assert not found


def test_there_are_kernels() -> None:
    found = {x.__name__ for module in EVERY for x in classes(module)}
    assert {"ForwardKernel", "TangentKernel", "SecondPassKernel", "Prefill", "Decode", "BackwardKernel"} <= found
