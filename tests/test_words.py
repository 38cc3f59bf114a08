"""Words: the field's own terms in sources and documents, and one meaning for every noun of the engines."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
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

PRONOUNS = {"It", "Its", "They", "Their", "This", "These", "That", "Those", "So", "None", "One", "He", "She"}
VAGUE = {"found", "given", "made", "known", "kept", "told"}
# By room, how many docstrings go on with a pronoun in their second paragraph, and how many names that a module assigns
# are vague. The numbers may only fall: name the noun, and what the result is.
UNCLEAR = {
    ".": (0, 4),
    "core": (1, 4),
    "engines": (0, 4),
    "ops": (1, 15),
    "reference": (1, 0),
    "torch": (13, 53),
}

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


def room(file: Path) -> str:
    """Return the first folder below the package, or "." for its own modules."""
    return file.relative_to(SOURCES).parts[0] if file.parent != SOURCES else "."


def continued_with_pronouns(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings whose second paragraph begins with a pronoun, and how that begins."""
    for line, text in docstrings(file):
        _, _, rest = text.partition("\n\n")
        if (opening := re.match(r"\w+", rest)) and opening.group() in PRONOUNS:
            yield line, rest.splitlines()[0]


def vague_results(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the vague names that a module assigns, with their lines."""
    for x in parsed(file.read_text("utf-8")):
        if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store) and x.id in VAGUE:
            yield x.lineno, x.id


@pytest.mark.parametrize(("column", "unclear"), [(0, continued_with_pronouns), (1, vague_results)])
def test_unclear_words_only_become_fewer(column: int, unclear: Callable[[Path], Iterator[tuple[int, str]]]) -> None:
    places = defaultdict(list)
    for file in files(SOURCES, {".py"}):
        places[room(file)] += [f"{file.relative_to(SOURCES)}:{line}: {text}" for line, text in unclear(file)]
    assert places.keys() >= UNCLEAR.keys(), "UNCLEAR has a room that does not exist"
    for name, found in sorted(places.items()):
        allowed = UNCLEAR.get(name, (0, 0))[column]
        assert len(found) <= allowed, f"{len(found)} in {name}, {allowed} are allowed:\n" + "\n".join(found)
        assert len(found) == allowed, f"{name} has {len(found)}, fewer than {allowed}: lower the number in UNCLEAR"


def test_class_names_are_unique() -> None:
    found = defaultdict(list)
    for file in files(SOURCES, {".py"}):
        for x in parsed(file.read_text("utf-8")):
            if isinstance(x, ast.ClassDef):
                found[x.name].append(f"{file.relative_to(SOURCES)}:{x.lineno}")
    several = {name: places for name, places in found.items() if len(places) > 1}
    assert not several, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(several.items()))
