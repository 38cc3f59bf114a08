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


def derivatives(rank: int, ranks: int, path: str) -> None:
    """Write which derivatives differ from one process: of bias, sink and a table, second ones, and forward mode."""
    begin(rank, ranks, path)
    draw, wrong = torch.Generator().manual_seed(0), []
    shapes = (4, N, 8), (2, N, 8), (2, N, 8), (N, N), (4,), (4,), (4, N, 8), (4, N, 8)
    *given, dout, u = (torch.randn(shape, generator=draw) for shape in shapes)
    names = ("dquery", "dkey", "dvalue", "dbias", "dsink", "dtable", "out", "ddquery", "ddkey", "ddvalue", "tangent")

    def found(floats: list[torch.Tensor], dout: torch.Tensor, u: torch.Tensor) -> list[torch.Tensor]:
        floats = [x.clone().requires_grad_() for x in floats]

        def call(query: torch.Tensor) -> Any:
            key, value, bias, sink, slopes = floats[1:]
            return regard.attention(query, key, value, causal=True, bias=bias, sink=sink, score=regard.alibi(slopes))

        out = call(floats[0])
        first = torch.autograd.grad(out, floats, dout, create_graph=True)
        second = torch.autograd.grad(first[0], floats[:3], u, retain_graph=True)
        tangent = torch.func.jvp(call, (floats[0].detach(),), (u,))[1]
        return [x.detach() for x in (*first, out, *second, tangent)]

    whole = found(given, dout, u)
    for exact, rounded in ((True, {"dtable"}), (False, {"dtable", "dkey", "dvalue", "ddkey", "ddvalue"})):
        with regard.torch.context_parallel(dist.group.WORLD, causal=True, exact=exact) as cp:
            rows = [cp.shard(x) for x in (*given[:3], dout, u)]
            own = found([*rows[:3], *given[3:]], rows[3], rows[4])
        for name, a, b in zip(names, own, whole, strict=True):
            x = a if name in ("dbias", "dsink", "dtable") else cp.unshard(a)
            if not (torch.allclose(x, b, rtol=1e-4, atol=1e-6) if name in rounded else torch.equal(x, b)):
                wrong.append(f"{name}, exact={exact}")
        if not exact and torch.equal(cp.unshard(own[names.index("dkey")]), whole[names.index("dkey")]):
            wrong.append("exact=False was not asked for")
    Path(f"{path}.{rank}").write_text("\n".join(wrong) or "none")
    dist.barrier()
    dist.destroy_process_group()


def disagreeing(rank: int, ranks: int, path: str) -> None:
    """Write the error of each rank for calls that differ, and for one that only one rank refuses."""
    begin(rank, ranks, path)
    errors = []
    with regard.torch.context_parallel(dist.group.WORLD, deal="stripes") as cp:
        x = cp.shard(torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0)))
        seen = torch.ones(300, 300, dtype=torch.bool)
        seen[7, 9 + rank] = False
        large = torch.zeros(300, 300)
        large[128:200] = 1e30  # rows of rank 1
        for options in (
            {"seed": rank, "dropout": 0.1},
            {"mask": regard.window(5 + rank)},
            {"dropout": 2.0 * rank},
            {"mask": seen},
            {"bias": seen * 0.5},
            {"offset": rank},
        ):
            try:
                regard.attention(x, x, x, **options)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
        try:
            y = x.clone().requires_grad_()
            regard.attention(y, y, y, bias=large).sum().backward()
        except ValueError as error:
            errors.append(str(error))
        cp.exact = rank == 0
        try:
            regard.attention(x, x, x)
        except ValueError as error:
            errors.append(str(error))
        cp.exact = True
        out = regard.attention(x, x, x, causal=True)  # and nobody is left behind
        errors.append(str(tuple(cp.unshard(out).shape)))
    Path(f"{path}.{rank}").write_text("\n".join(errors))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    what, count, place = sys.argv[1:]
    mp.spawn(
        {"same_bits": same_bits, "derivatives": derivatives, "disagreeing": disagreeing}[what],
        (int(count), place),
        nprocs=int(count),
    )
