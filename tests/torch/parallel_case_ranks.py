"""The table of cases over processes, and processes that die: run by parallel_model_ranks.py."""

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import on_tensors
import regard
import regard.torch
from cases import CASES, Case

SECONDS = 6  # of waiting for other ranks


def results(q: Any, k: Any, v: Any, dout: Any, options: Any, layout: str, cp: Any = None) -> dict[str, torch.Tensor]:
    """Return out, lse and gradients; of one process, or whole of all."""
    dim = -3 if layout == "bnhd" else -2
    operands = [(x if cp is None else cp.shard(x, dim)).detach().requires_grad_() for x in (q, k, v)]
    out, seen = regard.attention(*operands, observe=["lse"], **options)
    out.backward(dout if cp is None else cp.shard(dout, dim))
    gradients = {f"d{name}": x.grad for name, x in zip("qkv", operands, strict=True)}
    if cp is None:
        return {"out": out.detach(), "lse": seen.lse.detach(), **gradients}
    whole = {name: cp.unshard(x.detach(), dim) for name, x in {"out": out, **gradients}.items()}
    return whole | {"lse": cp.unshard(seen.lse.detach(), -1)}


def tensors(case: Case) -> tuple[Any, ...]:
    """Return query, key, value, a cotangent, options and the layout of a case."""
    *operands, options = case.inputs(np.float32)
    q, k, v = map(on_tensors.tensor, operands)
    lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
    dout = torch.randn(*lead, *q.shape[-3:-1], v.shape[-1], generator=torch.Generator().manual_seed(0))
    given = {name: on_tensors.tensor(x) for name, x in options.items()}
    return q, k, v, dout, given, options.get("layout", "bhnd")


def compared(cp: Any, case: Case, expected: dict[str, torch.Tensor]) -> str:
    """Return "same" if a case has the bits of one process, else what happened."""
    try:
        got = results(*tensors(case), cp)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(name for name, x in expected.items() if not same(x, got[name])) or "same"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan())


def cases() -> dict[str, str]:
    """Return what the cases of the table do that have as many queries as keys, in contiguous shards."""
    every = [case for case in CASES if case.n_q == case.n_k]
    expected = [results(*tensors(case)) for case in every]
    with regard.torch.context_parallel(dist.group.WORLD, deal="contiguous") as cp:
        return {f"case {case}": compared(cp, case, x) for case, x in zip(every, expected, strict=True)}


def deaths() -> dict[str, str]:
    """Return what a rank sees of another that raises, falls asleep, or dies."""
    group, rank, said = dist.new_group(timeout=timedelta(seconds=SECONDS)), dist.get_rank(), {}
    x = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0))
    for name, late in (("raises", lambda: None), ("dies", lambda: os._exit(0))):
        with regard.torch.context_parallel(group, causal=True) as cp:
            rows = cp.shard(x)
            regard.attention(rows, rows, rows, causal=True)
            start = time.monotonic()
            if rank == 0:
                try:
                    regard.attention(rows, rows, rows, causal=True)
                    said[name] = "nothing"
                except Exception as error:
                    took = time.monotonic() - start
                    said[name] = type(error).__name__ if took < SECONDS + 20 else f"{took} seconds"
            else:
                time.sleep(SECONDS + 2 if name == "raises" else 0)  # it has left the loop, and is busy elsewhere
                late()
        if name == "raises":
            group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    return said
