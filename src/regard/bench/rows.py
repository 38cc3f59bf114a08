"""What is measured, against what, and the goals."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

import regard
from regard.bench import derivatives, limits, memory
from regard.bench.cases import Case, case
from regard.bench.measure import (
    SUBJECT,
    Contender,
    Result,
    Setting,
    Wrong,
    as_installed,
    check,
    fresh,
    in_turns,
    pinned,
)
from regard.bench.peers import PEERS, Adapter, reason, tensors
from regard.observing import Profile, Top
from regard.planning import plan
from regard.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]
Options = dict[str, Any]
Named = dict[str, Array]
Prepared = tuple[Callable[[], Any], Callable[[Any], Any]]  # what is timed, and how its result is read


class Row(Protocol):
    """A line of the report. quick: whether it belongs to the short run."""

    @property
    def group(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def goal(self) -> float | None: ...
    @property
    def quick(self) -> bool: ...
    def measure(self, s: Setting) -> Result: ...


# Calls of regard


def real_inputs(c: Case, dtype: Any) -> tuple[Array, Array, Array, Options]:
    """As the case has them, the bias in the dtype of a call's sums."""
    q, k, v, options = c.inputs(dtype)
    if "bias" in options:
        options["bias"] = options["bias"].astype(np.float64 if q.dtype == np.float64 else np.float32)
    return q, k, v, options


def named(result: Any) -> Named:
    """The arrays of a result of `regard.attention` by name; of those in several the values."""
    if not isinstance(result, tuple):
        return {"out": result}
    out, seen = result
    return {"out": out} | {str(s): x.values if isinstance(x, (Top, Profile)) else x for s, x in seen.items()}


def exact(q: Array, k: Array, v: Array, options: Options) -> Named:
    """The same call in float64, in tiles on NumPy, which has nothing in common with the compiled kernels."""
    wide = {name: x.astype(np.float64) if name == "bias" else x for name, x in options.items()}
    return named(regard.attention(*(x.astype(np.float64) for x in (q, k, v)), engine="tiled", **wide))


def flops(c: Case, options: Options) -> float:
    """2 · b · h · n_q · n_k · (d + d_v), and half of it for as many causal queries as keys."""
    half = 0.5 if options.get("causal") and c.n_q == c.n_k else 1.0
    return half * 2.0 * float(np.prod(c.lead)) * c.h * c.n_q * c.n_k * (c.d + c.d_v)


def facts(c: Case) -> dict[str, Any]:
    return {"batch": int(np.prod(c.lead)), "h": c.h, "h_kv": c.h_kv or c.h, "n_q": c.n_q, "n_k": c.n_k, "d": c.d}


def checked(c: Case, dtype: Any, s: Setting, **more: Any) -> tuple[Callable[[], Any], Options]:
    """A call that has given the right result, and its options."""
    q, k, v, options = real_inputs(c, dtype)
    options |= more
    call = partial(regard.attention, q, k, v, engine=s.engine, **options)
    check(named(call()), exact(q, k, v, options), q.dtype)
    return call, options


# Kinds of rows


@dataclass(frozen=True)
class Rate:
    """The limits themselves."""

    name: str
    limit: Callable[[int], limits.Limit]
    every_core: bool = False
    group: str = "limits"
    goal: float | None = None
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        threads = len(s.cores) if self.every_core else s.threads
        found = Result(self.group, self.name, "", True, facts={"threads": threads})
        try:
            limit = self.limit(threads)
            with pinned(s.cores[-threads:]):
                limit.call()
                found.samples = in_turns({SUBJECT: Contender(limit.call)}, s, threads)
            found.unit, found.work = limit.unit, {SUBJECT: limit.work}
            found.name += f" ({limit.means})" if limit.means else ""
        except (RuntimeError, ValueError, ImportError) as error:
            found.failures[SUBJECT] = reason(error)
        return found


