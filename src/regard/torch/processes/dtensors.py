"""`regard.attention` of DTensors: on the local tensors of each process, placed as they were.

Batch and heads may be sharded or replicated on any dimensions of the mesh, and the sequence on one. Then the processes
of that dimension send each other keys, as inside of `context_parallel`.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from regard.core import checks
from regard.core.options import ARRAYS, RULES
from regard.core.problem import KIND
from regard.core.statistics import ENTROPY, LSE, asked_for
from regard.rules import Rule, Score, as_mask, as_score
from regard.rules.expression import rebuild
from regard.rules.masks import foreign
from regard.torch.processes.context_parallel import ContextParallel
from regard.torch.public.attention import attention
from regard.torch.tensors.tables import TensorTable

NAMES = ("query", "key", "value")
OBSERVED = (LSE, ENTROPY)


@dataclass(frozen=True)
class Placement:
    """The placement of the operands of a call.

    dims: the dimension of operands that each dimension of the mesh shards, or None. sequence, heads: those of positions
    and of heads.
    """

    mesh: Any
    placements: tuple[Any, ...]
    dims: tuple[int | None, ...]
    sequence: int
    heads: int

    @property
    def over(self) -> int | None:
        """The dimension of the mesh on which the sequence is sharded."""
        return self.dims.index(self.sequence) if self.sequence in self.dims else None

    def first(self, x: DTensor, dim: int) -> int:
        """Return the first index of this process along a dimension of `x`."""
        start, n = 0, x.shape[dim]
        for number, sharded in enumerate(self.dims):
            if sharded == dim:
                size, at = -(-n // self.mesh.size(number)), self.mesh.get_local_rank(number)
                start, n = start + min(at * size, n), max(0, min(size, n - at * size))
        return start

    def rows(self) -> tuple[Any, ...]:
        """Return the placements of a statistic, (..., heads, positions)."""
        moved = {self.sequence: max(self.sequence, self.heads), self.heads: min(self.sequence, self.heads)}
        return tuple(Replicate() if dim is None else Shard(moved.get(dim, dim)) for dim in self.dims)


def placement_of(operands: dict[str, Any], layout: str) -> Placement:
    """Check how operands are placed, which has to be alike."""
    query = operands["query"]
    for name, x in operands.items():
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} must be a DTensor as query is, got {type(x).__name__}")
        if x.device_mesh != query.device_mesh or x.ndim != query.ndim:
            raise ValueError(f"{name} must lie on the mesh of query and have its dimensions, got {x.device_mesh}")
    if query.ndim < 3:
        raise ValueError(f"query must have a head axis as a DTensor, got shape {tuple(query.shape)}")
    sequence, heads = (-3, -2) if layout == "bnhd" else (-2, -3)
    split = [dims_of(name, x, sequence % x.ndim) for name, x in operands.items()]
    for (name, x), dims in zip(operands.items(), split, strict=True):
        if dims != split[0]:
            raise ValueError(f"{name} must be placed as query is, {query.placements}, got {x.placements}")
    placement = Placement(query.device_mesh, query.placements, split[0], sequence % query.ndim, heads % query.ndim)
    for name, x in operands.items():
        ranks = prod(placement.mesh.size(n) for n, dim in enumerate(placement.dims) if dim == placement.heads)
        if x.shape[heads] % ranks:
            raise ValueError(f"the heads of {name} must be a multiple of the {ranks} processes, got {x.shape[heads]}")
        if placement.over is not None and x.shape[sequence] != query.shape[sequence]:
            raise ValueError(
                f"{name} must have the positions of query, {query.shape[sequence]}, where they are sharded"
            )
    return placement


def dims_of(name: str, x: DTensor, sequence: int) -> tuple[int | None, ...]:
    """Return the dimension of `x` that each dimension of its mesh shards."""
    dims: list[int | None] = []
    for number, placement in enumerate(x.placements):
        at = f"on dimension {(x.device_mesh.mesh_dim_names or range(x.device_mesh.ndim))[number]} of the mesh"
        if type(placement) not in (Shard, Replicate):
            raise ValueError(f"{name} must be sharded or replicated {at}, got {placement}: redistribute it first")
        dim = placement.dim % x.ndim if isinstance(placement, Shard) else None
        if dim is not None and dim not in (0, *range(x.ndim - 3, x.ndim - 1)):
            raise ValueError(f"{name} must be sharded along its batch, heads or positions {at}, got {placement}")
        if dim == sequence and dim in dims:
            raise ValueError(f"{name} must have its positions sharded on one dimension of the mesh, got {x.placements}")
        dims.append(dim)
    return tuple(dims)


def distributed(
    query: Any, key: Any, value: Any, *, return_weights: bool, observe: Any, engine: str | None, **options: Any
) -> Any:  # fmt: skip
    """Compute `regard.attention` of DTensors."""
    asked = checks.observe(observe)
    if return_weights or any(s not in OBSERVED for s in asked):
        raise ValueError('regard.attention of DTensors observes "lse" and "entropy" alone')
    operands = dict(zip(NAMES, (query, key, value), strict=True))
    where = placement_of(operands, options.get("layout") or "bhnd")
    local_arguments = local_options(where, operands, options)
    local = [x.to_local() for x in operands.values()]
    local_arguments |= {"engine": engine, "observe": observe}
    if where.over is None:
        results = attention(*local, **local_arguments)
    else:
        cp = parallel_of(where.mesh.get_group(where.over), query.shape[where.sequence])
        results = cp.attention(*local, return_weights=False, **local_arguments)
    out, *seen = results if isinstance(results, tuple) else (results,)
    shape = (*query.shape[:-1], value.shape[-1])
    placed_out = placed(out, where, where.placements, shape)
    if not seen:
        return placed_out
    n, heads = query.shape[where.sequence], query.shape[where.heads]
    rows = (*query.shape[:-3], heads, n)
    return placed_out, asked_for(asked, {s: placed(seen[0][s], where, where.rows(), rows) for s in asked}, torch.exp)


def local_options(where: Placement, operands: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a call for the batch and heads of this process: rules see those of the whole."""
    query = operands["query"]
    batch = prod(query.shape[1:-3]) if query.ndim > 3 else 0
    origin = options.get("origin") or (0, 0, 0)
    first = where.first(query, 0) * batch, where.first(query, where.heads)
    arrays = {name: whole(x, where) for name, x in options.items()}
    arrays |= {name: own_heads(name, arrays[name], where, query) for name in ("mask", *ARRAYS) if name in arrays}
    if arrays.get("mask") is not None and not isinstance(arrays["mask"], torch.Tensor):
        arrays["mask"] = as_mask(arrays["mask"])
    if arrays.get("score") is not None:
        arrays["score"] = with_whole_gradients(as_score(arrays["score"]), where)
    if options.get("origin") is None:
        for rule in map(arrays.get, RULES):
            if isinstance(rule, Rule):
                checks.whole(rule, prod(query.shape[:-3]), query.shape[where.heads])
    return arrays | {"origin": (origin[0] + first[0], origin[1] + first[1], origin[2])}


