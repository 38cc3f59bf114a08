"""The record of options, and all that must agree with it."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest

import regard
from regard.core import types
from regard.core.options import AFTER_WEIGHTS, ARRAYS, DEFAULTS, RULES, CallOptions
from regard.core.problem import Problem
from regard.core.statistics import NAMES, StatisticName
from regard.ops.callcache import CACHED
from regard.ops.normalization import problem_from

EVERY = set(CallOptions._fields)


@pytest.mark.parametrize(
    ("function", "without"),
    [
        (regard.attention, ()),
        (regard.weights, ("dropout", "seed", "observe")),
        (regard.plan, ("observe",)),
        (regard.steps, ("observe",)),
        (regard.attention_vjp, ("observe",)),
        (regard.attention_jvp, ("observe",)),
        (regard.attention_vjp_jvp, ("observe",)),
        (regard.multihead_attention, ("layout",)),
    ],
)
def test_signatures_have_every_option_with_its_default(function: Callable[..., Any], without: tuple[str, ...]) -> None:
    found = {name: x.default for name, x in inspect.signature(function).parameters.items() if name in EVERY}
    assert found == {name: x for name, x in DEFAULTS.items() if name not in without}


@pytest.mark.parametrize(
    ("options", "without"),
    [
        (types.WeightOptions, AFTER_WEIGHTS),
        (types.TileOptions, ("dropout", "seed", "observe")),
        (types.Options, ("observe",)),
        (types.HeadsOptions, ("layout", "observe")),
    ],
)
def test_types_have_every_option_with_its_type(options: Any, without: tuple[str, ...]) -> None:
    found = {name: x for name, x in get_type_hints(options).items() if name in EVERY}
    assert found == {name: x for name, x in get_type_hints(CallOptions).items() if name not in without}


def test_types_have_the_name_of_every_statistic() -> None:
    assert get_args(StatisticName) == NAMES


def test_parts_of_the_record() -> None:
    assert {*RULES, *ARRAYS, *AFTER_WEIGHTS, *CACHED} <= EVERY
    assert {*RULES, *ARRAYS} <= set(Problem.__dataclass_fields__)


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'novel'"):
        problem_from(None, None, None, novel=1)
