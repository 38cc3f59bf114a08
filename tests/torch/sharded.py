"""Training in two processes equals training in one: `python sharded.py fsdp` or `ddp`."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regard
import regard.torch

WORLD = 2


class Layer(nn.Module):
    """Attention that reads parameters in every way: as a sink, a bias, tables and a float mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 32)
        self.sink, self.slopes = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
        self.bias, self.added = nn.Parameter(torch.rand(4, 12, 12)), nn.Parameter(torch.rand(4, 12, 12))
        self.cap = nn.Parameter(torch.full((4,), 3.0))
        self.made_once = regard.softcap(regard.table(self, "cap"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x).unflatten(-1, (4, 8)).transpose(1, 2)
        score = [regard.alibi(self.slopes), self.made_once]
        h = regard.attention(h, h, h, score=score, causal=True, sink=self.sink, bias=self.bias)
        h = regard.torch.scaled_dot_product_attention(h, h, h, self.added)
        return x + h.transpose(1, 2).flatten(-2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).double()


def trained(module: nn.Module, x: torch.Tensor) -> list[dict[str, Any]]:
    """Return the gradients of two steps."""
    found, optimizer = [], torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in module.named_parameters()}
        found.append({name.removeprefix("module."): x.clone() for name, x in whole.items()})
        optimizer.step()
    return found


def process(rank: int, how: str, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    x = torch.randn(2 * WORLD, 12, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = trained(model(), x)
    module: nn.Module = model()
    if how == "fsdp":
        for layer in module:
            fully_shard(layer)
        fully_shard(module)
    else:
        module = DistributedDataParallel(module)
    for got, wanted in zip(trained(module, x.chunk(WORLD)[rank]), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    dist.barrier()
    # PyTorch's destructor of a DDP reducer may wait for a thread that waits for the interpreter's lock.
    os._exit(0)


def main() -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no network is needed
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(process, (sys.argv[1], str(Path(folder, "meeting"))), nprocs=WORLD)


if __name__ == "__main__":
    main()
