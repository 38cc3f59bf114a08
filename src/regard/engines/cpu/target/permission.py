"""Whether the system lets this process use registers of matrices (AMX)."""

import ctypes
import os
import sys
from functools import cache

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def refused() -> str | None:
    """Why it does not; None if it does: for all threads, and for processes that are made by fork.

    Linux has to be asked (since 5.16), because what it keeps of a thread becomes 8 KiB larger.
    """
    if sys.platform != "linux":
        return f"not known how to ask {sys.platform}"
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
        return os.strerror(ctypes.get_errno())
    return None
