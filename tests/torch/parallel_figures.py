"""Time two processes of one thread beside one process of one and of two threads: python parallel_figures.py [N].

Forward and backward of a causal call of 4 heads, d = 64, in turns; the least of each over rounds, since the machine may
be busy. The processes of a round run one after the other.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import regard
import regard.torch

ROUNDS = 4


def timed(work: Any, again: int = 3) -> float:
    """Return the least seconds of some calls, after one that compiles."""
    work()
    found = []
    for _ in range(again):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def both(operands: list[torch.Tensor], dout: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of forward, and of forward and backward."""

    def forward() -> Any:
        return regard.attention(*operands, causal=True)

    def backward() -> None:
        forward().backward(dout)

    with torch.no_grad():
        alone = timed(forward)
    return alone, timed(backward)


def one(_: int, threads: int, n: int, path: str) -> None:
    regard.set_num_threads(threads)
    torch.set_num_threads(threads)
    operands, dout = inputs(n)
    Path(path).write_text(repr(both(operands, dout)))


def two(rank: int, n: int, path: str) -> None:
    regard.set_num_threads(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.meeting", rank=rank, world_size=2)
    operands, dout = inputs(n)
    with regard.torch.context_parallel(dist.group.WORLD, causal=True) as cp:
        mine = [cp.shard(x.detach()).requires_grad_() for x in operands]
        found = both(mine, cp.shard(dout))
    if rank == 0:
        Path(path).write_text(repr(found))
    dist.barrier()
    dist.destroy_process_group()


def inputs(n: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    *operands, dout = (torch.randn(1, 4, n, 64, generator=draw) for _ in range(4))
    return [x.requires_grad_() for x in operands], dout


def main(n: int) -> None:
    ways: dict[str, Any] = {
        "one process, 1 thread": lambda path: mp.spawn(one, (1, n, path), nprocs=1),
        "one process, 2 threads": lambda path: mp.spawn(one, (2, n, path), nprocs=1),
        "two processes, 1 thread": lambda path: mp.spawn(two, (n, path), nprocs=2),
    }
    seconds: dict[str, list[Any]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/seconds"
                way(path)
                seconds[name].append(eval(Path(path).read_text()))
        for name, found in seconds.items():
            print(
                f"{name:24} forward {min(x[0] for x in found):.3f} s, both {min(x[1] for x in found):.3f} s", flush=True
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16384)
