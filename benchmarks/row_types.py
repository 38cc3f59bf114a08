"""Types of rows: what each measures, and its method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

import regard
from benchmarks import derivatives, memory
from benchmarks.measure import (
    SUBJECT,
    Contender,
    Result,
    Setting,
    Wrong,
    check,
    in_turns,
    pinned,
)
from benchmarks.peers import PEERS, Adapter, reason, tensors
from cases import Case
from regard.core.statistics import Profile, Top
from regard.engines.cpu import limits
from regard.ops.planning import plan
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]
Options = dict[str, Any]
Named = dict[str, Array]
Prepared = tuple[Callable[[], Any], Callable[[Any], Any]]  # the call to time, and a function from its result to arrays

PEAK = "the peak"
MANY = 5  # factor of rounds for calls on several threads
BACKWARD = 2.5
"""Products of backward over those of forward: five for two."""


class Row(Protocol):
    """A line of the report.

    quick: it belongs to the short run.
    """

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


def named(result: Any) -> Named:
    """Return the arrays of a result of `regard.attention` by name.

    For statistics with several arrays, only the values.
    """
    if not isinstance(result, tuple):
        return {"out": result}
    out, seen = result
    return {"out": out} | {str(s): x.values if isinstance(x, (Top, Profile)) else x for s, x in seen.items()}


def exact(q: Array, k: Array, v: Array, options: Options) -> Named:
    """Compute the same call in float64 by the tiled engine.

    It shares no kernel with the cpu engine.
    """
    wide = {name: x.astype(np.float64) if name == "bias" else x for name, x in options.items()}
    return named(regard.attention(*(x.astype(np.float64) for x in (q, k, v)), engine="tiled", **wide))


def flops(c: Case, options: Options) -> float:
    """Return 2 · b · h · n_q · n_k · (d + d_v).

    For a causal call with as many queries as keys, half of that.
    """
    half = 0.5 if options.get("causal") and c.n_q == c.n_k else 1.0
    return half * 2.0 * float(np.prod(c.lead)) * c.h * c.n_q * c.n_k * (c.d + c.d_v)


def facts(c: Case) -> dict[str, Any]:
    return {"batch": int(np.prod(c.lead)), "h": c.h, "h_kv": c.h_kv or c.h, "n_q": c.n_q, "n_k": c.n_k, "d": c.d}


def checked(c: Case, dtype: Any, s: Setting, **more: Any) -> tuple[Callable[[], Any], Options]:
    """Return a call with a checked result, and its options."""
    q, k, v, options = c.inputs_with_real_bias(dtype)
    options |= more
    call = partial(regard.attention, q, k, v, engine=s.engine, **options)
    check(named(call()), exact(q, k, v, options), q.dtype)
    return call, options


# Row types


@dataclass(frozen=True)
class LimitRow:
    """A limit itself."""

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
            found.unit, found.work = limit.measured_in, {SUBJECT: limit.work}
            found.name += f" ({limit.means})" if limit.means else ""
        except (RuntimeError, ValueError, ImportError) as error:
            found.failures[SUBJECT] = reason(error)
        return found


@dataclass(frozen=True)
class ShareRow:
    """A call's rate as a share of a limit, with every peer."""

    group: str
    name: str
    case: Case
    dtype: str = "float32"
    goal: float | None = None
    reads: bool = False  # the limit is reading key and value, not arithmetic
    amx: bool = True  # if the target has them
    peers: tuple[str, ...] = tuple(PEERS)
    quick: bool = False

    def prepare(self, s: Setting) -> tuple[Any, Named, Mapping[str, Callable[..., Prepared]], float]:
        """Return arguments of adapters, exact results, adapters, and work of a call."""
        q, k, v, options = self.case.inputs(dtype_of(self.dtype))
        work = float(k.nbytes + v.nbytes) if self.reads else flops(self.case, options)
        adapters = {SUBJECT: ours(s, options)} | {name: PEERS[name] for name in self.peers}
        return (q, k, v, bool(options.get("causal")), s.threads), exact(q, k, v, options), adapters, work

    def measure(self, s: Setting) -> Result:
        peak = partial(limits.peak, self.dtype, amx=self.amx)
        limit = (limits.bandwidth if self.reads else peak)(s.threads)
        found = Result(self.group, self.name, f"of the {limit.name}", True, self.goal, "limit")
        found.facts = facts(self.case) | {
            "dtype": self.dtype,
            "causal": self.case.name == "causal",
            "rate": limit.measured_in,
        }
        if self.dtype == "bfloat16" and "bfloat16 dot" not in limit.name:
            found.goal = None  # the goal is for processors with bf16 dot products
        given, expected, adapters, work = self.prepare(s)
        contenders = {"limit": Contender(limit.call, limit.work)}
        return compared(found, contenders, adapters, given, expected, dtype_of(self.dtype), work, s)


