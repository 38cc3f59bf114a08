"""Attention of DTensors on a mesh of 2 × 2 processes: run by parallel_model_ranks.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import regard
import regard.torch

BY_HEAD = regard.table([0.5, 0.25, 2.0, 1.0])
CALLS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "positions": (300, (Shard(2), Replicate()), {"causal": True}),
    "positions and heads": (301, (Shard(-2), Shard(1)), {"mask": regard.window(40), "dropout": 0.2, "seed": 3}),
    "batch and positions": (7, (Shard(0), Shard(2)), {"score": regard.alibi([0.5, 0.25, 2.0, 1.0])}),
    "an empty shard": (1, (Shard(2), Replicate()), {}),
    "batch and heads": (
        50,
        (Shard(0), Shard(1)),
        {"mask": lambda b, h, i, j: i + b + h > j, "dropout": 0.2, "seed": 3},
    ),
    "whole": (50, (Replicate(), Replicate()), {"causal": True}),
    "arrays": (50, (Shard(2), Shard(1)), {"sink": torch.tensor([0.1, 0.7, -1.0, 2.0]), "bias": torch.ones(4, 50, 50)}),
    "tokens first": (130, (Shard(1), Shard(2)), {"causal": True, "layout": "bnhd"}),
}


def draw(n: int, layout: str = "bhnd") -> list[torch.Tensor]:
    """query, key, value and a cotangent, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, h, n, 8, generator=generator) for h in (4, 2, 2, 4)]
    return [x.transpose(1, 2) if layout == "bnhd" else x for x in drawn]


def results(operands: list[Any], dout: Any, options: dict[str, Any]) -> dict[str, Any]:
    operands = [x.detach().requires_grad_() for x in operands]
    out, seen = regard.attention(*operands, observe=["lse"], **options)
    lse = seen.lse
    (out * dout).sum().backward()
    q, k, v = (x.grad for x in operands)
    return {"out": out.detach(), "lse": lse.detach(), "dq": q, "dk": k, "dv": v}


def trained(place: Any) -> list[torch.Tensor]:
    """A bias, a sink and slopes, as `place` puts them."""
    generator = torch.Generator().manual_seed(2)
    return [place(torch.randn(*shape, generator=generator)) for shape in ((4, 130, 130), (4,), (4,))]


def gradients(operands: list[Any], dout: Any, inputs: list[Any]) -> list[torch.Tensor]:
    """Return gradients of a bias, a sink and slopes, whole."""
    inputs = [x.requires_grad_() for x in inputs]
    bias, sink, slopes = inputs
    table = slopes.full_tensor() if isinstance(slopes, DTensor) else slopes
    out = regard.attention(*operands, causal=True, bias=bias, sink=sink, score=regard.alibi(table))
    (out * dout).sum().backward()
    for x in inputs:
        assert not isinstance(x, DTensor) or x.grad.placements == x.placements
    return [x.grad.full_tensor() if isinstance(x, DTensor) else x.grad for x in inputs]


def gradients_of_parameters(mesh: Any) -> dict[str, str]:
    """Return "same" where gradients of what all processes have equal one process's, except for the order of sums."""
    drawn, replicated = draw(130), (Replicate(), Replicate())
    expected = gradients(drawn[:3], drawn[3], trained(lambda x: x))
    kinds: dict[str, Any] = {
        "plain": lambda x: x,
        "replicated": lambda x: distribute_tensor(x, mesh, replicated),
        "sharded": lambda x: distribute_tensor(x, mesh, (Shard(0), Replicate())),
    }
    places = (Shard(2), Shard(1)), (Shard(0), Shard(2)), (Shard(0), Shard(1)), (Replicate(), Shard(2)), replicated
    said = {}
    for placements in places:
        *operands, dout = (distribute_tensor(x, mesh, placements) for x in drawn)
        for kind, place in kinds.items():
            got = gradients(operands, dout, trained(place))
            wrong = [
                f"{name} differs by {(a - b).abs().max()}"
                for name, a, b in zip(("bias", "sink", "slopes"), got, expected, strict=True)
                if not torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            ]
            said[f"gradients of {kind} parameters, {placements}"] = ", ".join(wrong) or "same"
    return said


