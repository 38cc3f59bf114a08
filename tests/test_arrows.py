"""Imports within the package: they lead down, in no long circle, and inside of functions only where that is listed."""

import ast
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import regard
from regard.engines import engines
from sources import imported, modules, parsed

SOURCE = Path(regard.__file__).parent.parent

LAYERS = (
    "loaders version warning",
    "arguments",
    "runtime",
    "rules",
    "core",
    "reference",
    "engines",
    "parallel",
    "ops",
    "positions",
    "interpret",
    "insight examplemodel",
    "torch jax",
    "viewer",
    "regard",  # the public face, `regard/__init__.py`
    "doctor",
    "cli",
    "__main__",
)
"""Rooms, and modules beside them, from the lowest to the highest; those of one line know nothing of each other."""

FLOORS = (
    "tensors",
    "call",
    "composed",
    "operators",
    "autograd",
    "compiled",
    "public",
    "nn",
    "dropins",
    "processes",  # replaces PyTorch's functions by those of drop-ins
    "capture",
    "flash_attn natten xformers",  # modules that users import
    "torch",  # the public face, `regard/torch/__init__.py`
)
"""The same for the packages of `torch/`."""

ORDER = {"regard": LAYERS, "regard.torch": FLOORS}
"""The packages whose rooms have an order."""

CIRCLE = 3
"""Modules of the largest circle that may be: types name each other where a kernel has values and a value its kernel."""

COMPILER = "llvmlite: the engine answers `state` and `supports` without the compiler"
KERNEL = "the language of kernels: loaded only where no compiled kernel is cached"
COMMAND = "each command loads what it needs"
LAZY = {
    "regard": ("*", "public names and adapters are loaded when they are first used"),
    "regard.cli": (
        "doctor examplemodel insight interpret.ablation interpret.table ops.planning ops.stepping viewer.command "
        "viewer.show.steps",
        COMMAND,
    ),
    "regard.doctor": ("engines.cpu.limits", COMPILER),
    "regard.core.parts": ("core.tensors", "PyTorch, which an array on a device has loaded"),
    "regard.core.problem": ("core.tensors", "PyTorch, which an array on a device has loaded"),
    "regard.engines": ("reference.engine", "a call loads the engines that it asks, and few ask the specification"),
    "regard.engines.cpu": (
        "engines.cpu.schedule.backward_tangent_work engines.cpu.schedule.backward_work "
        "engines.cpu.schedule.prepared engines.cpu.schedule.prepared_backward engines.cpu.schedule.second_work "
        "engines.cpu.schedule.tangent_work "
        "engines.cpu.schedule.weights_work engines.cpu.schedule.work "
        "engines.cpu.target.instructions",
        COMPILER,
    ),
    "regard.engines.cpu.language.writing": ("engines.cpu.language.kernel", KERNEL),
    "regard.engines.cpu.schedule.backward_arrays": (
        "engines.cpu.kernels.backward engines.cpu.kernels.backward_jvp",
        KERNEL,
    ),
    "regard.engines.cpu.schedule.second_work": ("engines.cpu.kernels.reductions", KERNEL),
    "regard.engines.cpu.schedule.tangent_work": ("engines.cpu.kernels.jvp", KERNEL),
    "regard.engines.cpu.schedule.work": ("engines.cpu.kernels.forward", KERNEL),
    "regard.engines.device": ("engines.device.call engines.device.functions", "PyTorch"),
    "regard.engines.tiled": ("engines.tiled.backward_pass engines.tiled.derivatives", "a forward call needs neither"),
    "regard.interpret.capture.captured": ("interpret.capture.files", "ml_dtypes, for files alone"),
    "regard.ops.exporting": ("engines.cpu.wasm.module", COMPILER),
    "regard.viewer.command": (
        "viewer.serve.server viewer.show.terminal",
        "starlette and uvicorn, for pages alone; and what pages do not need",
    ),
    "regard.viewer.looking": (
        "core.tensors interpret.capture.captured viewer.scene.own viewer.scene.sources viewer.serve.answers "
        "viewer.serve.notebook viewer.scene.weights viewer.scene.words viewer.serve.saving viewer.serve.server",
        "PyTorch, anywidget, starlette, uvicorn; `from regard import *` loads `look`, which loads what a call needs",
    ),
    "regard.viewer.serve.kernels": ("engines.cpu.wasm.module engines.cpu.wasm.product", COMPILER),
}
"""Modules that import inside of functions: what they import so, and why the start of a process needs it."""


INSIDE = {
    "regard.doctor": "a report asks whether the system permits compiled code, and measures the processor",
    "regard.ops.exporting": "modules of WebAssembly come from this compiler alone",
    "regard.viewer.serve.kernels": "a page computes weights by such modules",
}
"""Modules outside of `engines/` that import the compiled engine, and why: all others go by the protocol of engines."""


