"""Digests of compiled kernels, to prove that a change leaves them as they are.

    python tests/kernel_digests.py before.json                    at the commit before, and then
    python tests/kernel_digests.py after.json --against before.json

The table is cases × dtypes × targets × calls. A kernel's IR determines its machine code; where the IR differs, the text
and the constants of both objects are compared. With `--against`, fields of a call and of a query block keep the offsets
that they had in that file, so that their order may change and nothing else.
"""

import argparse
import base64
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import binding as llvm

import regard
from cases import CASES, Case
from regard.core.problem import Differential, Outputs, Problem
from regard.engines import cpu
from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.language import kernel as language
from regard.engines.cpu.schedule import second_work
from regard.engines.cpu.target import cache, instructions
from regard.engines.cpu.target.instructions import OWN, Target, webassembly
from regard.ops.normalization import problem_from

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
ABSENT = {("baseline", "float16"), ("wasm", "float16"), ("wasm", "bfloat16")}  # dtypes that a target has no kernels for
ALL_DTYPES = ("plain", "everything", "grouped heads")
NAMES = (
    *ALL_DTYPES, "larger than a tile", "positions first", "two queries, token-major", "causal over tiles",
    "window over tiles", "boolean mask", "mask and rule", "NaN behind causal", "softcap", "score with a table",
    "score rule", "bias", "broadcast bias", "bias of one row", "bias over tiles", "sink", "dropout over tiles",
    "latent heads", "T5 buckets", "one feature",
)  # fmt: skip


def machines() -> list[Target]:
    """Every target, and the AVX-512 ones as on processors with a micro-tile or prefetches of their own."""
    known = instructions.targets()
    special = [
        replace(known[name], name=f"{name} {cpu}", **OWN[cpu])
        for name, cpu in (("avx512bf16", "znver4"), ("avx512bf16", "znver5"), ("avx512", "znver4"))
    ]
    return [*known.values(), *special, webassembly()]


