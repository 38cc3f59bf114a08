"""Packages that only some calls need."""

from collections.abc import Iterator
from contextlib import contextmanager

PACKAGES = ("llvmlite", "ml_dtypes", "rich", "safetensors", "starlette", "uvicorn")
"""Packages that pip installs with regard, and that other Pythons may lack, such as one in a browser."""


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """Say what needs a package that is missing.

    Raises ModuleNotFoundError with its name, in place of the one that an import inside raises.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES:
            raise
        text = f"{what} needs {package}, which is missing: pip install {package}"
        raise ModuleNotFoundError(text, name=package) from None
