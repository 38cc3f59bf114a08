"""The module of a page: kernels of some rules, and what their caller has to know.

The kernels are those of the engine on the target "wasm": `prefill`, `decode` for a few rows, `maps` and `sums` of the
second pass. Two more are for pages: `visible`, which lists the tiles of a mask, and `scores`, beside `maps`. The
description is JSON in a custom section "regard"; the tables of the rules are in another, "regard.tables". So one loader
serves every module.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding as llvm

from regard.core.parts import scores_alone
from regard.core.problem import Problem
from regard.core.statistics import ENTROPY, Argmax, Statistic, TopWeights
from regard.engines.cpu import WIDEST, supports
from regard.engines.cpu.kernels.visible import VisibleTilesKernel, fields_of
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.schedule import second_work
from regard.engines.cpu.schedule.arguments import pack_fields, programs, table_array
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.stages import CHUNK_BLOCKS
from regard.engines.cpu.schedule.work import BEST, source
from regard.engines.cpu.spec.operands import MAPS
from regard.engines.cpu.spec.scratch import scratch_size
from regard.engines.cpu.spec.specs import KernelSpec, SecondPassSpec
from regard.engines.cpu.spec.tiles import (
    KEYS,
    SPLIT_BYTES,
    SPLIT_TILES,
    TILE_BITS,
    WIDE_WORK_GROUP,
    WORK_GROUP,
    tile_word,
)
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target, webassembly
from regard.engines.cpu.wasm import scores
from regard.engines.cpu.wasm.linking import custom_section, linked
from regard.rules import Mask, Program, Score, as_mask, reads
from regard.rules.outside import ends, read_alone
from regard.version import __version__

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

VERSION = 5  # of the description
POSITIONS = 2**20  # queries and keys of a call at most,
INDICES = 2**16  # batch elements and heads: integers of rules then have 32 bits where bounds say so
DECODE_ROWS = 1, 4  # rows for which there are kernels with a key in every lane
SECOND_TILE = 4, 3  # the micro-tile of the second pass: that of the target "baseline"
SUMS = "visible", "received", "profile"  # statistics of the second pass
OPERANDS = "bias", "sink", "dropout", "array_mask"  # what calls may give besides q, k and v, if a module is made for it


def module(
    mask: Mask | None,
    score: Score | None,
    observe: Sequence[Statistic] = (),
    relaxed: bool = False,
    *,
    forward: bool = True,
    maps: bool = False,
    takes: Collection[str] = (),
) -> bytes:
    """Return the module that computes attention under these rules.

    forward, maps: whether it has attention, and maps of its weights. takes: those of OPERANDS that calls give.
    Raises ValueError for rules that kernels do not take, or that need the C library.
    """
    target, p = webassembly(relaxed), _longest_call(mask, score, takes)
    reason = supports(p)
    if reason is not None:
        raise ValueError(f"a module takes {reason}")
    rules = programs(p)
    entropy = ENTROPY in observe
    wanted = max((s.of or 1 for s in observe if isinstance(s, Argmax | TopWeights)), default=0)
    best = min(n for n in (0, *BEST) if n >= wanted)
    specs: dict[str, KernelSpec] = {}
    if forward:
        specs["prefill"] = spec_of(p, target, POSITIONS, entropy, best)
    for rows in DECODE_ROWS if forward and not best else ():
        specs[f"decode{rows}"] = spec_of(p, target, rows, entropy)
    passed = tuple(sorted({s.name for s in observe} & set(SUMS)))
    wanted_passes = ({"maps": MAPS} if maps else {}) | ({"sums": passed} if passed else {})
    passes = {name: _second_spec(p, target, statistics) for name, statistics in wanted_passes.items()}
    lists: dict[str, KernelSpec] = {}
    if p.mask is not None and forward:
        lists["visible"] = specs["prefill"]
    if p.mask is not None and passes:
        lists["visible_second"] = next(iter(passes.values()))
    scored = {"scores": passes["maps"]} if maps else {}

    def texts() -> list[str]:
        return [
            *(source(spec, target, name) for name, spec in specs.items()),
            *(second_work.source(spec, replace(target, narrow=SECOND_TILE), name) for name, spec in passes.items()),
            *(_visible(spec, target, name) for name, spec in lists.items()),
            *(scores.source(spec, target, name) for name, spec in scored.items()),
        ]

    kernels = [*specs.items(), *passes.items(), *lists.items(), *scored.items()]
    names = [name for name, _ in kernels]
    key = repr([(name, spec.key) for name, spec in kernels])
    code = linked(cache.stored_object(key, "attention", target, lambda: _together(texts())), names)
    present = [rule for rule in (mask, score) if rule is not None]
    tables = b"".join(x.tobytes() for _, x in _tables(rules))
    description = {
        "version": VERSION,
        "regard": __version__,
        "target": target.name,
        "positions": POSITIONS,
        "indices": INDICES,
        "features": WIDEST,
        "tile": {
            "keys": KEYS, "shift": TILE_BITS, "full": int(tile_word(np.zeros((), np.int64))),
            "splitTiles": SPLIT_TILES, "splitBytes": SPLIT_BYTES,
        },
        "workGroup": WIDE_WORK_GROUP,
        "takes": [name for name in OPERANDS if name in takes],
        "kernels": [_kernel(name, spec, lists) for name, spec in specs.items()],
        "maps": None, "sums": None,
        **{
            name: _kernel(name, spec, lists) | {
                "workGroup": WORK_GROUP, "band": CHUNK_BLOCKS if p.rules.hiding else 0,
                "parts": second_work.PARTIAL_SUMS, "statistics": spec.statistics,
            }
            for name, spec in passes.items()
        },
        "scores": scores.fields_of(scored["scores"]) if maps else None,
        "maskReads": sorted(reads(mask.node)) if mask is not None else [],
        "values": _values(rules),
        "tables": _places(rules),
        "requires": [[x.rule, x.argument, x.axis, x.length] for rule in present for x in rule.requires],
        "ends": [[x.rule, x.argument, x.axis, x.length] for rule in present for x in ends(rule)],
        "readByQuery": [
            [rule.text, axis, repr(table), table.shape[axis]]
            for rule in present
            for table, axis, index in read_alone(rule.node)
            if index == "i"
        ],
        "statistics": [s.name for s in observe],
        "best": best,
        "top": wanted,
    }  # fmt: skip
    return code + custom_section("regard", json.dumps(description).encode()) + custom_section("regard.tables", tables)


def loader(name: str) -> dict[str, str]:
    """Return the loader of a module and its types, by the suffixes of their files."""
    here = Path(__file__).parent
    return {suffix: (here / f"loader{suffix}").read_text("utf-8").replace("NAME", name) for suffix in (".js", ".d.ts")}


def _longest_call(mask: Mask | None, score: Score | None, takes: Collection[str]) -> Problem:
    """Return the longest call of one head with these rules.

    The arrays take no memory. Offsets are the least and the greatest, so that bounds of its rules hold for all calls.
    Operands that calls give, `takes`, are there; their contents are not compiled.
    """
    x = np.broadcast_to(np.zeros((), np.float32), (2, 1, POSITIONS, 1))
    if "array_mask" in takes:
        flags = np.ones((1, 1), bool)
        mask = as_mask(flags) if mask is None else mask & flags
    return Problem(
        query=x, key=x, value=x, lead=(2,), mask=mask, score=score, scale=1.0,
        bias=np.zeros((1, 1), np.float32) if "bias" in takes else None,
        sink=np.zeros(1, np.float32) if "sink" in takes else None,
        dropout=0.5 if "dropout" in takes else 0.0, seed=0,
        offset=np.array([-POSITIONS, POSITIONS]), origin=(0, 0, 0),
    )  # fmt: skip


def _second_spec(p: Problem, target: Target, statistics: tuple[str, ...]) -> SecondPassSpec:
    """Return the spec of a second pass with the query blocks of "baseline".

    Sums over queries depend on them.
    """
    spec = spec_of(scores_alone(p), replace(target, narrow=SECOND_TILE), POSITIONS, False, decode=False)
    own = {x.name: getattr(spec, x.name) for x in fields(KernelSpec)}
    return SecondPassSpec(**own | {"pipelined": False}, statistics=statistics)


def _visible(spec: KernelSpec, target: Target, name: str) -> str:
    """Return the IR of the kernel that lists tiles."""

    def write(k: "Kernel") -> None:
        VisibleTilesKernel(k, spec).run()

    return written(name, fields_of(spec), target, write)


def _together(texts: Sequence[str]) -> str:
    """Return the IR of several kernels as one module."""
    first, *others = (llvm.parse_assembly(text) for text in texts)
    for other in others:
        first.link_in(other)
    return str(first)


def _kernel(name: str, spec: KernelSpec, lists: dict[str, KernelSpec]) -> dict[str, Any]:
    """Describe a kernel, with its scratch memory in bytes.

    The sizes for a work group and for each query block are coefficients of (1, d, d_v), rounded up to `multiple`
    features. visible: the kernel that lists its tiles, and that one's fields; null without a mask.
    """
    multiple, visible = 16, "visible_second" if name in ("maps", "sums") else "visible"

    def size(blocks: int, d: int, d_v: int) -> int:
        return scratch_size(spec, blocks, d, d_v) * spec.real.size

    def coefficients(blocks: int) -> list[int]:
        whole = size(blocks, 0, 0)
        return [whole, *((size(blocks, *at) - whole) // multiple for at in ((multiple, 0), (0, multiple)))]

    once, one = coefficients(0), coefficients(1)
    return {
        "name": name,
        "lanes": spec.lanes,
        "rows": spec.decode_rows,
        "fields": spec.fields,
        "blockFields": spec.block_fields,
        "visible": None if visible not in lists else {"name": visible, "fields": fields_of(lists[visible])},
        "scratch": {"multiple": multiple, "group": once, "block": [x - y for x, y in zip(one, once, strict=True)]},
    }


def _values(rules: Sequence[tuple[str, Program]]) -> dict[str, str]:
    """Return the rules' numbers, and the lengths of their tables' axes, by field."""
    values: dict[str, int | float] = {}
    for prefix, program in rules:
        values |= {f"{prefix}_number{n}": x for n, x in enumerate(program.numbers)}
        for n, table in enumerate(program.tables):
            values |= {f"{prefix}_table{n}_size{axis}": length for axis, length in enumerate(table.shape)}
    return {name: str(x) for name, x in zip(values, pack_fields(list(values), values), strict=True)}


def _tables(rules: Sequence[tuple[str, Program]]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return the tables of the rules by field, padded to multiples of 8 bytes."""
    tables = []
    for prefix, program in rules:
        for n, table in enumerate(program.tables):
            x = table_array(table, np.float32).reshape(-1)
            tables.append((f"{prefix}_table{n}", np.pad(x, (0, x.size * x.itemsize // 4 % 2))))
    return tables


def _places(rules: Sequence[tuple[str, Program]]) -> dict[str, int]:
    """Return each table's first byte in their section."""
    places, end = {}, 0
    for name, x in _tables(rules):
        places[name] = end
        end += x.nbytes
    return places
