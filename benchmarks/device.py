"""A device of PyTorch: its clock, limits, memory and description."""

import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import regard
from benchmarks.measure import Call
from regard import doctor
from regard.engines.cpu.limits import Limit
from regard.torch.modes import busy

SIDE = 8192  # of the square matrices multiplied for the peak
BYTES = 2**30  # to copy
PEAKS = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "float32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float64": (torch.float64, "ieee"),
}
CYCLES = 2e9  # maximum in a second


def device(name: str) -> torch.device:
    """Return the device of a name.

    Raises ValueError, in one line, if it cannot be measured here.
    """
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"--device must be cuda or cuda:N, got {name}")
    if not torch.cuda.is_available():
        raise ValueError(f"--device {name}: PyTorch {torch.__version__} finds no CUDA device here")
    found = torch.device(name if ":" in name else f"{name}:{torch.cuda.current_device()}")
    if found.index >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices")
    return found


@contextmanager
def used(device: torch.device) -> Iterator[None]:
    """Make a device current, with exact float32 products; restore both at the end."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), precision("ieee"):
        yield


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Set the precision of float32 products by PyTorch's own switch."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = name
    try:
        yield
    finally:
        matmul.fp32_precision = before


def seconds(device: torch.device, call: Call, repeats: int) -> float:
    """Time `repeats` calls, one after the other."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    queued = time.perf_counter() - start
    busy(int(CYCLES * min(1.5 * queued * repeats + 1e-4, 0.5)))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


# Limits


def peak(dtype: str, device: torch.device) -> Limit:
    """Return the rate of the library's own product of two large matrices."""
    kind, how = PEAKS[dtype]
    a, b = (torch.randn(SIDE, SIDE, device=device).to(kind) for _ in range(2))
    out = torch.empty_like(a)

    def call() -> None:
        with precision(how):
            torch.matmul(a, b, out=out)

    return Limit(f"peak of {dtype}", "GFLOP/s", 2.0 * SIDE**3, call)


def bandwidth(device: torch.device) -> Limit:
    """Return the rate at which memory is copied, with reading and writing counted."""
    source = torch.empty(BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return Limit("memory bandwidth", "GB/s", 2.0 * BYTES, partial(target.copy_, source))


# Memory


def extra(device: torch.device, call: Call) -> float:
    """Return the peak bytes of a call beyond those before it and its result."""
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    return float(max(torch.cuda.max_memory_allocated(device) - before - size(result), 0))


def size(result: Any) -> int:
    if isinstance(result, tuple | list):
        return sum(map(size, result))
    return result.numel() * result.element_size() if isinstance(result, torch.Tensor) else 0


# Description


def machine(device: torch.device) -> dict[str, str]:
    """Describe the device, its driver, and all measured versions.

    Nothing names the machine.
    """
    found = {"device": "the processor, in place of a device"}
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        found = {
            "device": f"{p.name}, {p.multi_processor_count} multiprocessors, {p.total_memory / 2**30:.0f} GiB",
            "capability": f"sm_{p.major}{p.minor}",
            "driver": driver(),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    return found | {
        "python": platform.python_version(),
        "regard": regard.__version__,
        "torch": str(torch.__version__),
        "triton": doctor.installed("triton") or "not installed",
    }


def driver(file: Path = Path("/proc/driver/nvidia/version"), which: Callable[[str], str | None] = shutil.which) -> str:
    """Return the version of NVIDIA's driver."""
    try:
        found = re.search(r"\b(\d{3,}\.\d[\d.]*)", file.read_text())
        if found:
            return found[1]
    except OSError:
        pass
    command = which("nvidia-smi")
    if command is None:
        return "unknown"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else "unknown"
