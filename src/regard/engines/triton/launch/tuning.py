"""Tile configs of kernels: queries of a block, keys of a tile, warps, stages.

Each kernel has a config from a table, so that a first call compiles it once and times nothing. With REGARD_TUNE=1 the
first large call of a `TuningSpec` times a few others. The fastest is cached on disk for all later processes, with or
without tuning. No choice changes the order of a sum: kernels that sum over keys keep N, those that sum over rows M.
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

SECONDS = 20.0  # afterwards no other config of a kernel is compiled and timed
LARGE = 1024  # minimum queries and keys of a call to time
VERSION = 1  # of the files


class TileConfig(NamedTuple):
    M: int
    N: int
    warps: int
    stages: int


class DeviceTarget(NamedTuple):
    """A device: its compute capability, such as 90, and its name."""

    capability: int
    name: str


ON_INTERPRETER = TileConfig(64, 64, 4, 2)  # there an operation costs the same at any size
# By bytes of an element and features of a head. In 16 bits they were the fastest on an H100 (lab/triton.md).
TABLE: dict[str, dict[int, dict[int, TileConfig]]] = {
    "forward": {
        2: {64: TileConfig(128, 64, 4, 3), 128: TileConfig(128, 64, 8, 3), 256: TileConfig(64, 32, 4, 3)},
        # Products of float32 without tensor cores are unrolled: large ones take long to compile.
        4: {64: TileConfig(64, 32, 4, 2), 128: TileConfig(64, 32, 8, 2), 256: TileConfig(32, 32, 8, 2)},
        8: {64: TileConfig(32, 32, 4, 2), 128: TileConfig(32, 32, 4, 2), 256: TileConfig(16, 32, 4, 2)},
    },
    "query": {
        2: {64: TileConfig(64, 64, 4, 3), 128: TileConfig(128, 64, 8, 3), 256: TileConfig(64, 32, 8, 1)},
    },
    "key_value": {
        2: {64: TileConfig(64, 64, 4, 3), 128: TileConfig(128, 128, 8, 2), 256: TileConfig(64, 32, 8, 1)},
    },
    "derivative": {  # all others, with more values alive at once
        2: {64: TileConfig(64, 64, 4, 2), 128: TileConfig(128, 64, 8, 2), 256: TileConfig(64, 32, 8, 1)},
        4: {64: TileConfig(64, 32, 4, 2), 128: TileConfig(32, 32, 8, 2), 256: TileConfig(32, 16, 8, 1)},
        8: {64: TileConfig(32, 32, 4, 2), 128: TileConfig(32, 32, 4, 2), 256: TileConfig(16, 32, 4, 1)},
    },
}

FREE = {"forward": "M", "query": "M", "tangent": "M", "key_value": "N"}
"""The axis of each tuned kernel that may change without changing the order of a sum."""


class TuningSpec(NamedTuple):
    """The key of a choice, without sizes that change from call to call.

    widths: features of a head, to the next power of two. options: those of mask, score, bias and dropout that the call
    has.
    """

    kernel: str
    target: DeviceTarget
    dtype: str
    itemsize: int
    widths: tuple[int, int]
    options: tuple[bool, ...]
    along: bool
    precision: str

    @classmethod
    def of(cls, kernel: str, work: Any) -> "TuningSpec":
        p = work.p
        options = (p.mask is not None, p.score is not None, p.bias is not None, p.dropout > 0)
        widths = (triton.next_power_of_2(max(p.d, 1)), triton.next_power_of_2(max(p.d_v, 1)))
        along = getattr(work, "direction", None) is not None
        return cls(kernel, target(p.device), p.dtype.name, p.dtype.itemsize, widths, options, along, work.precision)

    @property
    def default(self) -> TileConfig:
        kernel = "forward" if self.kernel == "part" else self.kernel
        if kernel != "forward" and (self.along or any(self.options[1:])):
            kernel = "derivative"  # more values are alive
        of = TABLE.get(kernel, {}).get(self.itemsize) or TABLE["derivative"][self.itemsize]
        return next(config for size, config in of.items() if max(self.widths) <= size)

    @property
    def configs(self) -> list[TileConfig]:
        """The default and at most seven others, the most promising first."""
        config, free = self.default, FREE.get(self.kernel)
        if free is None:
            return [config]
        size, warps, stages = getattr(config, free), 12 - config.warps, max(5 - config.stages, 2)
        found = [
            config,
            config._replace(warps=warps),  # 4 and 8
            config._replace(stages=stages),  # 2 and 3
            config._replace(**{free: size // 2}),
            config._replace(**{free: size * 2}, warps=8),
            config._replace(warps=warps, stages=stages),
            config._replace(**{free: size // 2}, warps=warps),
            config._replace(stages=config.stages + 2),
        ]
        return [x for x in found if min(x.M, x.N) >= 16]

    def less(self, config: TileConfig) -> TileConfig | None:
        """Return the next config with less shared memory, or None."""
        if config.stages > 1:
            return config._replace(stages=config.stages - 1)
        for axis in (FREE.get(self.kernel, "M"), "M", "N"):
            if (size := getattr(config, axis)) > 16:
                return config._replace(**{axis: size // 2})
        return None

    @property
    def path(self) -> Path | None:
        """The file of the choice; None without a cache."""
        folder = diskcache.directory()
        facts = repr((VERSION, self, self.configs, __version__, triton.__version__))
        name = f"{self.kernel}-{hashlib.sha256(facts.encode()).hexdigest()[:40]}.cut"
        return None if folder is None else folder / name


_chosen: dict[TuningSpec, TileConfig] = {}


def chosen(kernel: str, work: Any, make: Callable[[TileConfig], Launch]) -> Launch:
    """Return the launch of a kernel's config, or of a smaller one that fits."""
    if INTERPRETED:
        return make(ON_INTERPRETER)
    spec = TuningSpec.of(kernel, work)
    config = _chosen.get(spec)
    if config is None:
        config = stored(spec)
        if config is None and asked() and len(spec.configs) > 1:
            if not worthwhile(work.p):
                return fitting(spec, spec.default, make)
            config = store(spec, fastest(spec.configs, make))
        _chosen[spec] = config = config or spec.default
    return fitting(spec, config, make)


