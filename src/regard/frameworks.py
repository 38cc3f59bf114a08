"""Arrays of other frameworks: recognized without importing any, and handed to the adapter that serves them."""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")


def adapter(*values: object) -> Any:
    """The adapter of the framework that one of the values is an array of; None if there is none.

    A framework that the caller has not imported has no arrays, so none is imported to find out.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None:
        for value in values:
            if isinstance(value, tensor):
                return import_module("regard.torch.adapter")
    return None


def dispatched(function: Callable[P, R]) -> Callable[P, R]:
    """A public function of NumPy arrays that leaves calls with other arrays to their adapter's function of that name."""

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        found = adapter(*args, *kwargs.values())
        if found is None:
            return function(*args, **kwargs)
        return cast(R, getattr(found, function.__name__)(*args, **kwargs))

    return either