class Heads(nn.Module):
    """Attention with its projections, and one more layer."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = regard.torch.MultiHeadAttention(32, 4, num_kv_heads=2, causal=True, positions="alibi")
        self.last = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(x + self.heads(x))
        return found


def model() -> Heads:
    torch.manual_seed(0)
    return Heads().double()


def tokens() -> torch.Tensor:
    return torch.randn(4, 300, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def same(name: str, found: nn.Module, group: Any, factor: float = 1.0) -> dict[str, str]:
    """Compare the sums of gradients over a group of processes with those of one process."""
    alone = model()
    alone(tokens()).square().sum().backward()
    wrong = []
    for (what, p), q in zip(found.named_parameters(), alone.parameters(), strict=True):
        assert q.grad is not None
        mine = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) * factor
        dist.all_reduce(mine, group=group)
        if not torch.allclose(mine, q.grad, rtol=1e-12, atol=1e-12):
            wrong.append(f"{what} differs by {(mine - q.grad).abs().max()}")
    return {name: ", ".join(wrong) or "same"}


def with_fully_shard() -> dict[str, str]:
    """The batch and parameters are sharded on one dimension of a mesh, positions on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    sharded = fully_shard(model(), mesh=mesh["dp"])
    with regard.torch.context_parallel(mesh["cp"], causal=True) as cp:
        mine = cp.shard(tokens().chunk(2)[mesh.get_local_rank("dp")])
        sharded(mine).square().sum().backward()
    return same("FSDP2", sharded, mesh["cp"].get_group(), factor=2.0)  # which averages


def with_tensor_parallel() -> dict[str, str]:
    """Heads are sharded on one dimension of a mesh, positions on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    heads = {f"heads.w_{x}": ColwiseParallel(use_local_output=False) for x in "qkv"}
    parallel = parallelize_module(model(), mesh["tp"], heads | {"heads.w_o": RowwiseParallel()})
    with regard.torch.context_parallel(mesh["cp"], causal=True) as cp:
        parallel(cp.shard(tokens())).square().sum().backward()
    return same("tensor parallel", parallel, mesh["cp"].get_group())


def dtensors() -> dict[str, str]:
    """Return "same" for each call whose results are placed as its query, with the bits of one process."""
    mesh, said = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second")), {}
    for name, (n, placements, options) in CALLS.items():
        whole = draw(n, options.get("layout", "bhnd"))
        expected = results(whole[:3], whole[3], options)
        *operands, dout = (distribute_tensor(x, mesh, placements) for x in whole)
        wrong = []
        for what, x in results(operands, dout, options).items():
            if what != "lse" and x.placements != operands[0].placements:
                wrong.append(f"{what} is placed {x.placements}")
            if not torch.equal(x.full_tensor(), expected[what]):
                wrong.append(f"{what} differs by {(x.full_tensor() - expected[what]).abs().max()}")
        said[f"DTensors, {name}"] = ", ".join(wrong) or "same"
    return said | refused(mesh) | gradients_of_parameters(mesh) | with_fully_shard() | with_tensor_parallel()


def refused(mesh: Any) -> dict[str, str]:
    """Return what is said of placements that cannot be served."""
    x = draw(12)[0]
    q, heads, whole = (
        distribute_tensor(x, mesh, p) for p in ((Shard(2), Replicate()), (Shard(1),) * 2, (Replicate(),) * 2)
    )
    twice, features = (distribute_tensor(x, mesh, p) for p in ((Shard(2), Shard(2)), (Shard(3), Replicate())))
    partial = DTensor.from_local(x, mesh, (Partial(), Replicate()))
    calls: dict[str, Any] = {
        "partial": lambda: regard.attention(partial, partial, partial),
        "twice": lambda: regard.attention(twice, twice, twice),
        "features": lambda: regard.attention(features, features, features),
        "key elsewhere": lambda: regard.attention(q, heads, heads),
        "key whole": lambda: regard.attention(q, whole, whole),
        "key no DTensor": lambda: regard.attention(q, x, x),
        "query no DTensor": lambda: regard.attention(x, q, q),
        "keys of another length": lambda: regard.attention(
            q, *[distribute_tensor(x[:, :, :9], mesh, q.placements)] * 2
        ),
        "uneven heads": lambda: regard.attention(*[distribute_tensor(x[:, :3], mesh, heads.placements)] * 3),
        "weights": lambda: regard.attention(q, q, q, return_weights=True),
        "more batch elements": lambda: regard.attention(q, q, q, mask=regard.padding([3, 4, 5, 6])),
        "more heads": lambda: regard.attention(heads, heads, heads, score=regard.alibi([1.0] * 8)),
        "forward mode": lambda: torch.func.jvp(lambda y: regard.attention(y, y, y), (q,), (q,)),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[f"DTensors refused, {name}"] = str(call().shape)
        except Exception as error:
            said[f"DTensors refused, {name}"] = f"{type(error).__name__}: {error}"
    return said
