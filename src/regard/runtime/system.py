"""Memory and processors, within the limits of a Linux control group.

Each is read once, on first use; later changes of a limit are not seen.
"""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@cache
def memory() -> tuple[int, str] | None:
    """Return the bytes of memory, and the source of that limit.

    The source is "this machine" or "its control group". None if neither is known.
    """
    limits: list[tuple[int, str]] = []
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, and a browser no such names
        pages, size = -1, -1
    if pages > 0 and size > 0:
        limits.append((pages * size, "this machine"))
    for group, unified in _groups("memory"):
        text = _read(group / ("memory.max" if unified else "memory.limit_in_bytes"))
        if text.isdecimal():  # "max" is no limit
            limits.append((int(text), "its control group"))
    return min(limits, default=None)


@cache
def quota() -> int | None:
    """Return the CPU quota of a control group in processors, rounded up, or None."""
    quotas = []
    for group, unified in _groups("cpu"):
        names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(_read(group / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):  # "max" and −1: none
            quotas.append(max(-(-int(words[0]) // int(words[1])), 1))
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Iterate over the directories of control groups, innermost first.

    The second value is True for version 2.
    """
    for line in _read(MEMBERSHIP).splitlines():
        names, _, path = line.partition(":")[2].partition(":")
        if names and controller not in names.split(","):
            continue
        # In a container this may be the path on the host: the root is then the container's own group.
        root = GROUPS / names if names else GROUPS
        inside = root / path.strip().lstrip("/")
        for group in (inside, *inside.parents):
            yield group, not names
            if group == root:
                break


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
