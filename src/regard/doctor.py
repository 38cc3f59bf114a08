"""Report on this machine: versions, engines, threads, processor.

Nothing heavy is imported.
"""

import os
import platform
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import regard
from regard.arguments.packages import BASE, EXTRAS, remedy
from regard.engines.cpu.target import permission
from regard.runtime import system
from regard.runtime.threads import num_threads

FRAMEWORKS = ("torch", "jax", "transformers")
FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def report() -> dict[str, dict[str, str]]:
    """Return the sections of the report, each a mapping of names to texts.

    >>> import regard.doctor
    >>> list(regard.doctor.report())
    ['versions', 'engines', 'threads', 'processor']
    """
    return {"versions": _versions(), "engines": _engines(), "threads": _threads(), "processor": _processor()}


def _versions() -> dict[str, str]:
    versions = {"regard": regard.__version__, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {name: installed(name) or f"missing: {remedy(name)}" for name in BASE}
    versions |= {name: installed(name) or "not installed (optional)" for name in FRAMEWORKS}
    extras = (name for packages in EXTRAS.values() for name in packages)
    return versions | {name: installed(name) or f"not installed (optional): {remedy(name)}" for name in extras}


def installed(package: str) -> str | None:
    """Return the version of an installed package without importing it, else None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _engines() -> dict[str, str]:
    states = regard.available_engines()
    engines = {
        engine.name: ("ready" if engine.reason is None else f"not available: {engine.reason}") + f" ({engine.about})"
        for engine in states
    }
    first, second = states[:2]
    if first.reason:
        engines[second.name] += f", runs all calls in place of {first.name}"
    engines["16-bit gradients"] = _short_gradients()
    if find_spec("torch") is not None:
        engines["SDPA"] = _sdpa()
    return engines


def _short_gradients() -> str:
    """Return where gradients in 16 bits know what rounding took from the output, `Outputs.low`, and where not."""
    alone = ["outputs= of (out, seen)", "parts of merge"]
    if find_spec("torch") is not None:
        alone.append("graphs that hold PyTorch's operation under activate()")
    return f"of the output and what its rounding took; of the rounded output alone with {', '.join(alone)}"


def _sdpa() -> str:
    """Return who computes `F.scaled_dot_product_attention` on the CPU in this process."""
    activation = sys.modules.get("regard.torch.dropins.activation")  # PyTorch is not imported for it
    if activation is not None and activation.active():
        return "regard's on the CPU: regard.torch.activate() is in force"
    return "PyTorch's: regard.torch.activate() replaces it on the CPU"


def _threads() -> dict[str, str]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    settings = {
        "used by regard": str(num_threads()),
        "processors": f"{os.cpu_count()}" + (f", {allowed} of them allowed to this process" if allowed else ""),
        "CPU quota": "none" if (quota := system.quota()) is None else f"{quota} processors, set by its control group",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }
    if find_spec("torch") is not None:
        settings["for tensors"] = "PyTorch's own threads where it uses OpenMP and was not forked, no more than above"
    if find_spec("threadpoolctl") is None:
        return settings
    from threadpoolctl import threadpool_info

    for pool in threadpool_info():
        settings[pool["internal_api"]] = f"{pool.get('version') or 'unknown version'}, {pool['num_threads']} threads"
        spins = pool["internal_api"] == "openblas" and pool["num_threads"] > 1
        if spins and "OPENBLAS_THREAD_TIMEOUT" not in os.environ:
            settings["OPENBLAS_THREAD_TIMEOUT"] = (
                "not set: NumPy's threads spin after each product, on cores that attention needs; with 4 they sleep"
            )
    return settings


def _processor() -> dict[str, str]:
    facts = _cpuinfo()
    name = facts.get("model name") or platform.processor() or "unknown"
    flags = set((facts.get("flags") or facts.get("features") or "").split())
    processor = {
        "name": name,
        "architecture": f"{platform.machine()}, {sys.byteorder}-endian",
        "instructions": " ".join(flag for flag in FLAGS if flag in flags) or "unknown",
        "system": f"{platform.system()} {platform.release()}",
    }
    if "amx_bf16" in flags:
        reason = permission.refused()
        processor["AMX"] = "allowed" if reason is None else f"refused by the system: {reason}"
    return processor


def _cpuinfo() -> dict[str, str]:
    """Return Linux's description of the first processor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in lines}


def roofline(rounds: int = 9) -> dict[str, str]:
    """Measure what one core can do at best, and return the name of each limit with its rate.

    Rates are per second of processor time, the median of rounds in turns. The engine "cpu" has to be available.
    """
    from regard.engines.cpu import limits

    dtypes = "float32", "bfloat16", "float64"
    measured = [*map(limits.peak, dtypes), limits.product("float32"), limits.bandwidth()]
    for limit in measured:
        limit.call()  # compiles
    seconds: list[list[float]] = [[] for _ in measured]
    for _ in range(rounds):
        for limit, times in zip(measured, seconds, strict=True):
            begin = time.thread_time()
            limit.call()
            times.append(time.thread_time() - begin)
    medians = map(statistics.median, seconds)
    return {x.name: f"{x.rate(t):.1f} {x.measured_in}" for x, t in zip(measured, medians, strict=True)}
