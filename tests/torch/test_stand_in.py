"""`stand_in`: modules of a package that is not there, and functions of one that is."""

import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import regard.torch
from regard.torch.dropins import stand_in as registry
from regard.torch.dropins.packages import Package, Shared
from regard.torch.dropins.stand_in import stand_in

NAME = "package_for_tests"
MODULES = MappingProxyType({NAME: {"answer": 42}, f"{NAME}.inner.deep": {"f": len}, f"{NAME}.inner": {"f": abs}})


def replaced() -> list[tuple[Any, str, Any]]:
    return [(importlib.import_module(NAME), "answer", 42)]


def known(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setitem(registry.PACKAGES, NAME, Package(NAME, "package-for-tests", "7.1", MODULES, **options))
    monkeypatch.setitem(registry._shared, NAME, Shared())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / NAME
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("answer = 1\ndef ask(): return answer\n")
    (package / "inner" / "__init__.py").write_text("f = min\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def absent() -> bool:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("package-for-tests")
    return importlib.util.find_spec(NAME) is None and not any(name.startswith(NAME) for name in sys.modules)


def test_a_package_that_is_not_installed_is_provided(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    assert absent()
    with stand_in(NAME):
        exec(f"from {NAME} import answer, inner\nimport {NAME}.inner.deep as deep", names := {})
        assert names["answer"] == 42
        assert names["inner"].f is abs
        assert names["deep"].f is len
        for name in MODULES:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.name == name
        assert sys.modules[NAME].__version__ == "7.1"
        assert {importlib.metadata.version(name) for name in (NAME, "package-for-tests")} == {"7.1"}
        assert importlib.metadata.packages_distributions()[NAME] == ["package-for-tests"]
        assert importlib.metadata.version("numpy")
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{NAME}.missing'"):
            importlib.import_module(f"{NAME}.missing")
    assert absent()


def test_functions_of_an_installed_package_are_replaced(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, replaced=replaced)
    ask = importlib.import_module(NAME).ask
    with stand_in(NAME):
        assert ask() == 42
        assert importlib.import_module(f"{NAME}.inner").f is min
    assert ask() == 1


def test_without_with_it_stays_until_it_is_closed(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, replaced=replaced)
    ask = importlib.import_module(NAME).ask
    undo = stand_in(NAME)
    with stand_in(NAME):
        assert ask() == 42
    assert ask() == 42
    undo.close()
    undo.close()
    assert ask() == 1


def test_the_last_thread_that_leaves_undoes_it(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, replaced=replaced)
    ask = importlib.import_module(NAME).ask
    first, second = stand_in(NAME), stand_in(NAME)
    for holder, expected in ((first, 42), (second, 1)):
        thread = threading.Thread(target=holder.close)
        thread.start()
        thread.join()
        assert ask() == expected


def test_an_installed_package_without_replacements_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    theirs = importlib.import_module(f"{NAME}.inner")
    with pytest.raises(RuntimeError, match="package-for-tests is installed, and stand_in would hide it"):
        stand_in(NAME)
    with stand_in(NAME, force=True):
        assert importlib.import_module(NAME).answer == 42
        assert importlib.import_module(f"{NAME}.inner").f is abs
    assert importlib.import_module(NAME).answer == 1
    assert importlib.import_module(f"{NAME}.inner") is theirs


@pytest.mark.parametrize("package", ["numpy", None, 3])
def test_other_packages_are_refused(package: Any) -> None:
    with pytest.raises(ValueError, match="package of stand_in must be "):
        stand_in(package)


def test_force_is_a_bool() -> None:
    with pytest.raises(TypeError, match="force of stand_in must be a bool, got 1"):
        regard.torch.stand_in("natten", force=1)  # type: ignore[arg-type]
