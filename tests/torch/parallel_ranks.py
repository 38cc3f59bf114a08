"""What each process of test_torch_parallel.py runs: python parallel_ranks.py FUNCTION RANKS PATH."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
import regard.torch

N = 1500
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"mask": regard.window(90)},
    "scores": {"causal": True, "score": regard.softcap(9.0), "dropout": 0.1, "seed": 7},
    "bfloat16": {"causal": True, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


def inputs(name: str) -> list[torch.Tensor]:
    """query, key, value and a cotangent, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    found = [torch.randn(1, h, N, 16, generator=draw) for h in (4, 2, 2, 4)]
    return [x.to(torch.bfloat16) if name == "bfloat16" else x for x in found]


def kind(name: str) -> str:
    return "bfloat16" if name == "bfloat16" else "float32"


def one_process(name: str) -> list[torch.Tensor]:
    q, k, v, dout = inputs(name)
    operands = [x.requires_grad_() for x in (q, k, v)]
    out, seen = regard.attention(*operands, observe=["lse"], **OPTIONS[name])
    out.backward(dout)
    return [out.detach(), seen.lse.detach(), *(x.grad for x in operands)]


def begin(rank: int, ranks: int, path: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)


def same_bits(rank: int, ranks: int, path: str) -> None:
    """Write what differs from one process."""
    begin(rank, ranks, path)
    wrong = []
    for name, options in OPTIONS.items():
        rule = {x: options[x] for x in options if x in ("causal", "mask")}
        with regard.torch.context_parallel(dist.group.WORLD, **rule) as cp:
            q, k, v, dout = (cp.shard(x) for x in inputs(name))
            operands = [x.requires_grad_() for x in (q, k, v)]
            out, seen = regard.attention(*operands, observe=["lse"], **options)
            plan = regard.plan(*(tuple(x.shape) for x in inputs(name)[:3]), dtype=kind(name), ranks=ranks, **rule)
            assert plan.ranks is not None
            assert cp.received == plan.ranks.bytes[rank], (cp.received, plan.ranks.bytes)
            out.backward(dout)
            lse = cp.unshard(seen.lse.detach(), dim=-1)
            found = [cp.unshard(out.detach()), lse, *(cp.unshard(x.grad) for x in operands)]
            sent = cp.received
        if rank == 0:
            for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, one_process(name), strict=True):
                if not torch.equal(a, b):
                    wrong.append(f"{name}: {what}")
            if not sent:
                wrong.append(f"{name}: nothing was sent")
    if rank == 0:
        Path(path + ".wrong").write_text("\n".join(wrong) or "none")
    dist.barrier()
    dist.destroy_process_group()


def disagreeing(rank: int, ranks: int, path: str) -> None:
    """Write the error of each rank for calls that differ, and for one that only one rank refuses."""
    begin(rank, ranks, path)
    errors = []
    with regard.torch.context_parallel(dist.group.WORLD, deal="stripes") as cp:
        x = cp.shard(torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0)))
        for options in ({"seed": rank, "dropout": 0.1}, {"mask": regard.window(5 + rank)}, {"dropout": 2.0 * rank}):
            try:
                regard.attention(x, x, x, **options)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
        out = regard.attention(x, x, x, causal=True)  # and nobody is left behind
        errors.append(str(tuple(cp.unshard(out).shape)))
    Path(f"{path}.{rank}").write_text("\n".join(errors))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    what, count, place = sys.argv[1:]
    mp.spawn({"same_bits": same_bits, "disagreeing": disagreeing}[what], (int(count), place), nprocs=int(count))
