"""The category of every warning that `regard` gives, and the line that one names."""

import sys
import warnings
from functools import cache
from pathlib import Path


class RegardWarning(UserWarning):
    """Warn that a call works, though less well than the caller may expect."""


def level_of_caller() -> int:
    """Return the `stacklevel` of the frame that called into this package."""
    package, level = str(Path(__file__).parent), 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


@cache
def warn_once(message: str) -> None:
    """Give a warning, once in a process."""
    warnings.warn(message, RegardWarning, stacklevel=level_of_caller())
