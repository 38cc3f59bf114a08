"""What each process of test_torch_parallel_models.py runs: python parallel_model_ranks.py RANKS PATH CHECKS."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from parallel_ranks import begin
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import regard
import regard.torch

N, HEADS, WIDTH = 300, 2, 8
COPY = flex.flex_attention
CAUSAL: dict[str, Any] = {"causal": True}
Way = Callable[[Any, torch.Tensor], torch.Tensor]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def causal_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def block_mask(n: int) -> Any:
    return flex.create_block_mask(causal_mod, None, None, n, n, device="cpu")


def sdpa(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, **options)


def module(kind: Any, **options: Any) -> Way:
    """Return a module of tokens (batch, n, heads * width) as a function of (batch, heads, n, width)."""

    def call(_: Any, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        made = kind(**options).eval()
        out = made(x.transpose(1, 2).flatten(2))
        return out.unflatten(2, (HEADS, WIDTH)).transpose(1, 2)

    return call


def whole_flags() -> torch.Tensor:
    return draw(N, N, seed=3) > -1


def torch_heads(_: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
    tokens = x.transpose(1, 2).flatten(2)
    return made(tokens, tokens, tokens)[0].unflatten(2, (HEADS, WIDTH)).transpose(1, 2)


def compiled(function: Callable[..., Any], **options: Any) -> Way:
    made = torch.compile(function, backend="eager", **options)
    return lambda _, x: made(x)


def with_cache(_: Any, x: torch.Tensor) -> torch.Tensor:
    heads = regard.torch.MultiHeadAttention(HEADS * WIDTH, HEADS, causal=True)
    cache = regard.torch.KVCache()
    tokens = x.transpose(1, 2).flatten(2)
    with torch.no_grad():
        heads(tokens, cache=cache)
        return heads(tokens[:, :1], cache=cache)


def packed(cp: Any, x: torch.Tensor) -> torch.Tensor:
    y = x[0].transpose(0, 1)
    return regard.torch.varlen_attention(y, y, y, torch.tensor([0, 70, len(y)]), causal=True).transpose(0, 1)[None]


def captured(x: torch.Tensor) -> Any:
    with regard.capture(nn.Identity()):
        return attend(x)


def attend(x: torch.Tensor) -> torch.Tensor:
    return regard.attention(x, x, x, causal=True)


def on_gpu(x: torch.Tensor) -> torch.Tensor:
    """A tensor of a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(x.shape, device="cuda")


def counted(x: torch.Tensor) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        out = attend(x)
    assert counter.get_total_flops()
    return out


def plain_sdpa(x: torch.Tensor) -> torch.Tensor:
    return sdpa(x, is_causal=True)


WAYS: dict[str, Way] = {
    "regard.attention": lambda _, x: attend(x),
    "no_grad": torch.no_grad()(lambda _, x: attend(x)),
    "sdpa": lambda _, x: sdpa(x, is_causal=True),
    "sdpa, whole mask": lambda _, x: sdpa(x, attn_mask=whole_flags()),
    "sdpa, whole bias": lambda _, x: sdpa(x, attn_mask=draw(N, N, seed=3)),
    "sdpa, mask of a rank": lambda _, x: sdpa(x, attn_mask=whole_flags()[: x.shape[2], : x.shape[2]]),
    "sdpa, dropout": lambda _, x: sdpa(x, dropout_p=0.5),
    "flex_attention": lambda _, x: flex.flex_attention(x, x, x, block_mask=block_mask(N)),
    "flex_attention, no mask": lambda _, x: flex.flex_attention(x, x, x),
    "flex_attention, mask of a rank": lambda _, x: flex.flex_attention(x, x, x, block_mask=block_mask(x.shape[2])),
    "flex_attention, a copy": lambda _, x: COPY(x.detach(), x.detach(), x.detach()),
    "nn.TransformerEncoderLayer": module(
        nn.TransformerEncoderLayer, d_model=HEADS * WIDTH, nhead=HEADS, batch_first=True, dim_feedforward=8
    ),
    "nn.MultiheadAttention": torch_heads,
    "MultiHeadAttention": module(regard.torch.MultiHeadAttention, d_model=HEADS * WIDTH, num_heads=HEADS, causal=True),
    "MultiHeadAttention, rope": module(
        regard.torch.MultiHeadAttention, d_model=HEADS * WIDTH, num_heads=HEADS, positions="rope"
    ),
    "TransformerBlock, alibi": module(
        regard.torch.TransformerBlock, d_model=HEADS * WIDTH, num_heads=HEADS, positions="alibi", causal=True
    ),
    "MultiHeadAttention, cache": with_cache,
    "varlen_attention": packed,
    "rope, cache": lambda _, x: regard.torch.Rope(WIDTH)(x.transpose(1, 2), 5).transpose(1, 2),
    "capture": lambda _, x: captured(x),
    "weights": lambda _, x: regard.weights(x, x),
    "steps": lambda _, x: list(regard.steps(x[0], x[0], x[0])),
    "linear_attention": lambda _, x: regard.linear_attention(x, x, x),
    "hopfield": lambda _, x: regard.hopfield(x, x),
    "multihead_attention": lambda _, x: regard.multihead_attention(x[:, 0], x[:, 0], x[:, 0], 2, causal=True),
    "natten": lambda _, x: regard.torch.natten.na1d(*[x.transpose(1, 2)] * 3, kernel_size=5).transpose(1, 2),
    "flash_attn": lambda _, x: regard.torch.flash_attn.flash_attn_func(*[x.transpose(1, 2)] * 3, causal=True).transpose(
        1, 2
    ),
    "torch.compile": compiled(attend),
    "torch.compile, sdpa": compiled(plain_sdpa),
    "torch.compile, fullgraph": compiled(attend, fullgraph=True),
    "vmap": lambda _, x: torch.vmap(attend)(x),
    "on a GPU": lambda _, x: attend(on_gpu(x)),
    "torch.func.jvp": lambda _, x: torch.func.jvp(attend, (x,), (x,))[1],
    "torch.func.grad": lambda _, x: torch.func.grad(lambda y: regard.attention(y, x, x, causal=True).square().sum())(x),
    "FlopCounterMode": lambda _, x: counted(x),
    "keys of another length": lambda _, x: regard.attention(x, x[:, :, :100], x[:, :, :100]),
    "a decode step": lambda _, x: regard.attention(x[:, :, :1], x, x),
}


