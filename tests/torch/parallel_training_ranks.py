"""A small Llama over several processes, and the same in one: run by parallel_model_ranks.py."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import regard
import regard.torch

N, STEPS, WORDS = 420, 20, 50
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
Split = Callable[..., list[torch.Tensor]]


def llama(implementation: str = "regard") -> Any:
    regard.torch.register_transformers()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, attn_implementation=implementation, **SIZES)
    return LlamaForCausalLM(config)


def tokens(step: int) -> dict[str, torch.Tensor]:
    """Return what a model is given; labels are shifted before anything is dealt."""
    ids = torch.randint(WORDS, (1, N), generator=torch.Generator().manual_seed(step % 2))
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    return {"input_ids": ids, "labels": ids, "shift_labels": shifted, "position_ids": torch.arange(N)[None]}


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**given, num_items_in_batch=N - 1, use_cache=False).loss
    return loss


def in_rank_order(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    total = gradients[0].clone()
    for g in gradients[1:]:
        total += g
    return total


def over_processes(ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the losses of each step, and the parameters after the last."""
    model, losses = llama(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with regard.torch.context_parallel(dist.group.WORLD, causal=True) as cp:
        for step in range(STEPS):
            loss = loss_of(model, {name: cp.shard(x, 1) for name, x in tokens(step).items()})
            loss.backward()
            for p in model.parameters():
                p.grad = in_rank_order(gathered(p.grad, ranks))
            losses.append(in_rank_order(gathered(loss.detach(), ranks)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def gathered(x: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    every = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(every, x)
    return every


def in_one(positions: list[np.ndarray[Any, Any]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return those of one process: attention whole, all else on the pieces that ranks have, a model for each."""
    models, losses = [llama() for _ in positions], []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    at = [torch.from_numpy(x) for x in positions]
    back = torch.from_numpy(np.argsort(np.concatenate(positions)))
    for step in range(STEPS):
        pieces = [{name: x.index_select(1, own) for name, x in tokens(step).items()} for own in at]
        parts = losses_of(models, pieces, at, back)
        in_order = torch.stack(parts).sum()
        in_order.backward()
        for every in zip(*(model.parameters() for model in models), strict=True):
            total = in_rank_order([p.grad for p in every])
            for p in every:
                p.grad = total.clone()
        losses.append(in_rank_order([x.detach() for x in parts]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in models[0].parameters()]


def losses_of(models: list[Any], pieces: list[dict[str, torch.Tensor]], at: Any, back: torch.Tensor) -> Any:
    """Run the layers of all models side by side, and attention on their rows together."""
    states = [model.model.embed_tokens(x["input_ids"]) for model, x in zip(models, pieces, strict=True)]
    turns = [
        model.model.rotary_emb(x, position_ids=own[None]) for model, x, own in zip(models, states, at, strict=True)
    ]
    for number in range(len(models[0].model.layers)):
        layers = [model.model.layers[number] for model in models]
        projected = [heads(layer, x, turn) for layer, x, turn in zip(layers, states, turns, strict=True)]
        q, k, v = (torch.cat(x, 2).index_select(2, back) for x in zip(*projected, strict=True))
        out = regard.attention(q, k, v, causal=True, scale=layers[0].self_attn.scaling)
        states = [after(layer, x, out.index_select(2, own)) for layer, x, own in zip(layers, states, at, strict=True)]
    return [
        model.loss_function(
            logits=model.lm_head(model.model.norm(x)), labels=None, vocab_size=WORDS,
            shift_labels=given["shift_labels"], num_items_in_batch=N - 1,
        )
        for model, x, given in zip(models, states, pieces, strict=True)
    ]  # fmt: skip


def heads(layer: Any, x: torch.Tensor, turn: Any) -> tuple[torch.Tensor, ...]:
    own, y = layer.self_attn, layer.input_layernorm(x)
    q, k, v = (f(y).unflatten(-1, (-1, own.head_dim)).transpose(1, 2) for f in (own.q_proj, own.k_proj, own.v_proj))
    return *apply_rotary_pos_emb(q, k, *turn), v


def after(layer: Any, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
    found: torch.Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return found


def differences(ranks: int) -> list[str]:
    """Return what differs between processes and one, after all steps."""
    with regard.torch.context_parallel(dist.group.WORLD, causal=True) as cp:
        cp.shard(torch.empty(1, N), 1)
        positions = [cp.deal.positions(rank) for rank in range(ranks)]
        cp.calls += 1
    (losses, parameters), (theirs, expected) = over_processes(ranks), in_one(positions)
    wrong = [f"loss {n}: {a} {b}" for n, (a, b) in enumerate(zip(losses, theirs, strict=True)) if a != b]
    if not losses[-1] < losses[0]:
        wrong.append("nothing was learned")
    names = [name for name, _ in llama().named_parameters()]
    pairs = zip(names, parameters, expected, strict=True)
    return wrong + [f"{name}: {(a - b).abs().max()}" for name, a, b in pairs if not torch.equal(a, b)]


REFUSED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "positions left out": lambda cp: {"input_ids": cp.shard(tokens(0)["input_ids"], 1)},
    "mask of a rank": lambda cp: {
        "input_ids": cp.shard(tokens(0)["input_ids"], 1), "position_ids": cp.shard(torch.arange(N)[None], 1),
        "attention_mask": torch.ones(1, cp.deal.size(cp.rank)),
    },
}  # fmt: skip


def models_inside() -> dict[str, str]:
    """Return what models of transformers do inside of `context_parallel`: "same", "differs" or an error."""
    given = {name: x for name, x in tokens(0).items() if name in ("input_ids", "position_ids")}
    padded = given | {"attention_mask": (torch.arange(N) < N - 7)[None].long()}
    packed = given | {
        "position_ids": torch.cat([torch.arange(100), torch.arange(N - 100)])[None],
        "attention_mask": documents(100)[None, None],
    }
    cases = {"regard": given, "sdpa": given, "eager": given, "padded": padded, "packed": packed}
    results = {}
    for name, inputs in cases.items():
        model = llama(name if name in ("sdpa", "eager") else "regard").eval()
        expected = llama().eval()(**inputs, use_cache=False).logits
        with regard.torch.context_parallel(dist.group.WORLD, causal=True) as cp:
            mine = {k: x if k == "attention_mask" else cp.shard(x, 1) for k, x in inputs.items()}
            results[name] = outcome(cp, model, mine, expected)
    with regard.torch.context_parallel(dist.group.WORLD, causal=True) as cp:
        for name, inputs_of in REFUSED.items():
            results[name] = outcome(cp, llama().eval(), inputs_of(cp), torch.zeros(()))
    return results


def documents(first: int) -> torch.Tensor:
    """Return the mask of two documents, causal, True = attend."""
    number = torch.arange(N) >= first
    return (number[:, None] == number) & torch.ones(N, N, dtype=torch.bool).tril()


def outcome(cp: Any, model: Any, given: dict[str, Any], expected: torch.Tensor) -> str:
    try:
        logits = cp.unshard(model(**given, use_cache=False).logits, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same" if torch.allclose(logits, expected, rtol=1e-5, atol=1e-6) else "differs"
