"""Names of frameworks that are not public are used in one module each, which says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import regard
from sources import parsed

PACKAGE = Path(regard.__file__).parent
MODULES = {"torch": "torch/tensors/modes.py", "jax": "jax/private.py"}
UNDOCUMENTED = ("jax.interpreters", "jaxlib")


def private(name: str) -> bool:
    """Whether a dotted name is of a framework and not public."""
    parts = name.split(".")
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts[1:])
    return name.startswith(UNDOCUMENTED) or (parts[0] in MODULES and hidden)


def names(nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """The dotted names that code imports or looks up, those under which something was imported resolved."""
    known = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for x in node.names:
                known[x.asname or x.name.partition(".")[0]] = x.name if x.asname else x.name.partition(".")[0]
                yield x.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for x in node.names:
                known[x.asname or x.name] = f"{node.module}.{x.name}"
                yield f"{node.module}.{x.name}"
    for node in nodes:
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *reversed(path)])


def found(code: str) -> set[str]:
    return {name for name in names(parsed(code)) if private(name)}


@pytest.mark.parametrize("framework", MODULES)
def test_private_names_are_in_one_module(framework: str) -> None:
    where = {}
    for file in PACKAGE.rglob("*.py"):
        if mine := {x for x in found(file.read_text()) if x.startswith(framework)}:
            where[file.relative_to(PACKAGE).as_posix()] = mine
    assert {*where} == {MODULES[framework]}, where


@pytest.mark.parametrize(
    "code",
    [
        "import torch\nn = torch._C._len_torch_dispatch_stack()",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "from jax._src.dispatch import prim_requires_devices_during_lowering",
        "from jax.interpreters import mlir",
        "import jax._src.core",
        "import jaxlib.xla_client",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert found(code)
    assert not found("import jax, torch\nfrom jax.extend.core import Primitive\ntorch.nn.Linear.__init__")