@dataclass(frozen=True)
class Share:
    """A call's rate as a share of a limit, beside every peer."""

    group: str
    name: str
    case: Case
    dtype: str = "float32"
    goal: float | None = None
    reads: bool = False  # the limit is reading key and value, not arithmetic
    by_matrices: bool = True  # where the target has them
    peers: tuple[str, ...] = tuple(PEERS)
    quick: bool = False

    def prepare(self, s: Setting) -> tuple[Any, Named, Mapping[str, Callable[..., Prepared]], float]:
        """What adapters are given, what they should compute, the adapters, and the work of one call."""
        q, k, v, options = self.case.inputs(dtype_of(self.dtype))
        work = float(k.nbytes + v.nbytes) if self.reads else flops(self.case, options)
        adapters = {SUBJECT: ours(s, options)} | {name: PEERS[name] for name in self.peers}
        return (q, k, v, bool(options.get("causal")), s.threads), exact(q, k, v, options), adapters, work

    def measure(self, s: Setting) -> Result:
        peak = partial(limits.peak, self.dtype, by_matrices=self.by_matrices)
        limit = (limits.bandwidth if self.reads else peak)(s.threads)
        found = Result(self.group, self.name, f"of the {limit.name}", True, self.goal, "limit")
        found.facts = facts(self.case) | {
            "dtype": self.dtype,
            "causal": self.case.name == "causal",
            "rate": limit.unit,
        }
        if self.dtype == "bfloat16" and "bfloat16 dot" not in limit.name:
            found.goal = None  # a processor without products of pairs, for which it was set
        given, expected, adapters, work = self.prepare(s)
        contenders = {"limit": Contender(limit.call, limit.work)}
        found.failures = {name: why for name, why in s.left_out.items() if name in adapters}
        for name, adapter in adapters.items():
            if name in s.left_out:
                continue
            s.tick(name)
            call = partly(found, name, adapter, given, expected, dtype_of(self.dtype))
            if call is not None:
                contenders[name] = Contender(call, work)
        limit.call()
        s.tick("measuring")
        found.samples = in_turns(contenders, s)
        found.work = {name: c.work for name, c in contenders.items()}
        return found


@dataclass(frozen=True)
class BackwardShare(Share):
    """The same for backward, given what forward computed."""

    by_matrices: bool = False
    peers: tuple[str, ...] = tuple(derivatives.BACKWARD)

    def prepare(self, s: Setting) -> tuple[Any, Named, Mapping[str, Callable[..., Prepared]], float]:
        g = derivatives.Given.of(self.case, dtype_of(self.dtype))
        adapters = {SUBJECT: partial(derivatives.backward, engine=s.engine)} | {
            name: derivatives.BACKWARD[name] for name in self.peers
        }
        return (g, s.threads), derivatives.exact("backward", g), adapters, BACKWARD * flops(self.case, g.options)


def partly(
    found: Result,
    name: str,
    adapter: Callable[..., Prepared],
    given: tuple[Any, ...],
    expected: Named,
    dtype: np.dtype[Any],
) -> Callable[[], Any] | None:
    """A contender's call once its result is right, as far as it has one; otherwise why not."""
    try:
        call, read = adapter(*given)
        got = read(call())
        got = got if isinstance(got, dict) else {"out": got}
        check(got, {x: expected[x] for x in got}, dtype)
    except Exception as error:  # whatever a library raises is its reason
        found.failures[name] = reason(error)
        return None
    return call


def ours(s: Setting, options: Options) -> Adapter:
    def adapter(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Any:
        return partial(regard.attention, q, k, v, engine=s.engine, **options), lambda out: out

    return adapter


@dataclass(frozen=True)
class Cost:
    """The time of a call over that of another one of the same size."""

    group: str
    name: str
    case: Case
    base: Case
    goal: float | None = None
    visible: bool = False  # the goal follows the share of pairs that may be seen
    observe: tuple[Any, ...] = ()
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, f"× {self.base.name}", False, self.goal, self.base.name)
        found.facts = facts(self.case)
        try:
            more: Options = {"observe": list(self.observe)} if self.observe else {}
            call, options = checked(self.case, np.float32, s, **more)
            base, _ = checked(self.base, np.float32, s)
        except Exception as error:
            found.failures[SUBJECT] = reason(error)
            return found
        if self.visible:
            share = visible(self.case, options)
            found.goal = 1.25 * share + 0.05
            found.facts["visible"] = share
        found.samples = in_turns({self.base.name: Contender(base), SUBJECT: Contender(call)}, s)
        return found


