"""Packages that only some calls need."""

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("llvmlite", "ml_dtypes", "rich", "safetensors", "starlette", "uvicorn")
"""Packages that pip installs with regard, but a browser's Python may lack."""


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Name the call that needs a missing package.

    A ModuleNotFoundError with that name replaces the one that an import inside raises.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        text = f"{what} needs {package}, which is missing: pip install {package}"
        raise ModuleNotFoundError(text, name=package) from None
