"""What is measured on a device, against what, and the goals: bfloat16, 16,384 tokens and 2,048 features in all."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from regard.bench import device, device_peers
from regard.bench.device_peers import CAUSAL, PLAIN, WISHES, Given, Sizes, Wish
from regard.bench.kinds import BACKWARD, Prepared, Row, compared, dtype_of
from regard.bench.limits import Limit
from regard.bench.measure import SUBJECT, Contender, Result, Setting
from regard.bench.peers import reason

TOKENS, FEATURES = 2**14, 2**11
FUSED = ("cuDNN", "Flash", "FlexAttention")
MATH = "PyTorch, math"
LIMIT = "limit"


@dataclass(frozen=True)
class Rate:
    """The limits themselves."""

    name: str
    limit: Callable[[torch.device], Limit]
    group: str = "limits"
    goal: float | None = None
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        limit = self.limit(s.device)
        found = Result(self.group, self.name, limit.unit, True)
        return compared(found, {SUBJECT: Contender(limit.call, limit.work)}, {}, (), {}, dtype_of("float32"), 1.0, s)


@dataclass(frozen=True)
class Speed:
    """A call's rate as a share of `reference`: the limit, a peer, or another `kind` of call of ours (then its time)."""

    group: str
    name: str
    sizes: Sizes
    wish: Wish = PLAIN
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
        found.facts = self.sizes.facts | {"dtype": self.dtype, "causal": self.wish.causal, "rate": "GFLOP/s"}
        contenders: dict[str, Contender] = {}
        try:
            g = Given.of(self.sizes, self.wish, getattr(torch, self.dtype), s.device, s.engine)
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
        work = 0.0 if over else flops(self.sizes, self.wish, self.kind)
        return compared(found, contenders, adapters, (g,), expected, dtype_of(self.dtype), work, s)


def prepared(who: str, kind: str, g: Given) -> Prepared:
    return device_peers.prepared(who, kind, g)


@dataclass(frozen=True)
class Memory:
    """Memory at the peak of one call beyond inputs and outputs, over the size of query, key and value."""

    name: str
    sizes: Sizes
    kind: str
    wish: Wish = PLAIN
    goal: float | None = None
    peers: tuple[str, ...] = (MATH,)
    group: str = "memory"
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× q, k and v", False, self.goal, "q, k and v")
        found.facts = self.sizes.facts
        g = Given.of(self.sizes, self.wish, torch.bfloat16, s.device, s.engine)
        found.samples = {"q, k and v": [float(device.size((g.q, g.k, g.v)))]}
        for name in (SUBJECT, *self.peers):
            s.tick(name)
            try:
                found.samples[name] = [device.extra(s.device, prepared(name, self.kind, g)[0])]
            except Exception as error:  # whatever a library raises is its reason
                found.failures[name] = reason(error)
        return found


def flops(s: Sizes, wish: Wish, kind: str) -> float:
    """4 · b · h · n² · d of the pairs that may be seen, for backward 2.5 times as many."""
    return (BACKWARD if kind == "backward" else 1.0) * wish.visible(s) * 4.0 * s.batch * s.h * s.n**2 * s.d


# The table


def sized(n: int, d: int, h_kv: int | None = None, tokens: int = TOKENS) -> Sizes:
    h = FEATURES // d
    return Sizes(max(1, tokens // n), h, n, d, h_kv or h)


def rows() -> Iterator[Row]:
    """Every row there is, in the order of the report."""
    for dtype in device.PEAKS:
        yield Rate(f"peak, {dtype}", partial(device.peak, dtype))
    yield Rate("memory bandwidth", device.bandwidth)

    for kind in ("forward", "backward"):
        for d in (64, 128, 256):
            for wish in (PLAIN, CAUSAL):
                for n in (512, 1024, 2048, 4096, 8192, 16384):
                    name = f"{wish.name}, d = {d}, n = {n:,}"
                    yield Speed(kind, name, sized(n, d), wish, kind, quick=(d, n) == (128, 8192))
        for wish in (PLAIN, CAUSAL):
            name = f"32 heads over 8, {wish.name}, d = 64, n = 4,096"
            yield Speed(kind, name, sized(4096, 64, 8), wish, kind)
        for wish in (PLAIN, CAUSAL):
            name = f"{kind}, {wish.name}, d = 128, n = 8,192"
            yield Speed("against cuDNN", name, sized(8192, 128), wish, kind, "cuDNN", ("cuDNN",), 1.0, quick=True)
    for kind in ("forward", "backward"):
        for wish in WISHES:
            size = sized(4096, 128, tokens=4096 if wish.biased else TOKENS)
            name = f"{kind}, {wish.name}"
            yield Speed("wishes", name, size, wish, kind, "FlexAttention", ("FlexAttention",), 1.0, quick=True)

    size = sized(4096, 128)
    for wish in (PLAIN, CAUSAL):
        yield Speed("derivatives", f"JVP, {wish.name}", size, wish, "JVP", "forward", (), 3.3, quick=True)
        name = f"double backward, {wish.name}"
        yield Speed("derivatives", name, size, wish, "double backward", "backward", (), 3.3, quick=wish is PLAIN)
        for kind in ("JVP", "double backward"):
            name = f"{kind}, {wish.name}, n = 2,048"
            yield Speed("against math", name, sized(2048, 128), wish, kind, MATH, (MATH,), 1.0, quick=wish is PLAIN)
    for kind in ("forward", "backward", "JVP", "double backward"):
        for n in (2048, 8192):
            goal = 2.0 if kind in ("forward", "JVP") else None
            yield Memory(f"{kind}, causal, n = {n:,}", sized(n, 128, tokens=n), kind, CAUSAL, goal, quick=n == 2048)