class Arrow(NamedTuple):
    """An import of one module in another. lazy: inside of a function. types: for type checkers alone."""

    source: str
    target: str
    lazy: bool
    types: bool


def arrows(root: Path) -> list[Arrow]:
    found = modules(root)
    known = frozenset(found)
    return [x for name, path in found.items() for x in arrows_of(name, path.read_text(encoding="utf-8"), known)]


@cache
def arrows_of(name: str, text: str, known: frozenset[str]) -> tuple[Arrow, ...]:
    """The imports of a module, its names of modules as text among them where it has `import_module`."""

    def walk(node: ast.AST, lazy: bool, types: bool) -> Iterator[Arrow]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy = True
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            types = True
        found = []
        if isinstance(node, ast.Import):
            found = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}:{node.lineno}: a relative import"
            below = (f"{node.module}.{x.name}" for x in node.names)
            found = [x if x in known else str(node.module) for x in below]
        elif isinstance(node, ast.Constant) and dynamic and isinstance(node.value, str):
            found, lazy = [node.value], True
        for target in found:
            if target in known and target != name:
                yield Arrow(name, target, lazy, types)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy, types)

    dynamic = "import_module" in text
    return tuple(walk(parsed(text)[0], lazy=False, types=False))


def room(name: str, package: str) -> str | None:
    """The room of a package that has a module, or None; the package itself is one."""
    if name == package:
        return package.rpartition(".")[2]
    return name.removeprefix(f"{package}.").partition(".")[0] if name.startswith(f"{package}.") else None


def climbing(root: Path) -> list[str]:
    """Arrows to a higher layer, or to another room of the same one. Raises KeyError for a room that has no layer."""
    found = set()
    for package, lines in ORDER.items():
        layer = {x: n for n, line in enumerate(lines) for x in line.split()}
        for x in arrows(root):
            source, target = room(x.source, package), room(x.target, package)
            if source and target and source != target and layer[target] >= layer[source]:
                found.add(f"{x.source} -> {x.target}")
    return sorted(found)


def unlisted(root: Path) -> list[str]:
    """Imports inside of functions that `LAZY` does not list, and lines of `LAZY` that are no such import."""
    found = {(x.source, x.target) for x in arrows(root) if x.lazy and not x.types}
    listed = {(name, f"regard.{target}") for name, (targets, _) in LAZY.items() for target in targets.split()}
    every = {name for name, target in listed if target == "regard.*"}
    found = {(name, target) for name, target in found if name not in every}
    listed = {(name, target) for name, target in listed if name not in every}
    return sorted(f"{name} -> {target}" for name, target in found ^ listed)


def circles(root: Path) -> list[list[str]]:
    """Sets of more than `CIRCLE` modules, each of which reaches each other by imports of any kind."""
    below: dict[str, set[str]] = {name: set() for name in modules(root)}
    for arrow in arrows(root):
        below[arrow.source].add(arrow.target)

    def reached(name: str) -> set[str]:
        seen, stack = set(), [name]
        while stack:
            new = below[stack.pop()] - seen
            seen |= new
            stack += new
        return seen

    reach = {name: reached(name) for name in below}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in below}
    return sorted(sorted(circle) for circle in found if len(circle) > CIRCLE)


def entering(root: Path) -> set[str]:
    """Modules outside of `engines/` that import the compiled engine or a part of it."""
    return {
        x.source
        for x in arrows(root)
        if f"{x.target}.".startswith("regard.engines.cpu.") and not x.source.startswith("regard.engines")
    }


def naming(root: Path) -> list[str]:
    """Comparisons with the name of an engine, unless it is that of a device of a framework."""
    found = []
    for name, path in modules(root).items():
        for node in parsed(path.read_text(encoding="utf-8")):
            if not isinstance(node, ast.Compare):
                continue
            for side in (node.left, *node.comparators):
                texts = {getattr(x, "value", None) for x in (side, *getattr(side, "elts", ()))}
                if any(x in texts for x in engines()) and not re.search("platform|device", ast.unparse(node)):
                    found.append(f"{name}: {ast.unparse(node)}")
    return found


def test_the_compiled_engine_is_entered_by_the_protocol() -> None:
    assert entering(SOURCE) == set(INSIDE)


def test_no_engine_is_compared_by_name() -> None:
    assert naming(SOURCE) == []


def test_no_arrow_climbs() -> None:
    assert climbing(SOURCE) == []