def visible(c: Case, options: Options) -> float:
    q, k, v, _ = c.inputs(np.float32)
    return plan(q, k, v, **{x: options[x] for x in ("mask", "causal") if x in options}).tiles.visible


@dataclass(frozen=True)
class Derivative:
    """The time of a derivative over that of `base`, a kind of call too; PyTorch's own over the same, where it has it.

    versus: a peer to be measured against instead.
    """

    name: str
    kind: str
    case: Case
    base: str = "backward"
    base_case: Case | None = None  # the same unless given
    goal: float | None = None
    visible: bool = False  # the goal follows the share of pairs that may be seen
    dtype: str = "float32"
    versus: bool = False
    group: str = "derivatives"
    quick: bool = False

    def measure(self, s: Setting) -> Result:
        reference = "PyTorch" if self.versus else self.base
        unit = f"× PyTorch's {self.base}" if self.versus else f"× {self.base}"
        found = Result(self.group, self.name, unit, False, self.goal, reference)
        found.facts = facts(self.case)
        dtype = dtype_of(self.dtype)
        try:
            g = derivatives.Given.of(self.case, dtype)
            base = g if self.base_case is None else derivatives.Given.of(self.base_case, dtype)
            expected = derivatives.exact(self.kind, g)
            own = expected if base is g and self.base == self.kind else derivatives.exact(self.base, base)
        except (ValueError, MemoryError) as error:
            found.failures[SUBJECT] = reason(error)
            return found
        wanted: list[tuple[str, Any, Any, Named]] = [
            (SUBJECT, partial(derivatives.OURS[self.kind], engine=s.engine), g, expected)
        ]
        if not self.versus:
            wanted.insert(0, (self.base, partial(derivatives.OURS[self.base], engine=s.engine), base, own))
        if self.kind in derivatives.TORCH and "PyTorch" not in s.left_out:
            wanted.append(("PyTorch", derivatives.TORCH[self.kind], g, expected))
        contenders = {}
        for name, adapter, given, result in wanted:
            s.tick(name)
            call = partly(found, name, adapter, (given, s.threads), result, dtype)
            if call is not None:
                contenders[name] = Contender(call)
        if self.visible:
            found.facts["visible"] = visible(self.case, g.options)
            found.goal = 1.25 * found.facts["visible"] + 0.05
        if {SUBJECT, reference} <= set(contenders):
            found.samples = in_turns(contenders, s)
        return found


@dataclass(frozen=True)
class Speedup:
    """A call on several threads over the same call on one."""

    group: str
    name: str
    case: Case
    goal: float | None = None
    threads: int = 2
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× one thread", True, self.goal, "one thread")
        found.facts = facts(self.case)
        if len(s.cores) < self.threads:
            found.failures[SUBJECT] = f"needs {self.threads} cores, may use {len(s.cores)}"
            return found
        before = num_threads()

        def on(threads: int) -> Contender:
            def run() -> None:
                regard.set_num_threads(threads)
                call()

            return Contender(run, flops(self.case, options))

        with pinned(s.cores[-self.threads :]):
            try:
                regard.set_num_threads(self.threads)
                call, options = checked(self.case, np.float32, s)
                contenders = {"one thread": on(1), SUBJECT: on(self.threads)}
                found.samples = in_turns(contenders, s, self.threads)
                found.work = {name: c.work for name, c in contenders.items()}
            except Wrong as error:
                found.failures[SUBJECT] = reason(error)
            finally:
                regard.set_num_threads(before)
        return found