def calls(p: Problem, target: Target) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls of one problem, by name."""
    rng = np.random.default_rng(1)

    def like(x: Any) -> Any:
        return None if x is None else rng.standard_normal(x.shape).astype(x.dtype)

    def rows() -> Any:
        return np.ones(p.shape(p.n_q), p.compute)

    every = tuple(regard.core.statistics.statistic(x) for x in ("entropy", "max", "argmax"))
    yield "forward", lambda: cpu.forward(p)
    yield "decode", lambda: cpu.forward(p, range(1))
    yield "observed", lambda: cpu.forward(replace(p, observe=every))
    if target.wasm:
        return
    pooled = regard.core.statistics.pooled
    names = tuple(regard.core.statistics.statistic(x) for x in ("visible", "received", "profile"))
    maps = pooled(2, 3), pooled(2, 3, "max")
    yield "second pass", lambda: second_work.second_pass(p, target, rows(), (*names, *maps))
    yield "top", lambda: cpu.forward(replace(p, observe=(regard.top(5),)))
    t = Differential(*map(like, (p.query, p.key, p.value, p.bias, p.sink)), {x: like(x) for x in p.rules.tables})
    outputs = Outputs(p.new_output(), rows(), rows())
    outputs.out[...] = 1
    ct, d_ct = (Outputs(like(outputs.out), rows(), rows()) for _ in range(2))
    yield "tangent", lambda: cpu.jvp(p, t)
    yield "tangent of keys", lambda: cpu.jvp(p, Differential(key=t.key))
    yield "tangent of values, given outputs", lambda: cpu.jvp(p, Differential(value=t.value), outputs)
    yield "gradients", lambda: cpu.backward(p, outputs, Outputs(ct.out, None, None))
    yield "all gradients", lambda: cpu.backward(p, outputs, ct)
    yield "tangent of gradients", lambda: cpu.backward_jvp(p, outputs, ct, t, outputs, d_ct)


class Unloaded:
    """A kernel that does nothing."""

    address = 0

    def __call__(self, fields: int) -> None: ...


class Recorder:
    """The kernels that calls ask for."""

    def __init__(self, before: dict[str, Any]):
        self.before, self.earlier = before, {}
        self.found: dict[str, dict[str, Any]] = {}
        self.seen: set[tuple[str, str]] = set()
        self.label, self.number, self.compiled = "", 0, 0
        self.fields: Sequence[str] = ()
        self.block_fields: Sequence[str] = ()
        self.others: list[str] = []

    def kernel(self, key: str, name: str, target: Target, source: Callable[[], str]) -> cache.Compiled:
        """Stand in for `cache.kernel`: note a kernel that is new."""
        if (target.name, key) not in self.seen:
            self.seen.add((target.name, key))
            self.number += 1
            label = f"{self.label} / {name} {self.number}"
            self.earlier = self.before.get(label, {})
            self.fields = self.block_fields = ()
            text = source()
            packed = base64.b64encode(zlib.compress(text.encode())).decode()
            self.found[label] = {
                "text": packed, "fields": list(self.fields), "block_fields": list(self.block_fields),
            }  # fmt: skip
            if self.before and packed != self.earlier.get("text"):
                self.compiled += 1
                if not self.earlier or contents(text, target) != contents(unpacked(self.earlier["text"]), target):
                    self.others.append(label)
        return cache.Compiled(name, Unloaded(), None, False)

    def watch(self) -> None:
        """Note the fields of kernels, and give them the offsets that they had before."""
        begin, begin_lanes = language.Kernel.__init__, Lanes.__init__

        def started(k: Any, name: str, target: Target, fields: Sequence[str]) -> None:
            self.fields = fields
            begin(k, name, target, self.earlier.get("fields") or fields)

        def started_lanes(x: Any, k: Any, spec: Any) -> None:
            self.block_fields = type(spec).block_fields.fget(spec)
            if self.earlier.get("block_fields"):
                spec = frozen(spec, tuple(self.earlier["block_fields"]))
            begin_lanes(x, k, spec)

        language.Kernel.__init__ = started  # type: ignore[method-assign]
        Lanes.__init__ = started_lanes  # type: ignore[method-assign]


def frozen(spec: Any, names: tuple[str, ...]) -> Any:
    """A spec whose query blocks have these fields."""
    kind = type(spec)
    made = object.__new__(type(kind.__name__, (kind,), {"block_fields": property(lambda self: names)}))
    made.__dict__.update(spec.__dict__)
    return made


def unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()


def contents(text: str, target: Target) -> list[tuple[str, bytes]]:
    """The sections of an object that hold code and constants."""
    sections = llvm.ObjectFileRef.from_data(cache.compile_object(text, target, "digest")).sections()
    named = [(str(x.name()), x.data()) for x in sections if x.is_text() or "rodata" in str(x.name())]
    assert any(data for _, data in named)
    return named


def record(recorder: Recorder, only: str, step: int) -> None:
    for target in machines():
        if only and only not in target.name:
            continue
        instructions._chosen = lambda name, target=target: target
        for n, case in list(enumerate(c for c in CASES if c.name in NAMES))[::step]:
            for m, dtype in enumerate(DTYPES):
                if case.name not in ALL_DTYPES and m != n % len(DTYPES):
                    continue
                if (target.name, np.dtype(dtype).name) in ABSENT:
                    continue
                one(recorder, target, case, dtype)
        print(target.name, len(recorder.found), file=sys.stderr, flush=True)


def one(recorder: Recorder, target: Target, case: Case, dtype: Any) -> None:
    q, k, v, options = case.inputs(dtype)
    p = problem_from(q, k, v, **options)
    for name, call in calls(p, target):
        recorder.label, recorder.number = f"{target.name} / {case.name} {np.dtype(dtype).name} / {name}", 0
        with np.errstate(all="ignore"):
            call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--against")
    parser.add_argument("--only", default="", help="a part of the names of targets")
    parser.add_argument("--cases", help="every n-th case", type=int, default=1)
    given = parser.parse_args()
    before: dict[str, Any] = {}
    if given.against:
        with open(given.against, encoding="utf-8") as file:
            before = {name: x for name, x in json.load(file).items() if given.only in name.split(" / ")[0]}
    regard.set_num_threads(1)
    recorder = Recorder(before)
    recorder.watch()
    cache.kernel = recorder.kernel
    record(recorder, given.only, given.cases)
    with open(given.file, "w", encoding="utf-8") as file:
        json.dump(recorder.found, file, indent=0)
    print(len(recorder.found), "kernels")
    if before:
        missing = [name for name in before if name not in recorder.found] if given.cases == 1 else []
        others = f"{len(recorder.others)} differ or are new, {len(missing)} are missing"
        print(f"{recorder.compiled} were compared as objects, {others}")
        print("\n".join([*recorder.others[:10], *missing[:10]]))
        sys.exit(bool(recorder.others or missing))


if __name__ == "__main__":
    main()