def test_the_package_needs_nothing_of_the_checkout() -> None:
    folders = {"benchmarks", "cases", "support"}
    assert not [x for x in modules(SOURCE).values() if folders & imported(x.read_text(encoding="utf-8"))]
    assert imported("def late():\n    from benchmarks.rows import Row") & folders


@pytest.mark.parametrize("package", ORDER)
def test_every_room_has_a_layer(package: str) -> None:
    rooms = {room(name, package) for name in modules(SOURCE)} - {None}
    assert rooms == set(" ".join(ORDER[package]).split())


def test_the_readme_of_torch_has_a_line_for_each_file() -> None:
    root, tabled = SOURCE / "regard" / "torch", {"nn", "dropins", "capture"}  # whose `__init__.py` has a table
    text = (root / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    listed = [name.rstrip("/") for line in lines for name in re.findall("`(.+?)`", line)]
    files = [x.relative_to(root).with_suffix("").parts for x in root.rglob("*.py") if x.name != "__init__.py"]
    assert {*listed} == {x[0] if x[0] in tabled else "/".join(x) for x in files}
    assert list(dict.fromkeys(x.partition("/")[0] for x in listed)) == " ".join(FLOORS[:-1]).split()


def test_imports_inside_of_functions_are_listed() -> None:
    assert unlisted(SOURCE) == []
    assert all(reason for _, reason in LAZY.values())


def test_no_long_circle() -> None:
    assert circles(SOURCE) == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package's modules, to be changed."""
    for path in modules(SOURCE).values():
        there = tmp_path / path.relative_to(SOURCE)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there)
    return tmp_path


def add(root: Path, module: str, text: str) -> None:
    path = modules(root)[module]
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@pytest.mark.parametrize(
    ("module", "target", "form"),
    [
        ("regard.rules.scores", "regard.positions", "from regard import positions"),
        (
            "regard.arguments.frameworks",
            "regard.torch.public.attention",
            "def load():\n    import regard.torch.public.attention",
        ),
        ("regard.ops.attention", "regard", "import regard"),
        ("regard.torch.tensors.tables", "regard.jax.task", "from regard.jax.task import Task"),
        ("regard.core.types", "regard.ops.attention", "if TYPE_CHECKING:\n    from regard.ops.attention import ORIGIN"),
        (
            "regard.interpret.inputs",
            "regard.torch.capture.pretrained",
            "import_module('regard.torch.capture.pretrained')",
        ),
        ("regard.torch.tensors.arrays", "regard.torch.call.record", "from regard.torch.call.record import DEFAULTS"),
        (
            "regard.torch.dropins.flex",
            "regard.torch.processes.ranks",
            "def load():\n    import regard.torch.processes.ranks",
        ),
        ("regard.torch.nn.modules", "regard.torch", "import regard.torch"),
    ],
)
def test_a_climbing_arrow_is_found(copy: Path, module: str, target: str, form: str) -> None:
    assert climbing(copy) == []
    add(copy, module, f"\n{form}\n")
    assert climbing(copy) == [f"{module} -> {target}"]


def test_an_entered_engine_and_a_compared_name_are_found(copy: Path) -> None:
    lines = "def late(engine):", "    from regard.engines import cpu", "    return engine.NAME == 'tiled'"
    add(copy, "regard.ops.merging", "\n" + "\n".join(lines) + "\n")
    assert entering(copy) - set(INSIDE) == {"regard.ops.merging"}
    assert naming(copy) == ["regard.ops.merging: engine.NAME == 'tiled'"]


def test_an_unlisted_lazy_import_is_found(copy: Path) -> None:
    assert unlisted(copy) == []
    add(copy, "regard.ops.merging", "\ndef late():\n    from regard.ops import linear\n")
    assert unlisted(copy) == ["regard.ops.merging -> regard.ops.linear"]


def test_a_line_of_the_list_that_is_no_import_is_found(copy: Path) -> None:
    assert unlisted(copy) == []
    modules(copy)["regard.ops.exporting"].write_text("", encoding="utf-8")
    assert unlisted(copy) == ["regard.ops.exporting -> regard.engines.cpu.wasm.module"]


def test_a_long_circle_is_found(copy: Path) -> None:
    assert circles(copy) == []
    names = [f"regard.ops.link{n}" for n in range(CIRCLE + 1)]
    for n in range(CIRCLE + 1):
        (copy / "regard" / "ops" / f"link{n}.py").write_text(f"import {names[n - 1]}\n", encoding="utf-8")
    assert circles(copy) == [names]
    (copy / "regard" / "ops" / "link0.py").write_text(f"def late():\n    import {names[-1]}\n", encoding="utf-8")
    assert circles(copy) == [names]
    (copy / "regard" / "ops" / "link0.py").write_text("", encoding="utf-8")
    assert circles(copy) == []
