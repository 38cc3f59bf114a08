"""The options of `regard.attention`, declared once.

`CallOptions` has their names, types and defaults. Signatures, the options that adapters and captures pass on, and what
identifies a cached call follow from it. Tests hold the types in `core.types` and every public signature against it.
"""

from __future__ import annotations  # so that `help` shows the names of types

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from regard.core.problem import of_kind, of_role
from regard.core.statistics import Statistic
from regard.core.types import ArrayLike, LayoutName, MaskLike, ScoreLike

F = TypeVar("F", bound=Callable[..., Any])


class CallOptions(NamedTuple):
    """The options of one call, as `regard.attention` describes them."""

    mask: MaskLike = None
    causal: bool = False
    score: ScoreLike = None
    bias: ArrayLike | None = None
    scale: float | None = None
    metric: ArrayLike | None = None
    sink: ArrayLike | None = None
    dropout: float = 0.0
    seed: int | ArrayLike | None = None
    offset: int | ArrayLike | None = None
    origin: tuple[int, int, int] | None = None
    layout: LayoutName = "bhnd"
    observe: Sequence[str | Statistic] = ()


DEFAULTS: dict[str, Any] = CallOptions._field_defaults
RULES = of_kind("rule")
ARRAYS = of_kind("pairs", "heads")  # inputs beside query, key and value; a metric is multiplied before
AFTER_WEIGHTS = (*of_role("weights"), "layout", "observe")  # weights do not depend on these
LAST = ("return_weights", "observe", "dout", "engine")  # in signatures


def taking_options(*, without: Sequence[str] = ("observe",)) -> Callable[[F], F]:
    """Decorate a function of `**options` to list them in its signature, all but some of them."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        parameters = [x for x in own.parameters.values() if x.kind is not x.VAR_KEYWORD]
        end = next((n for n, x in enumerate(parameters) if x.name in LAST), len(parameters))
        parameters[end:end] = [
            x.replace(kind=x.KEYWORD_ONLY, annotation=getattr(x.annotation, "__forward_arg__", x.annotation))
            for name, x in inspect.signature(CallOptions).parameters.items()
            if name not in without
        ]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