def fitting(spec: TuningSpec, config: TileConfig, make: Callable[[TileConfig], Launch]) -> Launch:
    less = spec.less(config)
    if less is None:
        return make(config)

    def instead() -> Launch:
        _chosen[spec] = less
        return fitting(spec, less, make)

    return replace(make(config), instead=instead)


def worthwhile(p: Problem) -> bool:
    return min(p.n_q, p.n_k) >= LARGE and not torch.cuda.is_current_stream_capturing()


def asked() -> bool:
    return os.environ.get("REGARD_TUNE", "").lower() in ("1", "on", "true", "yes")


def fastest(configs: list[TileConfig], make: Callable[[TileConfig], Launch]) -> TileConfig:
    """Return the fastest config among those that fit and were timed."""
    begin, best, least = clock(), configs[0], float("inf")
    for config in configs:
        if clock() - begin > SECONDS:
            break
        try:
            spent = milliseconds(make(config))
        except triton.runtime.errors.OutOfResources:
            continue
        if spent < least:
            best, least = config, spent
    return best


def clock() -> float:
    return time.perf_counter()


def milliseconds(launch: Launch) -> float:
    """Return the time of one run by the device's events, after compiling."""
    return float(triton.testing.do_bench(launch.run, warmup=5, rep=30, return_mode="median"))


@cache
def target(device: Any) -> DeviceTarget:
    """Return the target of a device; without one, kernels are compiled but never run."""
    if device is None:
        return DeviceTarget(0, "none")
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceTarget(10 * major + minor, torch.cuda.get_device_name(device))


def stored(spec: TuningSpec) -> TileConfig | None:
    """Return the choice of an earlier process, or None."""
    content = None if spec.path is None else diskcache.read(spec.path)
    try:
        config = None if content is None else TileConfig(*json.loads(content))
    except (ValueError, TypeError):
        return None
    return config if config in spec.configs else None


def store(spec: TuningSpec, config: TileConfig) -> TileConfig:
    """Store a choice on disk; among several processes the first one decides."""
    if spec.path is None:
        return config
    content = json.dumps(config).encode()
    diskcache.write(spec.path, content, first=True)
    found = stored(spec)
    if found is None:  # the file holds no known config
        diskcache.write(spec.path, content)
    return found or config
