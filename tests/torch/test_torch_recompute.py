"""Dropout where forward runs again for backward: it drops the same weights, whoever decides on that."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import regard
import regard.torch

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 12, 16, dtype=torch.float64, generator=GENERATOR)
W = torch.randn(16, 16, dtype=torch.float64, generator=GENERATOR)
Q = X.unflatten(-1, (4, 4)).transpose(1, 2)
MODULE = regard.torch.MultiHeadAttention(16, 4, dropout=0.5, bias=False, dtype=torch.float64).requires_grad_(False)
Function = Callable[[torch.Tensor], torch.Tensor]


def values(w: torch.Tensor) -> torch.Tensor:
    return (X @ w).unflatten(-1, (4, 4)).transpose(1, 2)


CALLS: dict[str, Function] = {  # linear in w, if dropout is held fixed
    "attention": lambda w: regard.attention(Q, Q, values(w), dropout=0.5),
    "drop-in": lambda w: regard.torch.scaled_dot_product_attention(Q, Q, values(w), dropout_p=0.5),
    "module": lambda w: functional_call(MODULE, {"w_v.weight": w}, (X,)),
}


def twice(call: Function, w: torch.Tensor) -> torch.Tensor:
    """Two calls with seeds of their own, and much to save; as call, homogeneous of degree 1 in w."""
    first = call(w).relu()
    return (first.flip(1) + call(w).relu()).relu()


def run(function: Any, w: torch.Tensor, **config: Any) -> torch.Tensor:
    """Call in a configuration of AOTAutograd, without what it has compiled before."""
    with torch._functorch.config.patch(enable_autograd_cache=False, **config):
        found: torch.Tensor = function(w)
        return found


def compiled(f: Function, backend: str = "aot_eager", **config: Any) -> Function:
    return partial(run, torch.compile(f, backend=backend), **config)


def policy(context: Any, operation: Any, *args: Any, saved: str, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if saved in str(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def selective(f: Function, saved: str) -> Function:
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved=saved))
    return lambda w: checkpoint(f, w, use_reentrant=False, context_fn=contexts)


def in_region(f: Function) -> Function:
    def function(w: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return f(w)

    return function


WAYS: dict[str, Callable[[Function], Function]] = {
    "checkpoint": lambda f: lambda w: checkpoint(f, w, use_reentrant=False),
    "reentrant checkpoint": lambda f: lambda w: checkpoint(f, w, use_reentrant=True),
    "selective checkpoint: attention saved": lambda f: selective(f, "regard.attention"),
    "selective checkpoint: attention recomputed": lambda f: selective(f, "aten.mm"),
    "selective checkpoint: seeds saved": lambda f: selective(f, "rand"),
    "graph": compiled,
    "graph, half the memory": lambda f: compiled(f, activation_memory_budget=0.5),
    "graph, no memory": lambda f: compiled(f, activation_memory_budget=0.0),
    "graph, a region of no memory": lambda f: compiled(in_region(f)),
    "graph of Inductor, half the memory": lambda f: compiled(f, "inductor", activation_memory_budget=0.5),
    "graph of Inductor, no memory": lambda f: compiled(f, "inductor", activation_memory_budget=0.0),
    "graph of a checkpoint": lambda f: compiled(lambda w: checkpoint(f, w, use_reentrant=False)),
    "graph of a checkpoint, default partition": lambda f: compiled(
        lambda w: checkpoint(f, w, use_reentrant=False), "aot_eager_default_partitioner"
    ),
    "graph of a selective checkpoint": lambda f: compiled(selective(f, "regard.attention")),
    "checkpoint of a graph": lambda f: lambda w: checkpoint(compiled(f), w, use_reentrant=False),
}
if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
    del WAYS["graph, a region of no memory"]
HELD = [(way, "attention") for way in WAYS]
HELD += [(way, call) for way in ("checkpoint", "graph, no memory", "graph of a checkpoint") for call in [*CALLS][1:]]


@pytest.mark.parametrize(("way", "call"), HELD)
def test_what_runs_again_drops_what_forward_dropped(way: str, call: str) -> None:
    """By Euler's theorem ⟨∂L/∂w, w⟩ is 2 L, if both are of the same function."""
    torch._dynamo.reset()
    function, w = WAYS[way](partial(twice, CALLS[call])), W.clone().requires_grad_()
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = function(w).square().sum()
        w.grad = None
        loss.backward()
        torch.testing.assert_close((w.grad * w).sum(), 2 * loss)
        losses.append(loss.item())
    assert len({*losses}) == 3


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_graph_without_a_backward_takes_no_mark(budget: float) -> None:
    torch._dynamo.reset()
    config = {"activation_memory_budget": budget}
    function = compiled(lambda w: checkpoint(CALLS["attention"], w, use_reentrant=False), **config)
    with torch.no_grad():
        torch.manual_seed(0)
        found = function(W)
        torch.manual_seed(0)
        assert torch.equal(found, CALLS["attention"](W))


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_graph_of_the_call_itself_drops_what_forward_dropped(budget: float) -> None:
    """That of AOTAutograd without Dynamo."""

    def loss_of(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return twice(lambda w: regard.attention(x, x, x @ w, dropout=0.5), w).square().sum()

    with torch._functorch.config.patch(activation_memory_budget=budget):
        graph = aot_function(loss_of, fw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
        w = W.clone().requires_grad_()
        loss = graph(w, X)
    loss.backward()
    torch.testing.assert_close((w.grad * w).sum(), 2 * loss)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec:FutureWarning")  # run_decompositions itself, in 2.13
def test_a_program_that_was_exported_keeps_the_mark(tmp_path: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return twice(CALLS["attention"], w)

    program = torch.export.export(Model(), (W,))
    torch.export.save(program, tmp_path / "program.pt2")
    for again in (torch.export.load(tmp_path / "program.pt2"), program.run_decompositions()):
        torch._dynamo.reset()
        w = W.clone().requires_grad_()
        loss = compiled(again.module(), activation_memory_budget=0.0)(w).square().sum()
        loss.backward()
        torch.testing.assert_close((w.grad * w).sum(), 2 * loss)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint64])
def test_a_seed_is_an_input_of_a_graph(dtype: torch.dtype) -> None:
    def dropped(w: torch.Tensor, seed: Any) -> Any:
        return regard.attention(Q, Q, values(w), dropout=0.5, seed=seed, return_weights=True)

    torch._dynamo.reset()
    counter, seeds = CompileCounterWithBackend("aot_eager"), torch.tensor([3, 4, 5]).to(dtype)
    graph, traced = torch.compile(dropped, fullgraph=True, backend=counter), make_fx(dropped)(W, seeds[0])
    for seed, x in zip((3, 4, 5), seeds, strict=True):
        for function in (dropped, graph, traced):
            for got, expected in zip(function(W, x), dropped(W, seed), strict=True):
                assert torch.equal(got, expected)
    assert counter.frame_count == 1
    if dtype is not torch.uint64:  # for which vmap itself has no rule
        each = vmap(lambda seed: dropped(W, seed)[0])(seeds)
        assert torch.equal(each[2], dropped(W, 5)[0])


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (torch.tensor(3.0), TypeError, "seed must be an int, got 3.0"),
        (torch.tensor(True), TypeError, "seed must be an int, got True"),
        (torch.tensor(-1), ValueError, r"seed must be in \[0, 2\*\*64\), got -1"),
        (torch.tensor([1, 2]), TypeError, r"seed must be an int, got array\(\[1, 2\]\)"),
    ],
)
def test_a_tensor_that_is_no_seed_is_an_error(seed: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        regard.attention(Q, Q, Q, dropout=0.5, seed=seed)
