"""Rows measured on a device: cases, peers and goals.

bfloat16, 16,384 tokens and 2,048 features in all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import device, device_peers
from benchmarks.device_peers import CAUSAL, OPTIONS, PLAIN, DeviceCall, DeviceSizes, Option
from benchmarks.measure import SUBJECT, Contender, Result, Setting
from benchmarks.peers import reason
from benchmarks.row_types import BACKWARD, Prepared, Row, compared, dtype_of
from regard.engines.cpu.limits import Limit

TOKENS, FEATURES = 2**14, 2**11
FUSED = ("cuDNN", "Flash", "FlexAttention")
MATH = "PyTorch, math"
LIMIT = "limit"


@dataclass(frozen=True)
class DeviceLimitRow:
    """A limit itself."""

    name: str
    limit: Callable[[torch.device], Limit]
    group: str = "limits"
    goal: float | None = None
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        limit = self.limit(s.device)
        found = Result(self.group, self.name, limit.measured_in, True)
        return compared(found, {SUBJECT: Contender(limit.call, limit.work)}, {}, (), {}, dtype_of("float32"), 1.0, s)


@dataclass(frozen=True)
class DeviceSpeedRow:
    """A call's rate as a share of `reference`.

    The reference is the limit, a peer, or another `kind` of our calls (then its time).
    """

    group: str
    name: str
    sizes: DeviceSizes
    option: Option = PLAIN
    kind: str = "forward"
    reference: str = LIMIT
    peers: tuple[str, ...] = FUSED
    goal: float | None = None
    dtype: str = "bfloat16"
    quick: bool = False

    def measure(self, s: Setting) -> Result:
        limited = self.reference == LIMIT
        unit = f"of the peak of {self.dtype}" if limited else f"× {self.reference}"
        over = self.reference in device_peers.KINDS
        found = Result(self.group, self.name, unit, not over, self.goal, self.reference)
        found.facts = self.sizes.facts | {"dtype": self.dtype, "causal": self.option.causal, "rate": "GFLOP/s"}
        contenders: dict[str, Contender] = {}
        try:
            g = DeviceCall.of(self.sizes, self.option, getattr(torch, self.dtype), s.device, s.engine)
            expected = device_peers.exact(self.kind, g)
            if limited:
                limit = device.peak(self.dtype, s.device)
                contenders[LIMIT] = Contender(limit.call, limit.work)
            if over:
                contenders[self.reference] = Contender(device_peers.prepared(SUBJECT, self.reference, g)[0])
        except (RuntimeError, MemoryError) as error:
            found.failures[SUBJECT] = reason(error)
            return found
        adapters = {name: partial(prepared, name, self.kind) for name in (SUBJECT, *self.peers)}
        work = 0.0 if over else flops(self.sizes, self.option, self.kind)
        return compared(found, contenders, adapters, (g,), expected, dtype_of(self.dtype), work, s)


def prepared(who: str, kind: str, g: DeviceCall) -> Prepared:
    return device_peers.prepared(who, kind, g)


@dataclass(frozen=True)
class DeviceMemoryRow:
    """Peak memory of one call beyond inputs and outputs, over the size of q, k and v."""

    name: str
    sizes: DeviceSizes
    kind: str
    option: Option = PLAIN
    goal: float | None = None
    peers: tuple[str, ...] = (MATH,)
    group: str = "memory"
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× q, k and v", False, self.goal, "q, k and v")
        found.facts = self.sizes.facts
        g = DeviceCall.of(self.sizes, self.option, torch.bfloat16, s.device, s.engine)
        found.samples = {"q, k and v": [float(device.size((g.q, g.k, g.v)))]}
        for name in (SUBJECT, *self.peers):
            s.tick(name)
            try:
                found.samples[name] = [device.extra(s.device, prepared(name, self.kind, g)[0])]
            except Exception as error:  # any error of a library is its reason
                found.failures[name] = reason(error)
        return found


def flops(s: DeviceSizes, option: Option, kind: str) -> float:
    """Return 4 · b · h · n² · d of the visible pairs, 2.5 times that for backward."""
    return (BACKWARD if kind == "backward" else 1.0) * option.visible(s) * 4.0 * s.batch * s.h * s.n**2 * s.d


# The table


def sized(n: int, d: int, h_kv: int | None = None, tokens: int = TOKENS) -> DeviceSizes:
    h = FEATURES // d
    return DeviceSizes(max(1, tokens // n), h, n, d, h_kv or h)


def rows() -> Iterator[Row]:
    """Yield every row, in the order of the report."""
    for dtype in device.PEAKS:
        yield DeviceLimitRow(f"peak, {dtype}", partial(device.peak, dtype))
    yield DeviceLimitRow("memory bandwidth", device.bandwidth)

    for kind in ("forward", "backward"):
        for d in (64, 128, 256):
            for option in (PLAIN, CAUSAL):
                for n in (512, 1024, 2048, 4096, 8192, 16384):
                    name = f"{option.name}, d = {d}, n = {n:,}"
                    yield DeviceSpeedRow(kind, name, sized(n, d), option, kind, quick=(d, n) == (128, 8192))
        for option in (PLAIN, CAUSAL):
            name = f"32 heads over 8, {option.name}, d = 64, n = 4,096"
            yield DeviceSpeedRow(kind, name, sized(4096, 64, 8), option, kind)
        for option in (PLAIN, CAUSAL):
            name = f"{kind}, {option.name}, d = 128, n = 8,192"
            yield DeviceSpeedRow(
                "against cuDNN", name, sized(8192, 128), option, kind, "cuDNN", ("cuDNN",), 1.0, quick=True
            )
    for kind in ("forward", "backward"):
        for option in OPTIONS:
            size = sized(4096, 128, tokens=4096 if option.biased else TOKENS)
            name = f"{kind}, {option.name}"
            yield DeviceSpeedRow(
                "options", name, size, option, kind, "FlexAttention", ("FlexAttention",), 1.0, quick=True
            )

    size = sized(4096, 128)
    for option in (PLAIN, CAUSAL):
        yield DeviceSpeedRow("derivatives", f"JVP, {option.name}", size, option, "JVP", "forward", (), 3.3, quick=True)
        name = f"double backward, {option.name}"
        yield DeviceSpeedRow(
            "derivatives", name, size, option, "double backward", "backward", (), 3.3, quick=option is PLAIN
        )
        for kind in ("JVP", "double backward"):
            name = f"{kind}, {option.name}, n = 2,048"
            yield DeviceSpeedRow(
                "against math", name, sized(2048, 128), option, kind, MATH, (MATH,), 1.0, quick=option is PLAIN
            )
    for kind in ("forward", "backward", "JVP", "double backward"):
        for n in (2048, 8192):
            goal = 2.0 if kind in ("forward", "JVP") else None
            yield DeviceMemoryRow(
                f"{kind}, causal, n = {n:,}", sized(n, 128, tokens=n), kind, CAUSAL, goal, quick=n == 2048
            )
