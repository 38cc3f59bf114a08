"""Python sources, each parsed once for all tests that read them."""

import ast
import gc
from functools import cache


@cache
def parsed(text: str) -> tuple[ast.AST, ...]:
    """Return the nodes of a module, itself first.

    They stay out of garbage collections, which those of the package would make 0.4 s longer each.
    """
    nodes = tuple(ast.walk(ast.parse(text)))
    gc.freeze()
    return nodes


def imported(text: str) -> set[str]:
    """Return the packages that a module imports, wherever it does."""
    names = [x.name for node in parsed(text) if isinstance(node, ast.Import) for x in node.names]
    names += [str(node.module) for node in parsed(text) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
