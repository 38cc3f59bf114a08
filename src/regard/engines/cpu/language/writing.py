"""The IR of a kernel, written by a function in the kernel language."""

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from regard.engines.cpu.target.instructions import Target

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel


def written(name: str, fields: Sequence[str], target: Target, write: Callable[["Kernel"], None]) -> str:
    """Return the IR that `write` makes.

    The kernel language is loaded only here.
    """
    from regard.engines.cpu.language.kernel import Kernel

    collects = gc.isenabled()
    gc.disable()  # it would repeatedly scan a hundred thousand objects, none of them garbage
    try:
        k = Kernel(name, target, fields)
        k.flush()
        write(k)
        return k.text()
    finally:
        if collects:
            gc.enable()