@dataclass(frozen=True)
class BackwardShareRow(ShareRow):
    """The same for backward, given forward's outputs."""

    amx: bool = False
    peers: tuple[str, ...] = tuple(derivatives.BACKWARD)

    def prepare(self, s: Setting) -> tuple[Any, Named, Mapping[str, Callable[..., Prepared]], float]:
        g = derivatives.DerivativeCall.of(self.case, dtype_of(self.dtype))
        adapters = {SUBJECT: partial(derivatives.backward, engine=s.engine)} | {
            name: derivatives.BACKWARD[name] for name in self.peers
        }
        return (g, s.threads), derivatives.exact("backward", g), adapters, BACKWARD * flops(self.case, g.options)


def compared(
    found: Result,
    contenders: dict[str, Contender],
    adapters: Mapping[str, Callable[..., Prepared]],
    given: tuple[Any, ...],
    expected: Named,
    dtype: np.dtype[Any],
    work: float,
    s: Setting,
) -> Result:
    """Time every adapter with a right result, in turns with the contenders.

    work: FLOPs or bytes of a call, to compute rates.
    """
    found.failures = {name: why for name, why in s.left_out.items() if name in adapters}
    for name, adapter in adapters.items():
        if name in s.left_out:
            continue
        s.tick(name)
        call = partly(found, name, adapter, given, expected, dtype)
        if call is not None:
            contenders[name] = Contender(call, work)
    for contender in contenders.values():
        contender.call()
    s.tick("measuring")
    if found.reference is None or found.reference in contenders:
        found.samples = in_turns(contenders, s)
        found.work = {name: c.work for name, c in contenders.items() if work}
    return found


def partly(
    found: Result,
    name: str,
    adapter: Callable[..., Prepared],
    given: tuple[Any, ...],
    expected: Named,
    dtype: np.dtype[Any],
    naive: Mapping[str, float] | None = None,
) -> Callable[[], Any] | None:
    """Return a contender's call if its result is right, as far as it has one.

    Otherwise record the failure and return None.
    """
    try:
        call, read = adapter(*given)
        got = read(call())
        got = got if isinstance(got, dict) else {"out": got}
        check(got, {x: expected[x] for x in got}, dtype, naive)
    except Exception as error:  # any error of a library is its reason
        found.failures[name] = reason(error)
        return None
    return call


def ours(s: Setting, options: Options) -> Adapter:
    def adapter(q: Array, k: Array, v: Array, causal: bool, threads: int) -> Any:
        return partial(regard.attention, q, k, v, engine=s.engine, **options), lambda out: out

    return adapter


@dataclass(frozen=True)
class CostRow:
    """Time of a call over that of another one of the same size."""

    group: str
    name: str
    case: Case
    base: Case
    goal: float | None = None
    visible: bool = False  # the goal follows the share of visible pairs
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
class DerivativeRow:
    """Time of a derivative over that of `base`, a derivative or forward.

    PyTorch's own is measured too, if it exists. versus: measure against PyTorch instead.
    """

    name: str
    kind: str
    case: Case
    base: str = "backward"
    base_case: Case | None = None  # by default the same
    goal: float | None = None
    visible: bool = False  # the goal follows the share of visible pairs
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
            g = derivatives.DerivativeCall.of(self.case, dtype)
            base = g if self.base_case is None else derivatives.DerivativeCall.of(self.base_case, dtype)
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
class SpeedupRow:
    """Time of a call on several threads over the same call on one.

    The same round measures the peak's gain by these threads. Virtual cores may share one core, or have busy neighbours,
    from one second to the next. A call gains no more than they allow, so a median takes many rounds.
    """

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

            return Contender(run)

        with pinned(s.cores[-self.threads :]):
            try:
                regard.set_num_threads(self.threads)
                call, options = checked(self.case, np.float32, s)
                alone, together = (limits.peak("float32", n).call for n in (1, self.threads))
                alone()
                together()
                turns = {"alone": Contender(alone), "one thread": on(1), SUBJECT: on(self.threads)}
                turns["together"] = Contender(together)
                times = in_turns(turns, replace(s, rounds=MANY * s.rounds), self.threads)
                found.samples = {name: times[name] for name in ("one thread", SUBJECT)}
                # The call's time with the same gain as multiply-adds in registers.
                gains = np.multiply(times["alone"], self.threads) / times["together"]
                found.samples[PEAK] = (times["one thread"] / gains).tolist()
                found.work = dict.fromkeys(found.samples, flops(self.case, options))
            except Wrong as error:
                found.failures[SUBJECT] = reason(error)
            finally:
                regard.set_num_threads(before)
        return found


@dataclass(frozen=True)
class SmallRow:
    """Time of a small call from PyTorch's tensors and back, over PyTorch's own."""

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
class MemoryRow:
    """Peak memory of one call beyond inputs and outputs, over the size of q, k and v."""

    n: int
    contenders: tuple[str, ...] = (SUBJECT,)
    goal: float | None = None
    group: str = "memory"
    quick: bool = True
    what: str = ""  # they do, otherwise forward; its name in `memory.CALLS` after theirs

    @property
    def name(self) -> str:
        return f"{self.what.removeprefix(', ') or 'every option'}, n = {self.n:,}"

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
