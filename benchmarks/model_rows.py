"""Rows of models, and of attention in their shapes and after products.

Each row sets its own number of threads.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import regard
from benchmarks import shapes
from benchmarks.measure import (
    EAGER,
    SDPA,
    SUBJECT,
    Call,
    Contender,
    Result,
    Setting,
    check,
    clock,
    errors,
    in_turns,
    pinned,
)
from benchmarks.peers import reason
from benchmarks.row_types import MANY, Row, compared, dtype_of, facts, partly
from regard.runtime.threads import num_threads

MODELS = (
    "Llama, prefill of 256",
    "Llama, prefill of 1,024",
    "Llama, prefill of 2,048",
    "Llama, training of 256",
    "Llama, training of 512",
    "Llama, training of 1,024",
    "Llama, generation of 32 after 1,024",
    "BERT, 4 padded to 256",
    "ViT, 4 images",
    "Whisper, encoder",
    "T5, training of 512 to 128",
    "U-Net, latents of 64 × 64",
)
"""Names in `benchmarks.models`.

They need PyTorch, and all but the last transformers.
"""
COMPANY = (
    (shapes.shape("ViT-B/16", 16, 12, 197), ("float32", "bfloat16")),
    (shapes.shape("MiniLM", 32, 12, 128, 64), ("float32",)),
    (shapes.shape("Whisper-base, encoder", 1, 8, 1_500), ("float32", "bfloat16")),
    (shapes.shape("SDXL, 32 × 32", 2, 20, 1_024), ("float32",)),
)
"""Shapes to measure on two threads after a product of matrices."""
MODEL_TIME, SHAPE_TIME = 1 / 2, 1 / 6
"""Time for a row of a model, and of a shape, as a share of that for other rows."""


@dataclass(frozen=True)
class ModelStepRow:
    """Speed of a model's step over its speed with SDPA.

    Eager is measured too, and the share of attention in each. With two threads the goal is at least the lower quartile
    of one thread in the same run.
    """

    model: str
    dtype: str
    threads: int
    goal: float | None = 1.0
    group: str = "models"
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}, {self.dtype}, {counted(self.threads)}"

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× the speed with SDPA", True, self.goal, SDPA)
        one = replace(self, threads=1).name
        for x in s.done:
            if self.goal is not None and (x.group, x.name) == (self.group, one) and SUBJECT in x.samples:
                found.goal = max(self.goal, x.spread()[0])
        return on_threads(found, self.threads, s, self.fill)

    def fill(self, found: Result, s: Setting) -> None:
        from benchmarks import models

        model, dtype = models.MODELS[self.model], dtype_of(self.dtype)
        s.tick("float64")
        exact = models.exact(model)
        s.tick(EAGER)
        call, read = models.prepared(model, EAGER, self.dtype)
        naive = errors(read(call()), exact)
        contenders = {EAGER: Contender(call)}
        for who in (SDPA, SUBJECT):
            s.tick(who)
            right = partly(found, who, models.prepared, (model, who, self.dtype), exact, dtype, naive)
            if right is not None:
                contenders[who] = Contender(right)
        if {SDPA, SUBJECT} <= set(contenders):
            shares = {who: models.share(who, x.call, clock(s.threads)) for who, x in contenders.items()}
            found.facts = {"threads": s.threads, "dtype": self.dtype, "attention": shares}
            s.tick("measuring")
            found.samples = in_turns(contenders, replace(s, seconds=s.seconds * MODEL_TIME))
            found.work = dict.fromkeys(found.samples, 1.0)


@dataclass(frozen=True)
class DropInRow:
    """Speed of our function over PyTorch's, in a model's shape."""

    shape: shapes.Shape
    dtype: str
    threads: int
    goal: float | None = 1.0
    group: str = "shapes"
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.dtype}, {counted(self.threads)}"

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× PyTorch's speed", True, self.goal, "PyTorch")
        found.facts = facts(self.shape.case) | {"threads": self.threads, "dtype": self.dtype}
        return on_threads(found, self.threads, s, self.fill)

    def fill(self, found: Result, s: Setting) -> None:
        s.tick("float64")
        g, exact = shapes.expected(self.shape)
        dtype, s = dtype_of(self.dtype), replace(s, seconds=s.seconds * SHAPE_TIME)
        compared(found, {}, shapes.ADAPTERS, (self.shape, g, dtype), exact, dtype, 1.0, s)


@dataclass(frozen=True)
class AfterProductRow:
    """Speed of a call on two threads over one, right after a product of matrices.

    The product is PyTorch's, before the drop-in, or NumPy's, before `regard.attention` on arrays. Both run on two
    threads, which then spin for a while on cores that attention needs. Without a product the drop-in runs alone.
    """

    shape: shapes.Shape
    dtype: str
    product: str
    goal: float | None = 1.8
    group: str = "threads"
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.dtype}, " + (f"after {self.product}" if self.product else "alone")

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× one thread", True, self.goal, "one thread")
        found.facts = facts(self.shape.case)
        return on_threads(found, 2, s, self.fill)

    def fill(self, found: Result, s: Setting) -> None:
        import torch

        g, exact = shapes.expected(self.shape)
        dtype = dtype_of(self.dtype)
        call: Call
        if self.product == "NumPy":
            arrays = [x.astype(dtype) for x in (g.q, g.k, g.v)]
            call = partial(regard.attention, *arrays, **g.options)
            check({"out": call()}, exact, dtype)
        else:
            call, read = shapes.ADAPTERS[SUBJECT](self.shape, g, dtype)
            check(read(call()), exact, dtype)
        a = np.ones((700, 700), np.float32)
        tensor = torch.from_numpy(a)
        products: dict[str, Callable[[], object]] = {
            "PyTorch": lambda: torch.mm(tensor, tensor),
            "NumPy": lambda: np.matmul(a, a),
            "": lambda: None,
        }

        def on(threads: int) -> Contender:
            def seconds() -> float:
                regard.set_num_threads(threads)
                products[self.product]()
                start = time.perf_counter()
                call()
                return time.perf_counter() - start

            return Contender(seconds)

        turns = {"one thread": on(1), SUBJECT: on(2)}
        own = replace(s, rounds=MANY * s.rounds, seconds=s.seconds * SHAPE_TIME, time=total)
        found.samples = in_turns(turns, own)
        found.work = dict.fromkeys(found.samples, 1.0)


def total(call: Call, repeats: int) -> float:
    """Return the seconds of calls that time themselves."""
    return math.fsum(call() for _ in range(repeats))


def counted(threads: int) -> str:
    return "one thread" if threads == 1 else f"{threads} threads"


def on_threads(found: Result, threads: int, s: Setting, fill: Callable[[Result, Setting], object]) -> Result:
    """Fill a row on a number of threads of PyTorch and `regard`.

    If that is not possible, record the reason.
    """
    if len(s.cores) < threads:
        found.failures[SUBJECT] = f"needs {threads} cores, may use {len(s.cores)}"
        return found
    if s.engine is not None:
        found.failures[SUBJECT] = "what models call takes no engine"
        return found
    before = num_threads()
    try:
        import torch

        theirs = torch.get_num_threads()
    except ImportError as error:
        found.failures[SUBJECT] = reason(error)
        return found
    with pinned(s.cores[-threads:]):
        try:
            torch.set_num_threads(threads)
            regard.set_num_threads(threads)
            fill(found, replace(s, threads=threads))
        except Exception as error:  # any error of a library is its reason
            found.failures[SUBJECT] = reason(error)
        finally:
            torch.set_num_threads(theirs)
            regard.set_num_threads(before)
    return found


def rows() -> Iterator[Row]:
    """Yield the rows, those of one model or shape together: exact results are cached."""
    for shape, dtypes in COMPANY:
        for dtype in dtypes:
            for product in ("", "PyTorch", "NumPy"):
                yield AfterProductRow(shape, dtype, product)
    kinds = [(dtype, threads) for dtype in ("float32", "bfloat16") for threads in (1, 2)]
    for model in MODELS:
        for dtype, threads in kinds:
            yield ModelStepRow(model, dtype, threads, quick=model.startswith("ViT") and (dtype, threads) == kinds[0])
    for n, shape in enumerate(shapes.SHAPES):
        for dtype, threads in kinds:
            yield DropInRow(shape, dtype, threads, quick=n % 8 == 0 and threads == 1)
