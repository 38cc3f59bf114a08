"""Packages that only some calls need, and what installs them."""

import platform
import sys
from importlib.util import find_spec

BASE = ("ml_dtypes", "threadpoolctl", "llvmlite")
"""Packages that pip installs with regard, but a browser's Python may lack."""

EXTRAS = {
    "look": ("rich", "safetensors", "starlette", "uvicorn"),
    "plots": ("matplotlib",),
    "notebook": ("anywidget",),
    "images": ("pillow",),
}
"""The packages that each extra brings, frameworks apart."""

MODULES = {"pillow": "PIL"}
"""The module of a package that has another name."""


class MissingPackage(ModuleNotFoundError):
    """Raised before any work, with what to install, by a call that needs a package."""


def require(what: str, *packages: str) -> None:
    """Raise MissingPackage unless all packages are installed."""
    for package in packages:
        if find_spec(MODULES.get(package, package)) is None:
            raise MissingPackage(f"{what} needs {package}, which is missing: {remedy(package)}", name=package)


def remedy(package: str) -> str:
    """Return the command that installs a package, or the reason why there is none.

    pip adds an extra to the regard that is installed: it asks no index for regard itself.

    >>> remedy("uvicorn"), remedy("ml_dtypes")
    ("pip install 'regard[look]'", 'pip install ml_dtypes')
    """
    if package == "llvmlite" and (sys.platform, platform.machine()) == ("darwin", "x86_64"):
        return "it has no wheel for Intel Macs from 0.46 on"
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"pip install 'regard[{extra}]'"
    return f"pip install {package}"
