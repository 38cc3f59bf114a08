"""The system's permission to use AMX tile registers."""

import ctypes
import os
import sys
from functools import cache

ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux on x86-64


@cache
def refused() -> str | None:
    """Return the reason why AMX may not be used, or None.

    The request grants it to all threads, and to forked processes. Linux (since 5.16) requires it, because the saved
    state of a thread becomes 8 KiB larger.
    """
    if sys.platform != "linux":
        return f"not known how to ask {sys.platform}"
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA):
        return os.strerror(ctypes.get_errno())
    return None
