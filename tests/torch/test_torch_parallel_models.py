"""Models inside of `context_parallel`: each way to attention has the bits of one process, or one clear error."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="built without torch.distributed")

ALONE = "inside of context_parallel would see the positions of one process alone"
ERRORS = {
    "sdpa, mask of a rank": "RuntimeError: mask must align right to (..., h, n_q, n_k) = (1, 2, 300, 300), got shape",
    "flex_attention, mask of a rank": "ValueError: block_mask was made for ",
    "flex_attention, a copy": f"ValueError: this copy of flex_attention {ALONE}: import torch.nn.attention.flex_att",
    "nn.MultiheadAttention": "ValueError: nn.MultiheadAttention inside of context_parallel has no weights",
    "MultiHeadAttention, cache": "ValueError: query must be (..., heads, ",
    "varlen_attention": f"ValueError: attention of packed sequences {ALONE}: give regard.attention mask=",
    "rope, cache": "ValueError: a rank of context_parallel has ",
    "capture": f"ValueError: a recorder of attention {ALONE}: record one process",
    "weights": f"ValueError: regard.weights {ALONE}: give it whole tensors outside",
    "steps": f"ValueError: regard.steps {ALONE}: give it whole tensors outside",
    "linear_attention": f"ValueError: regard.linear_attention {ALONE}: give it whole tensors outside",
    "hopfield": f"ValueError: regard.hopfield {ALONE}: give it whole patterns outside",
    "natten": f"ValueError: NATTEN's attention {ALONE}: give regard.attention a mask of all positions",
    "vmap": "ValueError: regard.attention inside of context_parallel cannot be in vmap: give the batch as leading dim",
    "on a GPU": "ValueError: regard.attention inside of context_parallel computes on CPUs, got a query on the device ",
    "keys of another length": "ValueError: key must be (..., heads, ",
    "a decode step": "ValueError: query must be (..., heads, ",
    "graph, regard.attention": f"ValueError: a graph with attention {ALONE}: compile it anew inside",
    "graph, sdpa": f"ValueError: a graph with attention {ALONE}: compile it anew inside",
    "checkpoint, late": "CheckpointError: torch.utils.checkpoint: A different number of tensors was saved",
    "checkpoint, warning": "attention is computed again in a backward outside of context_parallel",
    "warning": "no attention was computed inside of context_parallel",
    "case metric": "dq",  # PyTorch's product of the metric and fewer rows
    "eager": "ValueError: attn_implementation inside of context_parallel must be one of ",
    "mask of a rank": "ValueError: attention_mask must be that of the whole, (batch, 420), got (1, ",
}
"""What each way begins with that has not the bits of one process."""
LATER = {name for name in ERRORS if name.startswith("case ") or name in ("eager", "mask of a rank")}
REFUSED = {
    "partial": "ValueError: query must be sharded or replicated on dimension first of the mesh, got P(sum):",
    "twice": "ValueError: query must have its positions sharded on one dimension of the mesh, got (Shard(dim=2),",
    "features": "ValueError: query must be sharded along its batch, heads or positions on dimension first of the mesh,",
    "key elsewhere": "ValueError: key must be placed as query is, (Shard(dim=2), Replicate()), got (Shard(dim=1),",
    "key whole": "ValueError: key must be placed as query is, (Shard(dim=2), Replicate()), got (Replicate(),",
    "key no DTensor": "TypeError: key must be a DTensor as query is, got Tensor",
    "query no DTensor": "TypeError: key must be a plain torch.Tensor, got the subclass",
    "keys of another length": "ValueError: key must have the positions of query, 12, where they are sharded",
    "uneven heads": "ValueError: the heads of query must be a multiple of the 4 processes, got 3",
    "weights": 'ValueError: regard.attention of DTensors observes "lse" and "entropy" alone',
    "more batch elements": "ValueError: lengths of padding covers batch index 0 to 3, but this call ends at ",
    "more heads": "ValueError: slopes of alibi covers head 0 to 7, but this call ends at head 3,",
    "forward mode": "NotImplementedError: Operator aten._has_same_storage_numel.default does not have a sharding",
}
"""What is said of DTensors that cannot be served; the last is PyTorch's own sentence."""
OTHERWISE = {"reentrant checkpoint, late": "differs", "reentrant checkpoint, warning": ""}
"""PyTorch computes these again outside and compares nothing: the warning above is all there is."""


def run(ranks: int, path: Path, *checks: str, lost: int = 0) -> list[dict[str, str]]:
    script = str(Path(__file__).with_name("parallel_model_ranks.py"))
    command = [sys.executable, "-W", "ignore", script, str(ranks), str(path), *checks]
    places = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(x for x in places if x)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks - lost)]


TRANSFORMERS = ("training",) if importlib.util.find_spec("transformers") else ()
"""A Llama trained for 20 steps, with the bits of one process that adds gradients in the order of ranks."""


def check(results: dict[str, str]) -> None:
    left_out = results.pop("positions left out", "give cp.shard(torch.arange(420)[None], 1)")
    assert "give cp.shard(torch.arange(420)[None], 1)" in left_out
    for name, result in results.items():
        assert result.startswith(ERRORS.get(name, OTHERWISE.get(name, "same"))), (name, result)


def test_all_ways_to_attention(tmp_path: Path) -> None:
    for results in run(2, tmp_path / "meeting", "ways", "graphs", "checkpoints", "warned", *TRANSFORMERS):
        assert results.keys() >= (ERRORS.keys() | OTHERWISE.keys()) - LATER
        check(results)


def test_a_rank_that_is_lost(tmp_path: Path) -> None:
    """The others raise within the timeout of their group."""
    assert run(2, tmp_path / "meeting", "deaths", lost=1) == [{"raises": "RuntimeError", "dies": "RuntimeError"}]


def test_a_model_and_meshes_on_four_processes(tmp_path: Path) -> None:
    for results in run(4, tmp_path / "meeting", "meshes", *TRANSFORMERS):
        for name, error in REFUSED.items():
            assert results.pop(f"DTensors refused, {name}").startswith(error), name
        check(results)


def test_the_table_of_cases_on_four_processes(tmp_path: Path) -> None:
    for results in run(4, tmp_path / "meeting", "cases"):
        assert results
        check(results)
