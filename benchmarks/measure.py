"""Method of measurement: in turns, on pinned cores, with checked results.

Contenders run in turns within seconds. So the ratio of two times of one round does not depend on the machine's speed at
that time. On one core the clock is the processor time of this process with all its threads, which leaves out other
programs. On several cores it is wall time. Memory and first calls are measured in processes of their own.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], Any]

SAMPLE = 1e-3  # seconds: shorter calls are repeated to take as long
SUBJECT = "regard"
EAGER, SDPA = "eager", "SDPA"  # what models of transformers are compared with


class Wrong(Exception):
    """Raised for a wrong result, so that no time is reported."""


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement.

    cores: those that may be used, by default `threads` of them. seconds: approximate time for one row.
    """

    cores: tuple[int, ...]
    threads: int = 1
    rounds: int = 9
    seconds: float = 12.0
    engine: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # peers, with reasons
    time: Callable[[Call, int], float] | None = None  # (call, repeats) -> seconds; None: processor time
    tick: Callable[[str], object] = lambda stage: None
    done: "Sequence[Result]" = ()  # of this run, so far


@dataclass(frozen=True)
class Contender:
    """A call, and its FLOPs or bytes if its rate counts."""

    call: Call
    work: float = 0.0


@dataclass
class Result:
    """Samples of one row, with its goal.

    samples: for each contender seconds of one call, or bytes, one for each round. work: the FLOPs or bytes of one call,
    to compare rates in 10⁹ a second. A contender's figure is its sample or rate divided by that of `reference` in the
    same round. Without a reference it is the sample or rate itself. `goal` is a bound for the figure of `regard`: a
    lower one if `higher_is_better`, else an upper one. failures: the reasons for missing samples. facts: sizes, for
    tables and plots.
    """

    group: str
    name: str
    unit: str
    higher_is_better: bool = False
    goal: float | None = None
    reference: str | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def values(self, name: str) -> list[float]:
        """Return each round's rate in 10⁹ a second, or its sample if work does not count."""
        return [self.work[name] / t / 1e9 if self.work else t for t in self.samples[name]]

    def figures(self, name: str = SUBJECT) -> list[float]:
        values = self.values(name)
        if self.reference is None:
            return values
        others = self.values(self.reference)
        # A reference that is not measured is a single number.
        return [a / b for a, b in zip(values, others * (len(values) // len(others)), strict=True)]

    def figure(self, name: str = SUBJECT) -> float | None:
        """Return the median, None without samples."""
        return statistics.median(self.figures(name)) if name in self.samples else None

    def spread(self, name: str = SUBJECT) -> tuple[float, float]:
        """Return the quartiles."""
        figures = self.figures(name)
        if len(figures) == 1:
            return figures[0], figures[0]
        low, _, high = statistics.quantiles(figures, n=4, method="inclusive")
        return low, high

    @property
    def met(self) -> bool | None:
        """True if the goal is reached; None if there is none."""
        if self.goal is None:
            return None
        figure = self.figure()
        return figure is not None and (figure >= self.goal if self.higher_is_better else figure <= self.goal)

    @property
    def peers(self) -> list[str]:
        """The other measured contenders, best first."""
        names = [name for name in self.samples if name not in (SUBJECT, self.reference)]
        return sorted(names, key=lambda name: self.figure(name) or 0.0, reverse=self.higher_is_better)


@dataclass
class Report:
    """The results of one run: the machine, the method, and the rows."""

    machine: dict[str, str]
    method: dict[str, Any]
    results: list[Result]

    def to_json(self) -> str:
        """Write a report, a result on each line."""
        line = partial(json.dumps, ensure_ascii=False, allow_nan=False)
        results = ",\n".join(line(asdict(x)) for x in self.results)
        return f'{{"machine": {line(self.machine)},\n"method": {line(self.method)},\n"results": [\n{results}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> "Report":
        found = json.loads(text)
        return cls(found["machine"], found["method"], [Result(**x) for x in found["results"]])

    def group(self, name: str) -> list[Result]:
        return [x for x in self.results if x.group == name]


# Time


def clock(threads: int) -> Callable[[], float]:
    """Return a clock in seconds: of this process on one core, on the wall on several."""
    return time.process_time if threads == 1 else time.perf_counter


def in_turns(contenders: Mapping[str, Contender], s: Setting, threads: int | None = None) -> dict[str, list[float]]:
    """Time one call of each contender, in turns in every round, in seconds.

    All have run before.
    """
    now = clock(threads or s.threads)

    def processor(call: Call, repeats: int) -> float:
        start = now()
        for _ in range(repeats):
            call()
        return now() - start

    def seconds(call: Call, repeats: int) -> float:
        return max((s.time or processor)(call, repeats), 1e-9)

    repeats, about = dict.fromkeys(contenders, 1), 0.0
    for name, contender in contenders.items():
        while (spent := seconds(contender.call, repeats[name])) < SAMPLE:
            repeats[name] *= 2
        about += spent
    rounds = max(3, min(s.rounds, int(s.seconds / about)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(seconds(contender.call, repeats[name]) / repeats[name])
    return times


@contextmanager
def pinned(cores: tuple[int, ...]) -> Iterator[None]:
    """Pin every thread of this process to some cores, and restore at the end.

    Nothing happens on systems without pinning.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return

    def pin(cores: Any) -> None:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), cores)
            except ProcessLookupError:  # it has ended
                continue

    before = os.sched_getaffinity(0)
    pin(cores)
    try:
        yield
    finally:
        pin(before)


def cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


# Results

TIGHT = 64
"""Units of eps that a result may be off, of its norm: some ten times what is seen. For 16 bits 1: it is sums in float32
that are rounded. A key too many or too few changes far more."""


def errors(got: Mapping[str, Array], exact: Mapping[str, Array]) -> dict[str, float]:
    """Return the error of every result relative to its norm.

    Raises `Wrong` for different shapes.
    """
    found = {}
    for name, expected in exact.items():
        x = got[name].astype(np.float64)
        if x.shape != expected.shape:
            raise Wrong(f"{name} has shape {x.shape}, not {expected.shape}")
        found[name] = float(np.linalg.norm((x - expected).ravel()) / np.linalg.norm(expected.ravel()))
    return found


def check(
    got: Mapping[str, Array],
    exact: Mapping[str, Array],
    dtype: np.dtype[Any],
    naive: Mapping[str, float] | None = None,
) -> None:
    """Raise `Wrong` unless every result in `dtype` agrees with that of float64.

    Relative errors decide. naive: errors of a computation with as many roundings; twice those are allowed in addition.
    """
    import ml_dtypes

    eps = float(ml_dtypes.finfo(dtype).eps)
    for name, error in errors(got, exact).items():
        allowed = eps * (1 if dtype.itemsize == 2 else TIGHT) + (2 * naive[name] if naive else 0.0)
        if not error <= allowed:
            raise Wrong(f"wrong {name}: relative error {error:.1e}, at most {allowed:.1e}")


# Processes of their own


def fresh(code: str, *arguments: Any, **environment: str) -> Any:
    """Run Python code in a process of its own, and return its JSON output.

    arguments: the code's sys.argv[1:]. Raises RuntimeError with the last line of its errors if it fails.
    """
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return json.loads(done.stdout)


def as_installed(folder: str) -> dict[str, str]:
    """Return an environment that compiles bytecode once, as an installation does."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