@dataclass(frozen=True)
class Small:
    """A short call from PyTorch's tensors and back, over PyTorch's own."""

    name: str
    case: Case
    goal: float | None = 1.5
    group: str = "small"
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "× PyTorch", False, self.goal, "PyTorch")
        found.facts = facts(self.case)
        q, k, v, options = self.case.inputs(np.float32)
        expected = exact(q, k, v, options)
        adapters: dict[str, Adapter] = {SUBJECT: partial(self.from_tensors, s.engine), "PyTorch": PEERS["PyTorch"]}
        given = q, k, v, bool(options.get("causal")), s.threads
        contenders = {
            name: Contender(call)
            for name, adapter in adapters.items()
            if (call := partly(found, name, adapter, given, expected, q.dtype))
        }
        if len(contenders) == len(adapters):
            found.samples = in_turns(contenders, s)
        return found

    @staticmethod
    def from_tensors(engine: str | None, q: Array, k: Array, v: Array, causal: bool, threads: int) -> Any:
        import torch

        given = tensors(q, k, v)

        def call() -> Any:
            query, key, value = (x.numpy() for x in given)
            return torch.from_numpy(regard.attention(query, key, value, causal=causal, engine=engine))

        return call, lambda out: out[0].numpy()


@dataclass(frozen=True)
class Import:
    """`import regard` over `import numpy`, in processes of their own."""

    group: str = "cold"
    name: str = "import regard"
    goal: float | None = 1.3
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        code = "import sys, time; t = time.process_time(); __import__(sys.argv[1]); print(time.process_time() - t)"
        found = Result(self.group, self.name, "× import numpy", False, self.goal, "numpy")
        found.samples = {SUBJECT: [], "numpy": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(s.rounds + 1):
                for name in ("numpy", SUBJECT):
                    seconds = fresh(code, name, **as_installed(folder))
                    if turn:
                        found.samples[name].append(seconds)
        return found


KINDS = {
    "plain": "",
    "causal": "causal=True",
    "window and softcap": "mask=regard.window(8), score=regard.softcap(30.0)",
}

FIRST = """
import json, time
import numpy as np
import llvmlite.binding, llvmlite.ir
import regard
q = np.ones((1, 64, 64), np.float32)
t = time.process_time()
regard.attention(q, q, q, engine={engine!r}, {options})
print(time.process_time() - t)
"""


@dataclass(frozen=True)
class First:
    """The first call of a process, llvmlite imported before: compiled, or read from the disk cache."""

    kind: str
    cached: bool
    goal: float | None
    group: str = "cold"
    quick: bool = True

    @property
    def name(self) -> str:
        return f"first call, {self.kind}, {'from the disk cache' if self.cached else 'compiled'}"

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "s", False, self.goal)
        code = FIRST.format(engine=s.engine, options=KINDS[self.kind])
        with tempfile.TemporaryDirectory() as folder:
            try:
                caches = [os.path.join(folder, "0" if self.cached else str(n)) for n in range(s.rounds + 1)]
                times = [fresh(code, **as_installed(folder), REGARD_CACHE=cache) for cache in caches]
                found.samples[SUBJECT] = times[1:]
            except RuntimeError as error:
                found.failures[SUBJECT] = reason(error)
        return found


@dataclass(frozen=True)
class Memory:
    """Memory at the peak of one call beyond inputs and outputs, over the size of query, key and value."""

    n: int
    contenders: tuple[str, ...] = (SUBJECT,)
    goal: float | None = None
    group: str = "memory"
    quick: bool = True
    what: str = ""  # they do, otherwise forward; its name in `memory.CALLS` after theirs

    @property
    def name(self) -> str:
        return f"{self.what.removeprefix(', ') or 'every wish'}, n = {self.n:,}"

    def measure(self, s: Setting) -> Result:
        size = float(sum(x.nbytes for x in memory.inputs(self.n)[:3]))
        found = Result(self.group, self.name, "× q, k and v", False, self.goal, "q, k and v")
        found.samples = {"q, k and v": [size]}
        found.facts = {"n_q": self.n}
        for name in self.contenders:
            s.tick(name)
            try:
                found.samples[name] = [memory.extra(name + self.what, self.n, s.engine, s.threads)]
            except RuntimeError as error:
                found.failures[name] = reason(error)
        return found


