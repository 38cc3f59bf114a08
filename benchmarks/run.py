"""A run: rows measured one after the other, and a description of the machine."""

import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from threadpoolctl import threadpool_limits

import regard
from benchmarks.measure import Report, Result, Setting, pinned
from benchmarks.row_types import Row
from regard import doctor
from regard.runtime.threads import num_threads

PACKAGES = ("numpy", "llvmlite", "torch", "transformers", "jax", "onnxruntime", "openvino")

Progress = Callable[[str, int], object]
"""Called with the current stage and the number of finished rows."""

QUICK: dict[str, Any] = {
    "rounds": 3,
    "seconds": 1.5,
    "left_out": {"FlexAttention": "not in a quick run: compiling takes seconds a row"},
}
"""Settings of a quick run."""


def run(rows: Sequence[Row], s: Setting, progress: Progress = lambda stage, done: None) -> Report:
    """Measure rows on the last of the cores that may be used.

    Libraries are limited to as many threads. An interruption ends it early, with the finished rows in the report;
    without any, there is no report.
    """
    before = num_threads()
    results: list[Result] = []
    pin, limit = pinned(s.cores[-s.threads :]), threadpool_limits(s.threads, "blas")
    with pin, limit, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' warnings about themselves
        regard.set_num_threads(s.threads)
        try:
            for n, row in enumerate(rows):
                label = f"{row.group}: {row.name}"
                progress(label, n)
                results.append(row.measure(replace(s, tick=partial(_tick, progress, label, n), done=results)))
        except KeyboardInterrupt:
            if not results:
                raise
        finally:
            regard.set_num_threads(before)
    method = {
        "threads": s.threads,
        "rounds": s.rounds,
        "seconds": s.seconds,
        "engine": s.engine or "the first that can",
    }
    if len(results) < len(rows):
        method["interrupted"] = f"after {len(results)} of {len(rows)} rows"
    return Report(machine(s), method, results)


def _tick(progress: Progress, label: str, done: int, stage: str) -> None:
    progress(f"{label} · {stage}", done)


def machine(s: Setting) -> dict[str, str]:
    """Describe the processor, the target and all measured versions.

    Nothing names the machine.
    """
    found: dict[str, Any] = {
        "processor": doctor.report()["processor"]["name"],
        "cores": f"{len(s.cores)}, {s.threads} of them measured unless a row says otherwise",
        "target": _target(),
        "python": platform.python_version(),
        "regard": regard.__version__,
    }
    return found | {name: doctor.installed(name) or "not installed" for name in PACKAGES}


def _target() -> str:
    try:
        from regard.engines.cpu.target.instructions import chosen

        target = chosen()
    except (ImportError, RuntimeError) as error:
        return f"none: {error}"
    return f"{target.name}, vectors of {target.vector} bytes, {target.registers} registers"
