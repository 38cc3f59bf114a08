"""Arrays of other frameworks, recognized without an import."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from regard.arguments.values import unknown
from regard.loaders import loaders

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
FRAMEWORKS: tuple[tuple[str, str, str], ...] = (("torch", "Tensor", "torch"), ("jax", "Array", "jax"))
"""Frameworks by the module and the name of their class of arrays, with the key of their adapter in `loaders`."""
_plain = {np.ndarray, type(None), bool, int, float, str}


class Namespace(NamedTuple):
    """Functions of one framework, for formulas that serve all frameworks.

    xp: the module with NumPy's functions. hollow(name, x): a NumPy array of the shape and dtype of x for checks, or a
    TypeError that names it. cast(x, dtype): x in a NumPy dtype. constant(x): x without a derivative. like(a, x): a
    NumPy array as an array of x's framework and device.
    """

    xp: Any
    hollow: Callable[[str, Any], Any]
    cast: Callable[[Any, Any], Any]
    constant: Callable[[Any], Any]
    like: Callable[[Any, Any], Any]


NUMPY = Namespace(np, lambda name, x: x, lambda x, dtype: x.astype(dtype, copy=False), lambda x: x, lambda a, x: a)


def plain(kind: C) -> C:
    """Register a type whose values never are arrays of another framework."""
    _plain.add(kind)
    return kind


def imported(module: str, name: str) -> Any:
    """Return a class of a module, or None if nobody has imported the module: then nobody has a value of the class."""
    return getattr(sys.modules.get(module), name, None)


def adapter(*values: object) -> Any:
    """Return the adapter of a framework with an array among the values, or None.

    Values of plain types are skipped: in cold caches, asking takes longer than anything else before a kernel.
    """
    others = [value for value in values if type(value) not in _plain]
    if not others:
        return None
    for module, name, loader in FRAMEWORKS:
        kind = imported(module, name)
        if kind is not None and any(_holds(value, kind) for value in others):
            return loaders[loader]()
    return None


def _holds(value: object, kind: type) -> bool:
    """Return True for an array of this type, or a tuple with one."""
    return isinstance(value, kind) or (type(value) is tuple and any(isinstance(x, kind) for x in value))


def compiling() -> bool:
    """Return True while PyTorch traces a graph, in which there are no values."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def dispatched(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of NumPy arrays to send other arrays to their adapter.

    The adapter has a function of the same name.
    """

    parameters = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def either(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= parameters:
            raise unknown(function, kwargs, parameters)
        framework = adapter(*args, *kwargs.values())
        if framework is None:
            return function(*args, **kwargs)
        return cast(R, getattr(framework, function.__name__)(*args, **kwargs))

    return either


def constructor(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that makes a rule.

    In a traced graph it only names the rule.
    """

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        if not compiling():
            return function(*args, **kwargs)
        return cast(R, loaders["torch"]().construct(function.__name__, args, kwargs))

    return make
