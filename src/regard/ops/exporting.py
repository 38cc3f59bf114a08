"""Attention for web pages: a module of WebAssembly and its loader."""

from __future__ import annotations  # so that `help` shows the names of types

import os
from collections.abc import Sequence
from pathlib import Path

from regard.arguments.packages import require
from regard.core import checks
from regard.core.statistics import (
    Argmax,
    Entropy,
    Largest,
    Lse,
    Received,
    Statistic,
    StatisticName,
    TopWeights,
    Visible,
    WeightByDistance,
)
from regard.core.types import MaskLike, ScoreLike
from regard.ops.normalization import causally
from regard.rules import as_mask, type_name
from regard.rules import window as window_rule
from regard.rules.outside import lookups

STATISTICS = (Lse, Entropy, Largest, Argmax, TopWeights, Visible, Received, WeightByDistance)
MOST = 32  # maximum k of regard.top(k)
KNOWN = (
    f"{', '.join(repr(x.name) for x in STATISTICS if x is not TopWeights)} and regard.top(k) with k of at most {MOST}"
)


def export_wasm(
    path: str | os.PathLike[str],
    *,
    mask: MaskLike = None,
    causal: bool = False,
    window: int | None = None,
    score: ScoreLike = None,
    bias: bool = False,
    sink: bool = False,
    dropout: bool = False,
    array_mask: bool = False,
    statistics: Sequence[StatisticName | Statistic] = (),
    maps: bool = False,
    relaxed: bool = False,
) -> Path:
    """Write attention with these rules as WebAssembly, for a web page or Node.js.

    The files NAME.wasm, NAME.js and NAME.d.ts compute what `attention` does for float32 arrays of
    any size, from a prompt to a decode step:

        import { load } from "./NAME.js";
        const attention = await load("NAME.wasm");
        const { out, lse } = attention({ q, k, v, heads: 8, d: 64 });  // Float32Arrays

    Without `relaxed` the bits are those of the engine "cpu" on a processor without FMA
    (`REGARD_CPU=baseline`), except for numbers below 2⁻¹²⁶, which that engine takes for 0.
    Rules are compiled, with their tables. All else is given to each call. There are no derivatives.

    Args:
        path: NAME, or NAME.wasm. Existing files are replaced.
        mask, causal, score: as in `attention`; a mask that is a rule, not an array.
        window: the mask `regard.window(window)` in addition.
        bias, sink, dropout: calls have a bias, a sink, or a share of dropout and a seed, with the
            meaning that `attention` gives them.
        array_mask: calls have a mask as an array, which must allow a pair, as the rule must.
        statistics: of "entropy", "max", "argmax", "visible", "received", "profile" and
            `regard.top(k)`, k ≤ 32, what the result holds in addition to out and lse.
        maps: add `attention.maps`, `attention.weights` and `attention.scores`: of one head from q
            and k, by bins of queries and keys or one by one.
        relaxed: multiply and add in one instruction where the reader's processor has one. Faster
            on some; results then differ between processors in their last bits.

    Returns:
        The path of NAME.wasm.

    Raises:
        FileNotFoundError: if the folder of `path` does not exist.
        TypeError: naming the argument, for arguments of other types.
        ValueError: for a rule that holds an array of all pairs, or a table with bounds="raise";
            for functions of the C library in a rule, such as np.sin.

    >>> import tempfile
    >>> import regard
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = regard.export_wasm(f"{folder}/recent", causal=True, window=256)
    ...     sorted(x.name for x in path.parent.iterdir())
    ['recent.d.ts', 'recent.js', 'recent.wasm']
    """
    require("export_wasm", "llvmlite")
    from regard.engines.cpu.wasm.module import loader, module

    target = _module_path(path)
    rule = None if mask is None else as_mask(mask)
    if window is not None:
        recent = window_rule(window)
        rule = recent if rule is None else rule & recent
    if checks.boolean("causal", causal):
        rule = causally(rule)
    scores = checks.score(score)
    for name, x in (("mask", rule), ("score", scores)):
        if x is not None and x.dense:
            hint = "; export with array_mask=True to give arrays to calls" if name == "mask" else ""
            raise ValueError(f"{name} must be a rule of the indices, not an array{hint}")
        if x is not None and (x.foreign or lookups(x.node)):
            raise ValueError(f'{name} must read tables of NumPy arrays with bounds="clamp"')
    observe = checks.observe(statistics, "statistics")
    for s in observe:
        if not isinstance(s, STATISTICS) or (isinstance(s, TopWeights) and s.of > MOST):
            raise ValueError(f"statistics may be {KNOWN}, got {s!r}")
    flags = {"bias": bias, "sink": sink, "dropout": dropout, "array_mask": array_mask}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {type_name(flag)}: what it names is given to each call")
    options = {"relaxed": checks.boolean("relaxed", relaxed), "maps": checks.boolean("maps", maps)}
    code = module(rule, scores, observe, **options, takes=[name for name, flag in flags.items() if flag])
    target.write_bytes(code)
    for suffix, text in loader(target.stem).items():
        target.with_suffix(suffix).write_text(text, "utf-8")
    return target


def _module_path(path: object) -> Path:
    """Check the path of a module, and add its suffix."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or os.PathLike, got {type_name(path)}")
    target = Path(path)
    if not target.name:
        raise ValueError(f"path must name a file, got {str(path)!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path must be in a folder that exists, got {str(path)!r}")
    return target if target.suffix == ".wasm" else target.with_name(f"{target.name}.wasm")
