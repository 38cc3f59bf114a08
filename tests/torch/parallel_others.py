"""What context parallelism of PyTorch, DeepSpeed and ours does on processors: python parallel_others.py [RANKS [CALL]].

DeepSpeed is left out unless it is installed: DS_BUILD_OPS=0 pip install deepspeed. gloo aborts a process where it sends
uneven shards: so 251 positions are left out for it, unless they are named as the CALL.
"""

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from parallel_ranks import begin
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex

import regard
import regard.torch

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
CALLS: dict[str, tuple[int, Call]] = {
    "everything": (256, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    "causal": (256, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "causal, 250 positions": (250, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "causal, 251 positions": (251, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
    "a mask": (256, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(256, 256).tril() > 0)),
    "dropout": (256, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)),
    "score_mod": (256, lambda q, k, v: flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) / 50)),
    "block_mask": (256, lambda q, k, v: flex.flex_attention(q, k, v, block_mask=flex.create_block_mask(
        lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu"))),
}  # fmt: skip


def theirs(mesh: Any, call: Call, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return out and gradients by PyTorch's context parallelism, whole."""
    operands = [x.clone() for x in whole]
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        stack.enter_context(context_parallel(mesh, buffers=operands, buffer_seq_dims=[2] * 4))
        mine = [x.detach().clone().requires_grad_() for x in operands[:3]]
        out = call(*mine)
        out.backward(operands[3])
        parts = [out.detach(), *(x.grad for x in mine)]
        return context_parallel_unshard(mesh, parts, [2] * 4)


def ulysses(mesh: Any, call: Call, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return out and gradients by DeepSpeed's Ulysses, whole: each process has some heads of all positions."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)  # takes the group that is there
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shard = DistributedAttention(lambda *x: call(*(y.transpose(1, 2) for y in x)).transpose(1, 2), mesh.get_group())
    tokens = [x.transpose(1, 2) for x in whole]
    *operands, dout = (x.tensor_split(ranks, 1)[rank].clone() for x in tokens)
    operands = [x.requires_grad_() for x in operands]
    out = shard(*operands, 0)
    out.backward(dout)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, [x.detach() for x in (out, *(x.grad for x in operands))])
    return [torch.cat(parts, 1).transpose(1, 2) for parts in zip(*every, strict=True)]


def ours(mesh: Any, call: Call, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    with regard.torch.context_parallel(mesh) as cp:
        *operands, dout = (cp.shard(x) for x in whole)
        operands = [x.requires_grad_() for x in operands]
        out = call(*operands)
        out.backward(dout)
        return [cp.unshard(x) for x in (out.detach(), *(x.grad for x in operands))]


def outcome(way: Callable[..., Any], mesh: Any, call: Call, whole: list[torch.Tensor], expected: Any) -> str:
    torch.manual_seed(0)
    try:
        got = way(mesh, call, whole)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    if all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
        return "the bits of one process"
    if any(a.shape != b.shape for a, b in zip(got, expected, strict=True)):
        return f"out of shape {tuple(got[0].shape)} instead of {tuple(expected[0].shape)}"
    return f"largest error {max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True)):.1e}"


def alone(call: Call, whole: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    operands = [x.clone().requires_grad_() for x in whole[:3]]
    with regard.torch.sdpa(), regard.torch.flex():
        out = call(*operands)
    out.backward(whole[3])
    return [out.detach(), *(x.grad for x in operands)]


def main(rank: int, ranks: int, path: str, name: str = "") -> None:
    warnings.simplefilter("ignore")
    begin(rank, ranks, path)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = {
        n: [torch.randn(1, 4, n, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        for n in (250, 251, 256)
    }
    expected = {name: alone(call, whole[n]) for name, (n, call) in CALLS.items()}
    others = [ulysses] if importlib.util.find_spec("deepspeed") else []
    for who in (ours, *others, theirs):  # PyTorch's last: it leaves functions of its own behind
        for what, (n, call) in CALLS.items():
            if name not in ("", what) or (who is ulysses and n % ranks and not name):
                continue
            said = outcome(who, mesh, call, whole[n], expected[what])
            dist.barrier()
            if rank == 0:
                print(f"{who.__name__} | {what} | {said}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (count, f"{folder}/meeting", *sys.argv[2:3]), nprocs=count)