def whole(x: Any, where: Placement) -> Any:
    """Return a tensor that all processes have alike, whose gradient is that of the whole call on each.

    Processes with other positions have it already. That of other batch elements and heads is added.
    """
    if not isinstance(x, DTensor):
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        x = DTensor.from_local(x, where.mesh, (Replicate(),) * where.mesh.ndim, run_check=False)
    return x.full_tensor(
        grad_placements=[Replicate() if dim in (None, where.sequence) else Partial() for dim in where.dims]
    )


def with_whole_gradients(score: Score, where: Placement) -> Score:
    """Return a score whose tables have gradients of the whole call on each process."""
    trained = [x for x in foreign(score.node) if x.tensor is not None and x.tensor.requires_grad]
    tables = {id(x): TensorTable("table", whole(x.tensor, where), bounds=x.bounds) for x in trained}
    return replace(score, node=rebuild(score.node, tables)) if tables else score


def own_heads(name: str, x: Any, where: Placement, query: DTensor) -> Any:
    """Return the batch elements and heads of this process, of an array that is that of the whole call."""
    if not hasattr(x, "shape"):
        return x
    heads = KIND[name] == "heads"
    axis = 0 if heads else x.ndim - 3
    local = query.to_local().shape
    if where.heads in where.dims and axis >= 0 and x.shape[axis] > 1:
        at = where.first(query, where.heads)
        x = x[(slice(None),) * axis + (slice(at, at + local[where.heads]),)]
    if not heads and 0 in where.dims and x.ndim == query.ndim and query.ndim > 3 and x.shape[0] > 1:
        at = where.first(query, 0)
        x = x[at : at + local[0]]
    return x


@lru_cache(maxsize=8)
def parallel_of(group: Any, n: int) -> ContextParallel:
    """Return the processes of one dimension of a mesh, whose shares are those of `Shard`."""
    return ContextParallel(group, {}, "contiguous", n)


def placed(x: torch.Tensor, where: Placement, placements: Any, shape: tuple[int, ...]) -> DTensor:
    """Return a local result as a DTensor of a global shape."""
    stride = tuple(prod(shape[n + 1 :]) for n in range(len(shape)))
    return DTensor.from_local(
        x.contiguous(), where.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
