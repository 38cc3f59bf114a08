"""Processes made by `fork`, which can use this package like their parent.

A child has one thread. A lock of another thread of the parent is never released in the child, and a change in progress
is never finished. So locks of this package are made anew in a child. `fork` waits while another thread imports one of
its modules or is inside of LLVM.
"""

import _imp
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, TypeVar, overload
from weakref import ref

T = TypeVar("T")

IMPORTED = ("regard.", "llvmlite.", "threadpoolctl.")  # modules that calls import lazily
_renewed: dict[int, tuple[ref[Any], dict[str, Callable[[], Any]]]] = {}
_held: list[AbstractContextManager[Any]] = []
_local = threading.local()
# The locks of modules that are being imported, by name. Python renews its global import lock in a child, but not those
# of modules. No import begins while another thread holds the global lock.
_importing: dict[str, Any] = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})


def renewed(owner: Any, name: str, make: Callable[[], T]) -> T:
    """Return make(), and call it again in a child process.

    name: the attribute of `owner`, a module or an object, that holds the result.
    """
    key = id(owner)
    if key not in _renewed:
        _renewed[key] = ref(owner, lambda _: _renewed.pop(key, None)), {}
    _renewed[key][1][name] = make
    return make()


def held(lock: AbstractContextManager[Any]) -> None:
    """Make `fork` wait for this lock, and hold it during the fork.

    The lock is reentrant, and no other is taken inside of it.
    """
    _held.append(lock)


def _before() -> None:
    entered: list[AbstractContextManager[Any]] = []
    waited_for: set[str] = set()
    while True:
        for lock in _held[len(entered) :]:  # before the import lock: a holder of these may import
            lock.__enter__()
            entered.append(lock)
        _imp.acquire_lock()  # held until the fork is made, so that no import begins
        names = {name for name in list(_importing) if f"{name}.".startswith(IMPORTED) and _taken(name)} - waited_for
        if not names and len(entered) == len(_held):
            _local.entered = entered
            return
        _imp.release_lock()
        waited_for |= names
        for name in names:
            with suppress(Exception):  # the importing thread raises this error
                importlib.import_module(name)  # waits for the thread that imports it


def _taken(name: str) -> bool:
    """Return True if another thread holds the lock of a module."""
    lock = _importing[name]()
    return lock is not None and getattr(lock, "owner", None) not in (None, threading.get_ident())


def _after() -> None:
    _imp.release_lock()
    while _local.entered:
        _local.entered.pop().__exit__(None, None, None)


def _in_child() -> None:
    _after()
    for owner, names in list(_renewed.values()):
        living = owner()
        if living is not None:
            for name, make in names.items():
                setattr(living, name, make())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)


class cached_property(Generic[T]):
    """A property computed once, as `functools.cached_property` of Python 3.12.

    The property of Python 3.11 has a lock for all instances. Threads wait for it, and a child may find it locked.
    """

    def __init__(self, function: Callable[[Any], T]):
        self.function, self.__doc__ = function, function.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> "cached_property[T]": ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> T: ...

    def __get__(self, instance: object, owner: type | None = None) -> "cached_property[T] | T":
        if instance is None:
            return self
        value: T = instance.__dict__.setdefault(
            self.name, self.function(instance)
        )  # the value of the first of two threads
        return value
