"""The IR of a kernel, written by a function in the language of kernels."""

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from regard.engines.cpu.target.instructions import Target

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel


def written(name: str, fields: Sequence[str], target: Target, write: Callable[["Kernel"], None]) -> str:
    """The IR of a kernel. The language of kernels is loaded only where one is written."""
    from regard.engines.cpu.language.kernel import Kernel

    collects = gc.isenabled()
    gc.disable()  # it would look again and again at a hundred thousand objects that all stay
    try:
        k = Kernel(name, target, fields)
        k.flush()
        write(k)
        return k.text()
    finally:
        if collects:
            gc.enable()
