"""Python sources, each parsed once for all tests that read them."""

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(text: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a module, itself first.

    They stay out of garbage collections, which those of the package would make 0.4 s longer each.
    """
    nodes = tuple(ast.walk(ast.parse(text)))
    gc.freeze()
    return nodes


def modules(root: Path) -> dict[str, Path]:
    """Return the files of regard's modules below a folder of packages, by their names."""
    found = {}
    for path in sorted((root / "regard").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(text: str) -> set[str]:
    """Return the packages that a module imports, wherever it does."""
    names = [x.name for node in parsed(text) if isinstance(node, ast.Import) for x in node.names]
    names += [str(node.module) for node in parsed(text) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
