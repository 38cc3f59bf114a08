"""`help` of every public function and class: lines that fit, a parameter a line, annotations as they are written."""

import importlib
import inspect
import pydoc
from collections.abc import Iterator
from typing import Any

import pytest

import regard
from regard.arguments.signatures import passing_on

MODULES = ("", ".insight", ".positions", ".examplemodel", ".torch", ".jax")
WIDEST = 100
NOUNS = ("A", "An", "The", "All", "Every", "Mean", "What", "Whether", "Where", "How", "Of", "As")


def public(module: str) -> Iterator[tuple[str, Any]]:
    """The public callables of a module, by name; of one whose framework is not installed, none."""
    try:
        home = importlib.import_module(f"regard{module}")
    except ImportError:
        return
    own = [name for name, x in vars(home).items() if getattr(x, "__module__", "") == home.__name__]
    for name in getattr(home, "__all__", [name for name in own if not name.startswith("_")]):
        if callable(getattr(home, name)):
            yield f"{home.__name__}.{name}", getattr(home, name)


EVERY = dict(pair for module in MODULES for pair in public(module))


def shown(x: Any) -> str:
    """What `help` prints, without what a framework's own base classes add."""
    text = pydoc.plain(pydoc.render_doc(x)).split("\n", 1)[1]  # the first line is pydoc's own: where it is defined
    return text.split(" inherited from torch")[0]


@pytest.mark.parametrize("name", EVERY)
def test_help_fits(name: str) -> None:
    wide = [line for line in shown(EVERY[name]).splitlines() if len(line) > WIDEST]
    assert not wide, "\n".join(wide)


def test_help_has_a_parameter_on_each_line() -> None:
    lines = shown(regard.attention).splitlines()
    begin, end = lines.index("attention("), lines.index(") -> Any")
    parameters = [line.strip() for line in lines[begin + 1 : end]]
    assert parameters[:5] == ["query: Array,", "key: Array,", "value: Array,", "*,", "mask: MaskLike = None,"]
    assert [line.partition(":")[0] for line in parameters if line != "*,"] == list(
        inspect.signature(regard.attention).parameters
    )


def test_first_lines_of_functions_are_imperative_sentences() -> None:
    for name, x in EVERY.items():
        if inspect.isfunction(x):
            first, *rest = (inspect.getdoc(x) or "").splitlines()
            assert first.endswith("."), name
            assert not rest or not rest[0], name
            assert first.split()[0] not in NOUNS, name


def test_options_that_are_passed_on_are_listed_once() -> None:
    def below(x: int, *, a: int = 1, b: int = 2, c: int = 3) -> None:
        pass

    @passing_on(below, without=["c"])
    def above(y: int, *, a: str = "own", **options: int) -> None:
        pass

    assert list(inspect.signature(above).parameters) == ["y", "a", "b"]
    assert inspect.signature(above).parameters["a"].default == "own"
