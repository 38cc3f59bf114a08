"""Rows of the report: cases, peers and goals."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import regard
from benchmarks import memory, model_rows, reach
from benchmarks.cold import KINDS, FirstCallRow, ImportRow
from benchmarks.measure import SUBJECT
from benchmarks.peers import PEERS
from benchmarks.row_types import (
    BackwardShareRow,
    CostRow,
    DerivativeRow,
    LimitRow,
    MemoryRow,
    Row,
    ShareRow,
    SmallRow,
    SpeedupRow,
)
from cases import Case, case
from regard.engines.cpu import limits


def sized(name: str, n: int, d: int = 64, h: int = 8, lead: tuple[int, ...] = (), **more: Any) -> Case:
    return case(name, lead=lead, h=h, n_q=n, n_k=n, d=d, d_v=d, **more)


MASS_MAP, MAX_MAP = regard.pooled(256, 256), regard.pooled(256, 256, "max")
FORWARD_GOALS = {
    ("float32", "plain"): 0.88,
    ("float32", "causal"): 0.84,
    ("bfloat16", "plain"): 0.85,
    ("float64", "plain"): 0.80,
}


BACKWARD_GOALS = {"float32": 0.80, "bfloat16": 0.70}
IN_GROWTH = tuple(name for name in PEERS if name != "FlexAttention")  # it would be compiled for every size


def rows() -> Iterator[Row]:
    """Yield every row, in the order of the report."""
    for dtype in ("float32", "float64", "bfloat16"):
        yield LimitRow(f"peak, {dtype}", partial(limits.peak, dtype))
    for dtype in ("float32", "float64"):
        yield LimitRow(f"products from cache, {dtype}", partial(limits.product, dtype))
    yield LimitRow("read bandwidth", limits.bandwidth)
    for dtype in ("float32", "float64", "bfloat16"):
        yield LimitRow(f"peak, {dtype}, every core", partial(limits.peak, dtype), every_core=True)
    yield LimitRow("read bandwidth, every core", limits.bandwidth, every_core=True)

    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for kind in ("plain", "causal"):
            for d in (64, 128):
                for n in (2048, 4096):
                    name = f"{dtype}, {kind}, d = {d}, n = {n}"
                    quick = (d, n) == (64, 2048)
                    goal = FORWARD_GOALS.get((dtype, kind))
                    yield ShareRow("forward", name, sized(kind, n, d), dtype, goal, quick=quick)

    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for kind in ("plain", "causal"):
            for d, n in ((64, 2048), (128, 2048), (64, 4096)):
                name = f"{dtype}, {kind}, d = {d}, n = {n}"
                quick = (d, n) == (64, 2048) and dtype != "float16"
                yield BackwardShareRow(
                    "backward", name, sized(kind, n, d), dtype, BACKWARD_GOALS.get(dtype), quick=quick
                )
    yield from derivative_rows()

    for token_major in (False, True):
        for h, h_kv, d in ((8, 8, 64), (8, 8, 128), (32, 8, 64), (32, 8, 128)):
            one = case("one query", lead=(), h=h, h_kv=h_kv, n_k=16384, d=d, d_v=d, token_major=token_major)
            heads = f"{h} heads" + (f" over {h_kv}" if h_kv != h else "") + ", token-major" * token_major
            goal = None if token_major else 0.85
            yield ShareRow("decode", f"16,384 keys, {heads}, d = {d}", one, goal=goal, reads=True, quick=d == 64)

    for kind, n in (("plain", 2048), ("causal", 2048), ("plain", 4096), ("causal", 4096)):
        yield SpeedupRow("threads", f"two threads over one, {kind}, n = {n}", sized(kind, n), 1.9, quick=n == 2048)

    option = partial(sized, n=2048, h=4, lead=(2,))
    plain, causal = option("plain"), option("causal")
    for name, label in (
        ("window", "window of 256"),
        ("documents", "3 documents, causal"),
        ("prefix", "prefix and causal"),
        ("padding", "padding"),
        ("composed masks", "composed mask"),
    ):
        yield CostRow("options", label, option(name), plain, visible=True)
    yield CostRow("options", "softcap", option("softcap"), plain, 1.2)
    yield CostRow("options", "score of three operations", option("score rule"), plain, 1.2)
    yield CostRow("options", "alibi, against causal", option("alibi"), causal, 1.2)
    yield CostRow("options", "dense bias", option("bias"), plain, 1.2)
    yield CostRow("options", "dropout", option("dropout"), plain, 1.25)
    yield CostRow("options", "lse", plain, plain, 1.15, observe=("lse",))
    yield CostRow("options", "entropy", plain, plain, 1.15, observe=("entropy",))
    yield CostRow("options", "top 8", plain, plain, 1.15, observe=(regard.top(8),))
    yield CostRow("options", "received", plain, plain, 1.7, observe=("received",))
    yield CostRow("options", "maps of 256 × 256", plain, plain, observe=(MASS_MAP, MAX_MAP), quick=False)
    grouped = sized("grouped heads", 2048, h=32, h_kv=8)
    yield CostRow("options", "32 heads over 8, against 32", grouped, replace(grouped, name="32 over 32", h_kv=32), 1.0)

    for n in (16, 32, 64, 128):
        yield SmallRow(f"plain, n = {n}", sized("plain", n))
        yield SmallRow(f"causal, n = {n}", sized("causal", n), quick=False)
    yield from model_rows.rows()
    yield from reach.rows()

    yield ImportRow()
    for kind in KINDS:
        yield FirstCallRow(kind, False, 0.3, quick=kind == "plain")
        yield FirstCallRow(kind, True, 0.03, quick=kind == "plain")

    yield MemoryRow(2**17, goal=2.0)
    for n in (2**12, 2**13, 2**16):
        alone = (SUBJECT,) if n > 2**13 else (SUBJECT, "PyTorch")
        yield MemoryRow(n, alone, 2.0 if n > 2**13 else None, quick=n == 2**12, what=", training with bias and dropout")
    for n in (2**x for x in (10, 12, 14, 15, 17)):
        yield MemoryRow(n, memory.FORWARD, group="memory over n", quick=n <= 4096)

    for kind in ("plain", "causal"):
        for n in (2**x for x in range(4, 14)):
            yield ShareRow(
                "growth",
                f"{kind}, n = {n}",
                sized(kind, n),
                peers=IN_GROWTH,
                quick=kind == "plain" and n in (128, 512, 2048),
            )
    for n in (2**x for x in range(10, 14)):
        fixed = replace(sized("window", n), name="window of 256", options=lambda rng, c: {"mask": regard.window(256)})
        yield CostRow(
            "window over n", f"window of 256, n = {n}", fixed, sized("plain", n), visible=True, quick=n <= 4096
        )


def derivative_rows() -> Iterator[Row]:
    plain, causal = sized("plain", 2048), sized("causal", 2048)
    for dtype in ("float32", "bfloat16"):
        for c in (plain, causal):
            name = f"backward against PyTorch's, {dtype}, {c.name}"
            yield DerivativeRow(name, "backward", c, goal=0.5, dtype=dtype, versus=True, quick=c is plain)
    for c in (plain, causal):
        yield DerivativeRow(f"JVP, {c.name}", "JVP", c, "forward", goal=3.3, quick=c is plain)
        yield DerivativeRow(f"double backward, {c.name}", "double backward", c, goal=3.3, quick=c is plain)
        name = f"forward over reverse, dO moving, {c.name}"
        yield DerivativeRow(name, "forward over reverse", c, goal=3.8, quick=c is plain)
    option = partial(sized, n=2048, h=4, lead=(2,))
    plain = option("plain")
    per_head = replace(option("broadcast bias"), name="bias of each head", lead=(2,))
    yield DerivativeRow("dense bias and its gradient", "backward", option("bias"), base_case=plain, goal=1.3)
    yield DerivativeRow("bias of a row for each head and its gradient", "backward", per_head, base_case=plain, goal=1.3)
    yield DerivativeRow("double backward of that, against its backward", "double backward", per_head, goal=3.3)
    for name, label in (("window", "window of 256"), ("documents", "3 documents, causal"), ("padding", "padding")):
        yield DerivativeRow(f"backward, {label}", "backward", option(name), base_case=plain, visible=True)
    yield DerivativeRow("double backward, window of 256", "double backward", option("window"), "double backward", plain,
                     visible=True)  # fmt: skip
    yield DerivativeRow("backward, softcap", "backward", option("softcap"), base_case=plain, goal=1.2)
    yield DerivativeRow("backward, dropout", "backward", option("dropout"), base_case=plain, goal=1.25)


def chosen(pattern: str | None = None, quick: bool = False) -> list[Row]:
    """Return the rows with a `group: name` that matches a regular expression."""
    return [
        row
        for row in rows()
        if (row.quick or not quick) and (pattern is None or re.search(pattern, f"{row.group}: {row.name}"))
    ]
