"""The cases of the table, on tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

import regard
from cases import CASES, Case
from regard.rules import as_score
from regard.rules.expression import order, rebuild

ARRAYS = ("bias", "sink", "metric", "mask", "offset")
FLOATS = ("bias", "sink", "metric")
SMALL = [case for case in CASES if max(case.n_q, case.n_k) < 30 and case.poison is None]


def tensor(x: Any) -> Any:
    """Arrays as tensors, sharing their memory; all else as it is."""
    if not isinstance(x, np.ndarray):
        return x
    return (
        torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
    )


def array(x: torch.Tensor) -> Any:
    """The values of a tensor."""
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def smaller(case: Case) -> Case:
    return replace(case, n_q=min(case.n_q, 5), n_k=min(case.n_k, 6), d=min(case.d, 3), d_v=min(case.d_v, 2))


def call(
    case: Case, dtype: Any = np.float64, **more: Any
) -> tuple[Callable[..., Any], list[torch.Tensor], list[str], dict[str, Any]]:
    """regard.attention as a function of all tensors of a case that may have a gradient; those; their names; options.

    Float tables that a score reads are tensors too.
    """
    q, k, v, options = case.inputs(dtype)
    given = {name: tensor(x) for name, x in options.items() if name in ARRAYS}
    floats = {"query": tensor(q), "key": tensor(k), "value": tensor(v)}
    floats |= {name: given.pop(name) for name in FLOATS if name in given}
    score = None if "score" not in options else as_score(options["score"])
    tables = {}
    if score is not None:
        read = (x.payload for x in order([score.node]) if x.op == "gather" and x.kind == "float")
        tables = {f"table {n}": x for n, x in enumerate(dict.fromkeys(read))}
        floats |= {name: torch.tensor(x.array) for name, x in tables.items()}
    rest = {name: x for name, x in options.items() if name not in (*ARRAYS, "score")} | given | more

    def attention(*tensors: torch.Tensor) -> Any:
        named = dict(zip(floats, tensors, strict=True))
        made = dict(rest)
        if score is not None:
            new = {id(x): regard.table(named[name]) for name, x in tables.items()}
            made["score"] = replace(score, node=rebuild(score.node, new))
        made |= {name: x for name, x in named.items() if name in FLOATS}
        return regard.attention(named["query"], named["key"], named["value"], **made)

    return attention, list(floats.values()), list(floats), options


def flat(result: Any) -> tuple[torch.Tensor, ...]:
    """out, lse and entropy, of what `call(..., observe=["lse", "entropy"])` gives."""
    out, seen = result
    return out, seen.lse, seen.entropy
