"""Signatures of public calls as `help` shows them."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from regard.arguments.values import unknown

F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 60  # of a signature on one line; `help` adds a name and more


class _Source(str):
    """An annotation as it is written in the source, without quotes."""

    def __repr__(self) -> str:
        return str(self)


class Listed(inspect.Signature):
    """A signature that `help` shows with a line for each parameter."""

    def __str__(self) -> str:
        return self.format(max_width=WIDTH)

    def format(self, *, max_width: int | None = None, quote_annotation_strings: bool = False) -> str:
        parameters = list(self.parameters.values())
        line = str(inspect.Signature(parameters, return_annotation=self.return_annotation))
        if max_width is None or len(line) <= max_width:
            return line
        lines, bare = [], False
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY and not bare:
                lines.append("*")
            bare |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
            lines.append(str(parameter))
        empty = self.return_annotation is self.empty
        returned = "" if empty else f" -> {inspect.formatannotation(self.return_annotation)}"
        return "(\n" + "".join(f"    {text},\n" for text in lines) + ")" + returned


def listed(*functions: Any) -> None:
    """Give functions, and the methods of classes and their bases, signatures in the form of `help`."""
    for function in functions:
        if isinstance(function, type):
            own = [x for x in function.__mro__ if x.__module__.startswith("regard")]
            listed(*(x for base in own for x in vars(base).values() if not isinstance(x, type)))
            continue
        function = getattr(function, "__func__", function)
        if inspect.isfunction(function):
            signature = inspect.signature(function)
            parameters = [x.replace(annotation=_source(x.annotation)) for x in signature.parameters.values()]
            shown = Listed(parameters, return_annotation=_source(signature.return_annotation))
            function.__signature__ = shown  # type: ignore[attr-defined]


def _source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def passing_on(below: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[[F], F]:
    """Decorate a function that passes its `**options`, and `*args` if it has them, to another one.

    The signature lists the options, and the other parameters, of that one.
    """

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = {name: x for name, x in own.parameters.items() if x.kind not in variable}
        every = "args" in own.parameters
        for name, x in inspect.signature(below).parameters.items():
            if (every or x.kind is x.KEYWORD_ONLY) and name not in without:
                parameters.setdefault(name, x)
        function.__signature__ = own.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
        return function

    return decorate


def named(function: F, *, made: Collection[str] = ()) -> F:
    """Decorate a function to suggest the intended option for an unknown one.

    made: as in `hint`.
    """
    parameters = frozenset(inspect.signature(function).parameters)

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= parameters:
            raise unknown(function, kwargs, parameters, made)
        return function(*args, **kwargs)

    return cast(F, either)


def named_beside(constructor: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method as `named` does, with the options of its class's constructor."""
    return functools.partial(named, made=frozenset(inspect.signature(constructor).parameters))
