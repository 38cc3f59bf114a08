"""Arrays of other frameworks: recognized without importing any, and handed to the adapter that serves them."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

ARRAYS = {"torch": "Tensor", "jax": "Array"}
P = ParamSpec("P")
R = TypeVar("R")


def adapter(*values: object) -> Any:
    """The adapter of the framework that one of the values is an array of; None if there is none.

    A framework that the caller has not imported has no arrays, so none is imported to find out.
    """
    for name, array in ARRAYS.items():
        kind = getattr(sys.modules.get(name), array, None)
        if kind is not None and any(_holds(value, kind) for value in values):
            return _torch() if name == "torch" else import_module(f"regard.{name}.adapter")
    return None


def _torch() -> Any:
    """The adapter of PyTorch, by a statement: Dynamo follows those, and breaks at `import_module`."""
    import regard.torch.adapter

    return regard.torch.adapter


def _holds(value: object, kind: type) -> bool:
    """Whether it is such an array, or a tuple with one."""
    return isinstance(value, kind) or (type(value) is tuple and any(isinstance(x, kind) for x in value))


def compiling() -> bool:
    """Whether PyTorch traces a graph now, in which there are no values."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def dispatched(function: Callable[P, R]) -> Callable[P, R]:
    """A public function of NumPy arrays that leaves calls on other arrays to their adapter's function of its name."""

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        found = adapter(*args, *kwargs.values())
        if found is None:
            return function(*args, **kwargs)
        return cast(R, getattr(found, function.__name__)(*args, **kwargs))

    return either


def constructor(function: Callable[P, R]) -> Callable[P, R]:
    """A function that makes a rule; in a graph that is being traced, one that only names the rule."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compiling():
            return function(*args, **kwargs)
        from regard.torch import graph

        return cast(R, graph.construct(function.__name__, args, kwargs))

    return make