def dtype_of(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# The table


def sized(name: str, n: int, d: int = 64, h: int = 8, lead: tuple[int, ...] = (), **more: Any) -> Case:
    return case(name, lead=lead, h=h, n_q=n, n_k=n, d=d, d_v=d, **more)


MASS_MAP, MAX_MAP = regard.pooled(256, 256), regard.pooled(256, 256, "max")
FORWARD_GOALS = {
    ("float32", "plain"): 0.88,
    ("float32", "causal"): 0.84,
    ("bfloat16", "plain"): 0.85,
    ("float64", "plain"): 0.80,
}


BACKWARD = 2.5
"""Products of backward over those of forward: five for two."""
BACKWARD_GOALS = {"float32": 0.80, "bfloat16": 0.70}
IN_GROWTH = tuple(name for name in PEERS if name != "FlexAttention")  # it would be compiled for every size


def rows() -> Iterator[Row]:
    """Every row there is, in the order of the report."""
    for dtype in ("float32", "float64", "bfloat16"):
        yield Rate(f"peak, {dtype}", partial(limits.peak, dtype))
    yield Rate("read bandwidth", limits.bandwidth)
    for dtype in ("float32", "float64", "bfloat16"):
        yield Rate(f"peak, {dtype}, every core", partial(limits.peak, dtype), every_core=True)
    yield Rate("read bandwidth, every core", limits.bandwidth, every_core=True)

    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for kind in ("plain", "causal"):
            for d in (64, 128):
                for n in (2048, 4096):
                    name = f"{dtype}, {kind}, d = {d}, n = {n}"
                    quick = (d, n) == (64, 2048)
                    goal = FORWARD_GOALS.get((dtype, kind))
                    yield Share("forward", name, sized(kind, n, d), dtype, goal, quick=quick)

    for dtype in ("float32", "float64", "bfloat16", "float16"):
        for kind in ("plain", "causal"):
            for d, n in ((64, 2048), (128, 2048), (64, 4096)):
                name = f"{dtype}, {kind}, d = {d}, n = {n}"
                quick = (d, n) == (64, 2048) and dtype != "float16"
                yield BackwardShare("backward", name, sized(kind, n, d), dtype, BACKWARD_GOALS.get(dtype), quick=quick)
    yield from derivative_rows()

    for h, h_kv, d in ((8, 8, 64), (8, 8, 128), (32, 8, 64), (32, 8, 128)):
        one = case("one query", lead=(), h=h, h_kv=h_kv, n_k=16384, d=d, d_v=d)
        heads = f"{h} heads" + (f" over {h_kv}" if h_kv != h else "")
        yield Share("decode", f"16,384 keys, {heads}, d = {d}", one, goal=0.85, reads=True, quick=d == 64)

    for kind, n in (("plain", 2048), ("causal", 2048), ("plain", 4096), ("causal", 4096)):
        yield Speedup("threads", f"two threads over one, {kind}, n = {n}", sized(kind, n), 1.9, quick=n == 2048)

    wish = partial(sized, n=2048, h=4, lead=(2,))
    plain, causal = wish("plain"), wish("causal")
    for name, label in (
        ("window", "window of 256"),
        ("documents", "3 documents, causal"),
        ("prefix", "prefix and causal"),
        ("padding", "padding"),
        ("composed masks", "composed mask"),
    ):
        yield Cost("wishes", label, wish(name), plain, visible=True)
    yield Cost("wishes", "softcap", wish("softcap"), plain, 1.2)
    yield Cost("wishes", "score of three operations", wish("score rule"), plain, 1.2)
    yield Cost("wishes", "alibi, against causal", wish("alibi"), causal, 1.2)
    yield Cost("wishes", "dense bias", wish("bias"), plain, 1.2)
    yield Cost("wishes", "dropout", wish("dropout"), plain, 1.25)
    yield Cost("wishes", "lse", plain, plain, 1.15, observe=("lse",))
    yield Cost("wishes", "entropy", plain, plain, 1.15, observe=("entropy",))
    yield Cost("wishes", "top 8", plain, plain, 1.15, observe=(regard.top(8),))
    yield Cost("wishes", "received", plain, plain, 1.7, observe=("received",))
    yield Cost("wishes", "maps of 256 × 256", plain, plain, observe=(MASS_MAP, MAX_MAP), quick=False)
    grouped = sized("grouped heads", 2048, h=32, h_kv=8)
    yield Cost("wishes", "32 heads over 8, against 32", grouped, replace(grouped, name="32 over 32", h_kv=32), 1.0)

    for n in (16, 32, 64, 128):
        yield Small(f"plain, n = {n}", sized("plain", n))
        yield Small(f"causal, n = {n}", sized("causal", n), quick=False)

    yield Import()
    for kind in KINDS:
        yield First(kind, False, 0.3, quick=kind == "plain")
        yield First(kind, True, 0.03, quick=kind == "plain")

    yield Memory(2**17, goal=2.0)
    for n in (2**12, 2**13, 2**16):
        alone = (SUBJECT,) if n > 2**13 else (SUBJECT, "PyTorch")
        yield Memory(n, alone, 2.0 if n > 2**13 else None, quick=n == 2**12, what=", training with bias and dropout")
    for n in (2**x for x in (10, 12, 14, 15, 17)):
        yield Memory(n, memory.FORWARD, group="memory over n", quick=n <= 4096)

    for kind in ("plain", "causal"):
        for n in (2**x for x in range(4, 14)):
            yield Share(
                "growth",
                f"{kind}, n = {n}",
                sized(kind, n),
                peers=IN_GROWTH,
                quick=kind == "plain" and n in (128, 512, 2048),
            )
    for n in (2**x for x in range(10, 14)):
        fixed = replace(sized("window", n), name="window of 256", wishes=lambda rng, c: {"mask": regard.window(256)})
        yield Cost("window over n", f"window of 256, n = {n}", fixed, sized("plain", n), visible=True, quick=n <= 4096)


def derivative_rows() -> Iterator[Row]:
    plain, causal = sized("plain", 2048), sized("causal", 2048)
    for dtype in ("float32", "bfloat16"):
        for c in (plain, causal):
            name = f"backward against PyTorch's, {dtype}, {c.name}"
            yield Derivative(name, "backward", c, goal=0.5, dtype=dtype, versus=True, quick=c is plain)
    for c in (plain, causal):
        yield Derivative(f"JVP, {c.name}", "JVP", c, "forward", goal=3.3, quick=c is plain)
        yield Derivative(f"double backward, {c.name}", "double backward", c, goal=3.3, quick=c is plain)
        name = f"forward over reverse, dO moving, {c.name}"
        yield Derivative(name, "forward over reverse", c, goal=3.8, quick=c is plain)
    wish = partial(sized, n=2048, h=4, lead=(2,))
    plain = wish("plain")
    per_head = replace(wish("broadcast bias"), name="bias of each head", lead=(2,))
    yield Derivative("dense bias and its gradient", "backward", wish("bias"), base_case=plain, goal=1.3)
    yield Derivative("bias of a row for each head and its gradient", "backward", per_head, base_case=plain, goal=1.3)
    yield Derivative("double backward of that, against its backward", "double backward", per_head, goal=3.3)
    for name, label in (("window", "window of 256"), ("documents", "3 documents, causal"), ("padding", "padding")):
        yield Derivative(f"backward, {label}", "backward", wish(name), base_case=plain, visible=True)
    yield Derivative("double backward, window of 256", "double backward", wish("window"), "double backward", plain,
                     visible=True)  # fmt: skip
    yield Derivative("backward, softcap", "backward", wish("softcap"), base_case=plain, goal=1.2)
    yield Derivative("backward, dropout", "backward", wish("dropout"), base_case=plain, goal=1.25)


def chosen(pattern: str | None = None, quick: bool = False) -> list[Row]:
    """The rows whose `group: name` the regular expression finds."""
    return [
        row
        for row in rows()
        if (row.quick or not quick) and (pattern is None or re.search(pattern, f"{row.group}: {row.name}"))
    ]
