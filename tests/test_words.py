"""Words: the field's own terms in sources and documents, and one meaning for every noun of the engines."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from sources import parsed

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src/regard"

UNMISTAKABLE = re.compile(r"\b(wish(es|ed)?|woven|strands?|brought near|lent|parted|bent|so many of)\b", re.IGNORECASE)
WRITTEN = {".py", ".pyi", ".md", ".ts", ".css", ".html"}
PLACES = "src/regard", "benchmarks", "page/src", "docs", *sorted(x.name for x in ROOT.glob("*.md"))

AMBIGUOUS = {
    "span", "spans", "item", "items", "unit", "units", "cell", "cells", "kind", "kinds", "pairs", "words", "matrices",
    "kept", "cut", "cuts",
}  # fmt: skip
ENGINES = ("cpu", "tiled", "device")

OPENINGS = {"What", "Whether", "Where", "How", "Of", "As"}
DESCRIBED = (".", "engines/cpu")


def files(place: Path, suffixes: set[str] = WRITTEN) -> list[Path]:
    found = [place] if place.is_file() else place.rglob("*")
    return sorted(x for x in found if x.suffix in suffixes and x.is_file() and "_build" not in x.parts)


@pytest.mark.parametrize("place", PLACES)
def test_the_private_dialect_is_gone(place: str) -> None:
    found = []
    for file in files(ROOT / place):
        name = str(file.relative_to(ROOT))
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            words = {x.group().lower() for x in UNMISTAKABLE.finditer(line)}
            found += [f"{name}:{number}: {word}" for word in sorted(words)]
    assert not found, "\n".join(found)


def bound(file: Path) -> Iterator[tuple[str, int]]:
    """The names that a module gives, with their lines; those of others, such as `dtype.kind`, are only read."""
    for x in parsed(file.read_text("utf-8")):
        if isinstance(x, ast.FunctionDef | ast.ClassDef):
            yield x.name, x.lineno
        elif isinstance(x, ast.arg):
            yield x.arg, x.lineno
        elif isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
            yield x.id, x.lineno
        elif isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
            yield x.attr, x.lineno
        elif isinstance(x, ast.alias) and x.asname:
            yield x.asname, x.lineno


def parts(name: str) -> set[str]:
    """Return the words of an identifier, split at underscores and capitals."""
    return {x.lower() for x in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


@pytest.mark.parametrize("engine", ENGINES)
def test_nouns_of_the_engines_have_one_meaning(engine: str) -> None:
    found = [
        f"{file.relative_to(SOURCES)}:{line}: {name}"
        for file in files(SOURCES / "engines" / engine, {".py"})
        for name, line in bound(file)
        if parts(name) & AMBIGUOUS
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tile_WORDS", {"tile", "words"}), ("KernelKind", {"kernel", "kind"}), ("_AMXCell2", {"amx", "cell"})],
)
def test_parts_of_names(name: str, expected: set[str]) -> None:
    assert parts(name) == expected


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module, with the lines of their owners."""
    for x in parsed(file.read_text("utf-8")):
        if isinstance(x, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(x)
            if text:
                yield getattr(x, "lineno", 1), text


@pytest.mark.parametrize("place", DESCRIBED)
def test_docstrings_open_with_a_verb_or_a_noun(place: str) -> None:
    texts = [text for file in files(SOURCES / place, {".py"}) for _, text in docstrings(file)]
    found = [x for x in texts if x.split(maxsplit=1)[0] in OPENINGS]
    assert texts
    assert len(found) < 0.02 * len(texts), "\n".join(x.splitlines()[0] for x in found)


def test_summaries_of_docstrings_are_one_sentence() -> None:
    found = []
    for file in files(SOURCES, {".py"}):
        for line, text in docstrings(file):
            summary = text.split("\n\n", 1)[0]
            lines = len(summary.splitlines())
            if lines > 2 or (lines == 2 and re.search(r"[.]\s+[A-Z]", summary)):
                found.append(f"{file.relative_to(SOURCES)}:{line}: {summary}")
    assert not found, "\n".join(found)


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for file in files(SOURCES, {".py"}):
        for x in parsed(file.read_text("utf-8")):
            if isinstance(x, ast.ClassDef):
                found[x.name].append(f"{file.relative_to(SOURCES)}:{x.lineno}")
    several = {name: places for name, places in found.items() if len(places) > 1}
    assert not several, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(several.items()))
