"""How kernels are cut: queries of a block, keys of a tile, warps, stages.

Each has a cut from a table, so that a first call compiles every kernel once and times nothing. With REGARD_TUNE=1 the
first large call of a kind times a few others, and the fastest is kept on disk for all later processes, whether they
tune or not. No choice changes the order of a sum: kernels that sum over keys keep N, those that sum over rows M.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from regard.core.problem import Problem
from regard.engines.triton.launch.launching import INTERPRETED, Launch
from regard.runtime import diskcache
from regard.version import __version__

SECONDS = 20.0  # after which no other cut of a kernel is compiled and timed
LARGE = 1024  # queries and keys of a call that is worth timing
VERSION = 1  # of what is kept


class Cut(NamedTuple):
    M: int
    N: int
    warps: int
    stages: int


class Target(NamedTuple):
    """The device that kernels are cut for: its compute capability, such as 90, and its name."""

    capability: int
    name: str


ON_INTERPRETER = Cut(64, 64, 4, 2)  # where an operation costs what it costs, whatever its size
# By bytes of an element and features of a head. Of forward in 16 bits they are what FlexAttention of PyTorch 2.13
# begins with, which was tuned on devices; N is half of its 128 where rules, biases and sums of entropy take registers.
TABLE: dict[str, dict[int, dict[int, Cut]]] = {
    "forward": {
        2: {64: Cut(128, 64, 4, 3), 128: Cut(128, 64, 8, 3), 256: Cut(64, 32, 4, 3)},
        # Products of float32 without tensor cores are unrolled: large ones compile for long.
        4: {64: Cut(64, 32, 4, 2), 128: Cut(64, 32, 8, 2), 256: Cut(32, 32, 8, 2)},
        8: {64: Cut(32, 32, 4, 2), 128: Cut(32, 32, 4, 2), 256: Cut(16, 32, 4, 2)},
    },
    "derivative": {  # of which more is alive at once
        2: {64: Cut(64, 64, 4, 2), 128: Cut(64, 64, 8, 2), 256: Cut(64, 32, 8, 1)},
        4: {64: Cut(64, 32, 4, 2), 128: Cut(32, 32, 8, 2), 256: Cut(32, 16, 8, 1)},
        8: {64: Cut(32, 32, 4, 2), 128: Cut(32, 32, 4, 2), 256: Cut(16, 32, 4, 1)},
    },
}

FREE = {"forward": "M", "query": "M", "tangent": "M", "key_value": "N"}
"""Of the kernels that are tuned, what may change without changing the order of a sum."""


class Kind(NamedTuple):
    """What a choice depends on: not on how many queries, keys and heads there are, which change from call to call.

    widths: features of a head, to the next power of two. wishes: which of mask, score, bias and dropout there are.
    """

    kernel: str
    target: Target
    dtype: str
    itemsize: int
    widths: tuple[int, int]
    wishes: tuple[bool, ...]
    along: bool
    precision: str

    @classmethod
    def of(cls, kernel: str, work: Any) -> "Kind":
        p = work.p
        wishes = (p.mask is not None, p.score is not None, p.bias is not None, p.dropout > 0)
        widths = (triton.next_power_of_2(max(p.d, 1)), triton.next_power_of_2(max(p.d_v, 1)))
        along = getattr(work, "way", None) is not None
        return cls(kernel, target(p.device), p.dtype.name, p.dtype.itemsize, widths, wishes, along, work.precision)

    @property
    def default(self) -> Cut:
        of = TABLE["forward" if self.kernel in ("forward", "part") else "derivative"][self.itemsize]
        return next(cut for size, cut in of.items() if max(self.widths) <= size)

    @property
    def cuts(self) -> list[Cut]:
        """What may be tried: the default and at most seven others, those that promise most first."""
        cut, free = self.default, FREE.get(self.kernel)
        if free is None:
            return [cut]
        size, warps, stages = getattr(cut, free), 12 - cut.warps, max(5 - cut.stages, 2)
        found = [
            cut,
            cut._replace(warps=warps),  # 4 and 8
            cut._replace(stages=stages),  # 2 and 3
            cut._replace(**{free: size // 2}),
            cut._replace(**{free: size * 2}, warps=8),
            cut._replace(warps=warps, stages=stages),
            cut._replace(**{free: size // 2}, warps=warps),
            cut._replace(stages=cut.stages + 2),
        ]
        return [x for x in found if min(x.M, x.N) >= 16]

    def less(self, cut: Cut) -> Cut | None:
        """The next cut that takes less of the memory that a block shares; None if there is none."""
        if cut.stages > 1:
            return cut._replace(stages=cut.stages - 1)
        for axis in (FREE.get(self.kernel, "M"), "M", "N"):
            if (size := getattr(cut, axis)) > 16:
                return cut._replace(**{axis: size // 2})
        return None

    @property
    def path(self) -> Path | None:
        """Where the choice is kept."""
        folder = diskcache.directory()
        facts = repr((VERSION, self, self.cuts, __version__, triton.__version__))
        name = f"{self.kernel}-{hashlib.sha256(facts.encode()).hexdigest()[:40]}.cut"
        return None if folder is None else folder / name


_kept: dict[Kind, Cut] = {}


def chosen(kernel: str, work: Any, make: Callable[[Cut], Launch]) -> Launch:
    """The launch that `make` gives for the cut of a kernel, or for less where the device has not enough memory."""
    if INTERPRETED:
        return make(ON_INTERPRETER)
    kind = Kind.of(kernel, work)
    cut = _kept.get(kind)
    if cut is None:
        cut = remembered(kind)
        if cut is None and asked() and len(kind.cuts) > 1:
            if not worthwhile(work.p):
                return fitting(kind, kind.default, make)
            cut = keep(kind, fastest(kind.cuts, make))
        _kept[kind] = cut = cut or kind.default
    return fitting(kind, cut, make)


def fitting(kind: Kind, cut: Cut, make: Callable[[Cut], Launch]) -> Launch:
    less = kind.less(cut)
    if less is None:
        return make(cut)

    def instead() -> Launch:
        _kept[kind] = less
        return fitting(kind, less, make)

    return replace(make(cut), instead=instead)


def worthwhile(p: Problem) -> bool:
    return min(p.n_q, p.n_k) >= LARGE and not torch.cuda.is_current_stream_capturing()


def asked() -> bool:
    return os.environ.get("REGARD_TUNE", "").lower() in ("1", "on", "true", "yes")


def fastest(cuts: list[Cut], make: Callable[[Cut], Launch]) -> Cut:
    """Of the cuts, tried in this order as far as the time goes; what takes more memory than there is does not count."""
    begin, best, least = clock(), cuts[0], float("inf")
    for cut in cuts:
        if clock() - begin > SECONDS:
            break
        try:
            spent = milliseconds(make(cut))
        except triton.runtime.errors.OutOfResources:
            continue
        if spent < least:
            best, least = cut, spent
    return best


def clock() -> float:
    return time.perf_counter()


def milliseconds(launch: Launch) -> float:
    """Of one run, by events of the device; compiled first. A kernel writes the same results again."""
    return float(triton.testing.do_bench(launch.run, warmup=5, rep=30, return_mode="median"))


@cache
def target(device: Any) -> Target:
    """Where there is none, kernels are only compiled: for whom says who compiles."""
    if device is None:
        return Target(0, "none")
    major, minor = torch.cuda.get_device_capability(device)
    return Target(10 * major + minor, torch.cuda.get_device_name(device))


def remembered(kind: Kind) -> Cut | None:
    """What an earlier process chose."""
    content = None if kind.path is None else diskcache.read(kind.path)
    try:
        cut = None if content is None else Cut(*json.loads(content))
    except (ValueError, TypeError):
        return None
    return cut if cut in kind.cuts else None


def keep(kind: Kind, cut: Cut) -> Cut:
    """On disk. Of several processes the choice of the first holds for all."""
    if kind.path is None:
        return cut
    content = json.dumps(cut).encode()
    diskcache.write(kind.path, content, first=True)
    found = remembered(kind)
    if found is None:  # what is there is no cut that is known
        diskcache.write(kind.path, content)
    return found or cut
