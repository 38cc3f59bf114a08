"""Compare two processes of one thread with one process of one and of two: python parallel_figures.py [N [HEADS]].

Forward of a causal call, then forward and backward, d = 64, in turns. Each is two numbers in seconds, the least of five
calls. The first is of processors: of one thread, of the busier of two processes, and half of both threads. So waits are
not counted, and a busy machine matters less. The second is of the clock.
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


def timed(work: Any, threads: int, again: int = 5) -> list[float]:
    """Return the least seconds of some calls, by a processor and by the clock, after one that compiles."""
    work()
    seconds = []
    for _ in range(again):
        start = time.process_time(), time.perf_counter()
        work()
        seconds.append(((time.process_time() - start[0]) / threads, time.perf_counter() - start[1]))
    return [min(x) for x in zip(*seconds, strict=True)]


def both(operands: list[torch.Tensor], dout: torch.Tensor, threads: int = 1) -> list[float]:
    """Return the seconds of forward, and of forward and backward."""

    def forward() -> Any:
        return regard.attention(*operands, causal=True)

    with torch.no_grad():
        alone = timed(forward, threads)
    return [*alone, *timed(lambda: forward().backward(dout), threads)]


def one(_: int, threads: int, n: int, heads: int, path: str) -> None:
    regard.set_num_threads(threads)
    torch.set_num_threads(threads)
    operands, dout = inputs(n, heads)
    save(path, both(operands, dout, threads))


def two(rank: int, exact: bool, n: int, heads: int, path: str) -> None:
    regard.set_num_threads(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}.meeting", rank=rank, world_size=2)
    operands, dout = inputs(n, heads)
    with regard.torch.context_parallel(dist.group.WORLD, causal=True, exact=exact) as cp:
        mine = [cp.shard(x.detach()).requires_grad_() for x in operands]
        found = torch.tensor(both(mine, cp.shard(dout)))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        save(path, found.tolist())
    dist.destroy_process_group()


def save(path: str, seconds: list[float]) -> None:
    Path(path).write_text(" ".join(f"{x:.3f}" for x in seconds))


def inputs(n: int, heads: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    *operands, dout = (torch.randn(1, heads, n, 64, generator=draw) for _ in range(4))
    return [x.requires_grad_() for x in operands], dout


def main(n: int = 16384, heads: int = 1) -> None:
    ways: dict[str, Any] = {
        "one process, 1 thread": lambda path: mp.spawn(one, (1, n, heads, path), nprocs=1),
        "one process, 2 threads": lambda path: mp.spawn(one, (2, n, heads, path), nprocs=1),
        "two processes, 1 thread": lambda path: mp.spawn(two, (True, n, heads, path), nprocs=2),
        "two processes, 1 thread, exact=False": lambda path: mp.spawn(two, (False, n, heads, path), nprocs=2),
    }
    for _ in range(2):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                way(f"{folder}/seconds")
                print(name, *Path(f"{folder}/seconds").read_text().split(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
