"""Packages that regard stands in for: replaced where they are installed, provided where they are not."""

from __future__ import annotations  # so that `help` shows the names of types

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.runtime.forks import renewed

Attribute = tuple[Any, str, Any]  # an owner, a name of it, and what it becomes


@dataclass(frozen=True)
class Package:
    """One package: its names, and what takes their place.

    name: of its top module. distribution: its name on PyPI. version: the one whose functions ours follow.

    modules: names and values of each module, by its path; the top module is one of them. They are provided where the
    package is not installed.

    replaced: called where it is installed, returns what to set in its modules. None refuses such a package.

    refused: modules that only other versions of it have, and what their import says while ours are provided.
    """

    name: str
    distribution: str
    version: str
    modules: Mapping[str, Mapping[str, Any]]
    replaced: Callable[[], Iterable[Attribute]] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def applied(self, force: bool) -> ExitStack:
        """Put ours in its place until the returned stack is closed.

        force: provide modules in the place of an installed package that has no replacements.
        """
        installed = _installed(self.name)
        if installed and self.replaced is not None:
            return with_attributes(self.replaced())
        if installed and not force:
            raise RuntimeError(
                f"{self.distribution} is installed, and stand_in would hide it: give force=True to do so"
            )
        return _with_modules(self)


class Shared:
    """A change of the process, made when the first holder enters and undone when the last has left."""

    def __init__(self) -> None:
        self._lock = renewed(self, "_lock", threading.Lock)
        self._depth = 0
        self._undo = ExitStack()

    def held(self, apply: Callable[[], ExitStack]) -> ExitStack:
        """Return a stack that holds the change until it is closed.

        apply: makes the change, and returns what undoes it.
        """
        with self._lock:
            if self._depth == 0:
                self._undo = apply()
            self._depth += 1
        holder = ExitStack()
        holder.callback(self._leave)
        return holder

    def _leave(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._undo.close()


def _installed(name: str) -> bool:
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def with_attributes(attributes: Iterable[Attribute]) -> ExitStack:
    """Set attributes until the returned stack is closed."""
    stack = ExitStack()
    for owner, name, x in attributes:
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, x)
    return stack


def _with_modules(package: Package) -> ExitStack:
    """Provide the modules of a package, with its specs and its version."""
    stack = ExitStack()
    hidden = [name for name in sys.modules if f"{name}.".startswith(f"{package.name}.")]
    for name in hidden:
        stack.callback(sys.modules.__setitem__, name, sys.modules.pop(name))
    finder, last = _Finder(package), _Refusals(package.refused)
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(last)  # after all finders: a module that is there is imported
    stack.callback(sys.meta_path.remove, finder)
    stack.callback(sys.meta_path.remove, last)
    for name in sorted(package.modules):  # a parent before its children
        sys.modules[name] = _module(package, name)
        stack.callback(sys.modules.pop, name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    return stack


def _module(package: Package, name: str) -> ModuleType:
    module = ModuleType(name, f"{package.distribution} {package.version}, by regard.torch.stand_in.")
    module.__spec__ = ModuleSpec(name, None, origin="regard", is_package=True)
    module.__path__ = []  # so that a missing submodule is a ModuleNotFoundError of its own name
    module.__package__ = name
    vars(module).update(__version__=package.version, **package.modules[name])
    return module


class _Finder(DistributionFinder):
    """Finds the distribution of a provided package, and no module."""

    def __init__(self, package: Package) -> None:
        self._distribution = _Distribution(package)

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        name = None if context is None else context.name
        ours = self._distribution.metadata["Name"]
        return [self._distribution] if name is None or _normal(name) == _normal(ours) else []


class _Refusals(MetaPathFinder):
    """Gives the import of a missing module an error of its own.

    `importlib.util.find_spec` says None all the same: packages ask it whether there is such a module, and it must not
    raise. So an import is told from a question by the function of the import system that asks.
    """

    def __init__(self, messages: Mapping[str, str]) -> None:
        self._messages = messages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname in self._messages and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(self._messages[fullname], name=fullname)


class _Distribution(Distribution):
    def __init__(self, package: Package) -> None:
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {package.distribution}\nVersion: {package.version}\n",
            "top_level.txt": f"{package.name}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        return Path(path)


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
