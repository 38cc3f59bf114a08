"""Launches of forward: its key splits, outputs and statistics."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from regard.core.problem import Outputs, Problem
from regard.engines.triton.kernels import forward as kernel
from regard.engines.triton.launch.arguments import Work, empty
from regard.engines.triton.launch.launching import INTERPRETED, Launch
from regard.engines.triton.launch.tuning import TileConfig, chosen

Array = np.ndarray[Any, np.dtype[Any]]
PROGRAMS = 264  # enough to fill a large device
SPLITS = 32
FEW = 64  # queries; longer calls do not split keys
FIELDS = ("lse", "entropy", "max", "argmax", "visible")


def splits(p: Problem, M: int, N: int, chunk: int) -> int:
    """Return the number of key splits, more than 1 if blocks do not fill a device."""
    blocks = -(-p.n_q // M) * p.batch * p.heads
    parts = -(-p.n_k // (N * chunk)) if chunk else -(-p.n_k // N)
    wanted = min(SPLITS, PROGRAMS // max(blocks, 1), parts)
    return 1 if wanted < 2 or p.n_q > FEW else 1 << (wanted.bit_length() - 1)


def forward(
    p: Problem, names: frozenset[str] = frozenset(), into: Outputs | None = None
) -> tuple[Outputs, dict[str, Array]]:
    """Return the outputs, and the arrays of `names`.

    names: among "entropy", "max", "argmax", "visible". into: memory for `Outputs.low`.
    """
    found = {"lse": empty(p, p.shape(p.n_q), p.compute)}
    for name in names:
        found[name] = empty(p, p.shape(p.n_q), np.int64 if name in ("argmax", "visible") else p.compute)
    if names & {"max", "argmax"}:
        for name, dtype in (("max", p.compute), ("argmax", np.int64)):
            found.setdefault(name, empty(p, p.shape(p.n_q), dtype))
    outputs = Outputs(p.new_output(), found["lse"], found.get("entropy"), None if into is None else into.low)
    work = Work(p)
    chosen("forward", work, partial(launch, work, outputs, found)).run()
    return outputs, found


def launch(work: Work, outputs: Outputs, found: dict[str, Array], config: TileConfig) -> Launch:
    """Return the launch of a call, followed by a merge if keys are split."""
    p, form = work.p, work.form(config)
    if p.n_q <= FEW and not INTERPRETED:
        form = form._replace(T=min(form.T, 16))
    count = splits(p, form.M, form.N, form.T if form.BOUNDS else 0)
    blocks = -(-p.n_q // form.M) * p.batch * p.heads
    options = kernel.ForwardOptions("entropy" in found, "argmax" in found, "visible" in found, count)
    parts = columns = None
    if count > 1:
        parts = work.per_head(empty(p, (blocks * count * form.M * (form.V + 3),), p.compute), 0)
        columns = work.per_head(empty(p, (blocks * count * form.M * 2,), np.int64), 0)
    results = kernel.ForwardResults(
        *(
            work.matrix(outputs.out),
            work.matrix(outputs.low),
            *(work.rows(found.get(name)) for name in FIELDS),
            parts,
            columns,
        )
    )
    merge = work.launch(kernel.merge, (blocks,), results, config, F=form, W=options)
    one = work.launch(kernel.forward, (blocks, count), results, config, F=form, W=options)
    return replace(one, then=(merge,) if count > 1 else ())
