"""PyTorch's OpenMP threads, which run calls on tensors.

After an operation they spin for milliseconds, on the cores that threads of ours would need. So they get our work too,
through the function that compiled code calls at the start of an OpenMP parallel region.
"""

import ctypes
import itertools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from regard.runtime.forks import renewed
from regard.torch.tensors import modes

_work: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_generations = itertools.count()
# A forked process has no OpenMP threads, but its copy of the runtime would wait for them forever.
_generation: int = renewed(sys.modules[__name__], "_generation", lambda: next(_generations))


@ctypes.CFUNCTYPE(None, ctypes.c_size_t)
def _region(number: int) -> None:
    _work[number]()


_REGION_ADDRESS = ctypes.cast(_region, ctypes.c_void_p).value or 0


class OpenMPTeam:
    """PyTorch's thread team, for `regard.runtime.threads.on_team`."""

    def size(self) -> int:
        return 1 if _generation or _begin() is None else torch.get_num_threads()

    def call(self, function: int, data: int, members: int) -> None:
        _begin()(function, data, members, 0)

    def run(self, work: Callable[[], None], members: int) -> None:
        number = next(_numbers)
        _work[number] = work
        try:
            self.call(_REGION_ADDRESS, number, members)
        finally:
            del _work[number]


TEAM = OpenMPTeam()


@cache
def _begin() -> Any:
    """Find GOMP_parallel in the OpenMP runtime of PyTorch, or None.

    GNU's runtime, LLVM's and Intel's have it on Linux and macOS.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        function = ctypes.CDLL(modes.library).GOMP_parallel  # also looks in what that library is linked with
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return function