def compared(cp: Any, way: Way, expected: Any) -> str:
    """Return "same" if all ranks together have the bits of one process, else what happened."""
    x = cp.shard(draw(1, HEADS, N, WIDTH))
    torch.manual_seed(5)
    try:
        out = cp.unshard(way(cp, x).detach())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same" if torch.equal(out, expected) else "differs"


def one_process(way: Way) -> Any:
    torch.manual_seed(5)
    with regard.torch.sdpa(), regard.torch.flex():
        try:
            return way(None, draw(1, HEADS, N, WIDTH))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def ways() -> dict[str, str]:
    """Return what each way to attention does inside of `context_parallel`."""
    expected = {name: one_process(way) for name, way in WAYS.items()}
    with regard.torch.context_parallel(dist.group.WORLD, **CAUSAL) as cp:
        return {name: compared(cp, way, expected[name]) for name, way in WAYS.items()}


def graphs() -> dict[str, str]:
    """Return what graphs of attention do inside that were made outside, for the rows of a rank."""
    results = {}
    with regard.torch.context_parallel(dist.group.WORLD, **CAUSAL) as cp:
        rows = cp.shard(draw(1, HEADS, N, WIDTH))
        assert attend(rows).shape == rows.shape
    made = {"regard.attention": make_fx(attend)(rows), "sdpa": make_fx(plain_sdpa)(rows)}
    with regard.torch.context_parallel(dist.group.WORLD, **CAUSAL) as cp:
        cp.shard(draw(1, HEADS, N, WIDTH))
        for name, graph in made.items():
            try:
                results[f"graph, {name}"] = str(graph(rows).shape)
            except Exception as error:
                results[f"graph, {name}"] = f"{type(error).__name__}: {error}"
            attend(rows)
    return results


def checkpoints() -> dict[str, str]:
    """Return what gradient checkpoints do whose backward is inside, and outside."""
    x = draw(1, HEADS, N, WIDTH).requires_grad_()
    attend(x).sum().backward()
    results = {}

    def gradient(rows: torch.Tensor, loss: torch.Tensor) -> str:
        try:
            loss.backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        assert rows.grad is not None
        assert x.grad is not None
        return "same" if torch.allclose(rows.grad, cp.shard(x.grad), atol=1e-5) else "differs"

    for kind, reentrant in {"checkpoint": False, "reentrant checkpoint": True}.items():
        with regard.torch.context_parallel(dist.group.WORLD, **CAUSAL) as cp:
            rows, late = (cp.shard(x.detach()).requires_grad_() for _ in range(2))
            loss, later = (checkpoint(attend, y, use_reentrant=reentrant).sum() for y in (rows, late))
            results[kind] = gradient(rows, loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results[f"{kind}, late"] = gradient(late, later)
        results[f"{kind}, warning"] = "".join(str(x.message) for x in caught)
    return results


def warned() -> dict[str, str]:
    """Return the warning after a `context_parallel` that no attention came to."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with regard.torch.context_parallel(dist.group.WORLD, **CAUSAL) as cp:
            cp.shard(draw(1, HEADS, N, WIDTH))
    return {"warning": "".join(str(x.message) for x in caught)}


def training() -> dict[str, str]:
    from parallel_training_ranks import differences, models_inside

    return models_inside() | {"training": ", ".join(differences(dist.get_world_size())) or "same"}


def meshes() -> dict[str, str]:
    from parallel_mesh_ranks import dtensors

    return dtensors()


def cases() -> dict[str, str]:
    from parallel_case_ranks import cases

    return cases()


def deaths() -> dict[str, str]:
    from parallel_case_ranks import deaths

    return deaths()


def main(rank: int, ranks: int, path: str, checks: list[str]) -> None:
    begin(rank, ranks, path)
    results: dict[str, str] = {}
    for name in checks:
        results |= CHECKS[name]()
    Path(f"{path}.{rank}").write_text(json.dumps(results))
    if "deaths" in checks:  # there is nobody left to wait for
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


CHECKS = {x.__name__: x for x in (ways, graphs, checkpoints, warned, training, meshes, cases, deaths)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    count, place, *names = sys.argv[1:]
    mp.spawn(main, (int(count), place, names), nprocs=int(count))
