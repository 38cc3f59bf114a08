"""Every instruction set that this machine runs, in one process, on cases of every kind; NEON is compiled only."""

import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from llvmlite import binding as llvm

import regard
from cases import CASES, Case
from regard.core.layout import Layout
from regard.core.problem import Outputs
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.work import source
from regard.engines.cpu.target import cache
from regard.engines.cpu.target import instructions as target
from regard.engines.cpu.target.instructions import targets
from regard.ops.normalization import problem_from
from support import assert_outputs

HERE = [t.name for t in targets().values() if t.runs]
NAMES = ("plain", "larger than a tile", "grouped heads", "positions first", "causal over tiles", "NaN behind the mask",
         "curved score", "everything")  # fmt: skip
SOME = [case for case in CASES if case.name in NAMES]


def by_turns(cases: Sequence[Case], *dtypes: Any) -> list[tuple[Case, Any]]:
    """Each case in one of the dtypes, that of everything in each, for every pair is a kernel; with REGARD_FUZZ all."""
    every = bool(os.environ.get("REGARD_FUZZ"))
    number = len(dtypes)
    return [
        (case, dtype)
        for n, case in enumerate(cases)
        for m, dtype in enumerate(dtypes)
        if every or case.name == "everything" or n % number == m
    ]


@pytest.mark.parametrize(
    ("case", "dtype"), by_turns(SOME, np.float32, np.float64, np.float16, ml_dtypes.bfloat16), ids=str
)
def test_forward(forced: str, case: Case, dtype: Any) -> None:
    q, k, v, options = case.inputs(dtype)
    if forced == "baseline" and dtype is np.float16:
        with pytest.raises(ValueError, match="does not convert float16"):
            regard.attention(q, k, v, **options, engine="cpu")
        return
    frame = Layout.of(q, options.get("layout", "bhnd"))
    out, seen = regard.attention(q, k, v, **options, observe=["lse", "entropy"], engine="cpu")
    assert_outputs(problem_from(q, k, v, **options), Outputs(frame.to_bhnd(out), seen.lse, seen.entropy))


@pytest.mark.parametrize(
    ("case", "dtype"), by_turns(SOME, np.float32, np.float64, np.float16, ml_dtypes.bfloat16), ids=str
)
def test_neon_compiles(case: Case, dtype: Any) -> None:
    neon = targets()["neon"]
    q, k, v, options = case.inputs(dtype)
    for rows in (q.shape[-2], 1):
        spec = spec_of(problem_from(q, k, v, **options), neon, rows, entropy=True)
        code = cache.compile_object(source(spec, neon), neon, "neon")
        assert llvm.ObjectFileRef.from_data(code).sections()


def test_unknown_and_foreign_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CPU", "6502")
    with pytest.raises(ValueError, match=r"REGARD_CPU must be one of avx512bf16, .*, neon, got '6502'"):
        target.chosen()
    foreign = next(t.name for t in targets().values() if not t.runs)
    monkeypatch.setenv("REGARD_CPU", foreign)
    with pytest.raises(ValueError, match=f"REGARD_CPU={foreign}: this processor cannot run it"):
        target.chosen()


@pytest.mark.parametrize(
    ("cpu", "fastest"),
    [("znver5", "avx512bf16"), ("cooperlake", "avx512"), ("haswell", "avx2"), ("generic", "baseline")],
)
def test_the_fastest_is_chosen(cpu: str, fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 dot products only where they are fast: on many processors they are slower than two FMAs."""
    native = targets()[fastest]
    if native.triple != target.native_triple():
        pytest.skip("targets of another processor")
    above = targets()["avx512bf16"].needs if cpu == "cooperlake" else native.needs
    monkeypatch.delenv("REGARD_CPU", raising=False)
    monkeypatch.setattr(target, "host_cpu", lambda: cpu)
    monkeypatch.setattr(target, "host_features", lambda: dict.fromkeys(above, True))
    target._chosen.cache_clear()
    try:
        assert target.chosen().name == fastest
    finally:
        target._chosen.cache_clear()
