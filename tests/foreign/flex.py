"""attention-gym's and flash-attention's own functions of FlexAttention, as they are, in float64 with gradients.

Both are read from a checkout: nothing of them is kept here. A function passes if outputs and the gradients of q, k, v
and of each captured tensor of floats agree with whole rows (`flex_dense`).
"""

import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard.torch
from flex_dense import dense

Function = Callable[..., Any]
Case = tuple[
    str, str, Function, list[torch.Tensor], tuple[int, int, int, int]
]  # name, argument, function, tensors, sizes
N = 32
SIZES = (2, 4, N, N)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def doubled(function: Function) -> Function:
    """The function, with its captured tensors of float32 in float64."""
    for cell in function.__closure__ or ():
        if getattr(cell.cell_contents, "dtype", None) is torch.float32:
            cell.cell_contents = cell.cell_contents.double()
    return function


def gym(checkout: Path) -> Iterator[Case]:
    """The masks, scores and examples of attention-gym."""
    sys.path.insert(0, str(checkout))
    masks, mods = (importlib.import_module(f"attn_gym.{name}") for name in ("masks", "mods"))
    vsa = importlib.import_module("attn_gym.masks.vsa")
    offsets = torch.tensor([0, 7, 12, 25, N])
    intervals = torch.tensor([[0, 9], [9, 20], [16, 32], [0, 32]])
    marked = torch.arange(N) % 11 == 0
    tree = masks.build_tree_ancestor_matrix([-1, 0, 0, 1, 1, 2, 5, 6], "cpu")
    top = torch.rand(2, 4, 8, 8).argsort(-1)[..., :3]
    sizes = torch.tensor([4, 4, 3, 4, 4, 2, 4, 4])
    adjacency = torch.rand(2, N, N) < 0.1
    edges = torch.randint(0, 5, (2, N, N))
    causal, window = masks.causal_mask, masks.generate_sliding_window(5)
    small, cross = (2, 4, 8, 16), (2, 4, 12, 16)
    for name, function in {
        "causal_mask": causal,
        "batchify(causal)": masks.batchify_mask_mod(causal, 8),
        "batchify(sliding_window)": masks.batchify_mask_mod(window, 8),
        "block_diffusion": masks.generate_block_diffusion_mask(16, 4),
        "dilated_sliding_window": masks.generate_dilated_sliding_window(8, 2),
        "doc(causal)": masks.generate_doc_mask_mod(causal, offsets),
        "doc(sliding_window)": masks.generate_doc_mask_mod(window, offsets),
        "doc(prefix_lm)": masks.generate_doc_mask_mod(masks.generate_prefix_lm_mask(3), offsets),
        "packed_causal_doc": masks.generate_packed_causal_doc_mask_mod(offsets),
        "global_sliding_window": masks.generate_global_sliding_window(3, marked),
        "jetspec_training": (masks.generate_jetspec_training_mask_mod(8, 4), (2, 4, 8, 16)),
        "jetspec_tree_causal": (masks.generate_jetspec_tree_causal_mask_mod(8, tree), small),
        "vision_cross_attention": (masks.generate_vision_cross_attention_mask_mod(intervals, 4), cross),
        "natten": masks.generate_natten(8, 4, 3, 3),
        "tiled_natten": masks.generate_tiled_natten(8, 4, 3, 3, 4, 2),
        "morton_natten": masks.generate_morton_natten(8, 4, 3, 3),
        "prefix_lm": masks.generate_prefix_lm_mask(6),
        "shared_prefix": masks.generate_shared_prefix_mask_mod(offsets, torch.tensor([0, 0, 2, 2])),
        "sliding_window": window,
        "sta_2d": masks.generate_sta_mask_mod_2d((4, 8), (2, 4), (2, 2)),
        "sta_2d, text": masks.generate_sta_mask_mod_2d((4, 6), (2, 6), (2, 2), 8),
        "sta_3d": masks.generate_sta_mask_mod_3d((2, 4, 4), (1, 2, 4), (1, 2, 2)),
        "sta_3d, text": masks.generate_sta_mask_mod_3d((2, 4, 3), (2, 2, 3), (1, 2, 3), 8),
        "spatial_head": masks.generate_spatial_head_mask_mod(4, 7, 4, 2, False, 4),
        "spatial_head, sink": masks.generate_spatial_head_mask_mod(4, 7, 4, 2, True, 4),
        "temporal_head": masks.generate_temporal_head_mask_mod(4, 7, 4, 4),
        "vsa": masks.generate_vsa_mask_mod(top, 4),
        "vsa, edge tiles": masks.generate_vsa_mask_mod(top, 4, sizes),
        "vsa_block_map": vsa.generate_vsa_block_map_mask_mod(torch.rand(2, 4, 8, 8) < 0.4, 4, sizes),
        "vsa_padding": vsa.generate_vsa_padding_mask_mod(sizes, 4),
    }.items():
        rule, shape = function if isinstance(function, tuple) else (function, SIZES)
        yield name, "mask", rule, [], shape
    spatial, edge, rope, key_rope = floats(4, 5), floats(4, 3, 5), floats(2, 4, N, 6), floats(2, 1, N, 6)
    distances = mods.shortest_path_distances(adjacency, 3)
    paths = mods.shortest_path_edge_types(adjacency, edges, 3)
    near = mods.generate_graphormer_spatial_bias(spatial, distances)
    far = mods.generate_graphormer_edge_bias(edge, *paths)
    functional = torch.nn.functional
    for name, rule, tensors in (
        ("activation(gelu)", mods.generate_activation_score_mod(), []),
        ("activation(relu)", mods.generate_activation_score_mod(torch.relu), []),
        ("activation(sigmoid)", mods.generate_activation_score_mod(torch.sigmoid), []),
        ("activation(silu)", mods.generate_activation_score_mod(functional.silu), []),
        ("alibi", mods.generate_alibi_bias(4), []),
        ("graphormer_spatial", near, [spatial]),
        ("graphormer_edge", far, [edge]),
        ("graphormer", lambda s, b, h, i, j: far(near(s, b, h, i, j), b, h, i, j), [spatial, edge]),
        ("mla_rope", mods.generate_mla_rope_score_mod(rope, key_rope, 4, 0.5), [rope, key_rope]),
        ("sandwich", doubled(mods.generate_sandwich_bias(4, N, 16)), []),
        ("tanh_softcap", mods.generate_tanh_softcap(20), []),
        ("tanh_softcap, approximate", mods.generate_tanh_softcap(20, approx=True), []),
    ):
        yield name, "score", rule, tensors, SIZES


def definitions(checkout: Path, name: str) -> Any:
    """The part of a file of flash-attention's tests that needs PyTorch alone, as a module."""
    text = (checkout / "tests" / "cute" / name).read_text()
    functions = re.findall(r"^def [^\n]*(?:\n(?:[ \t)][^\n]*)?)*", text, re.MULTILINE)
    kept = [x for x in functions if "cute." not in x and "cutlass" not in x]
    numbers = re.findall(r"^[A-Z_]+ = [\d.]+$", text, re.MULTILINE)
    module = sys.modules[name.removesuffix(".py")] = types.ModuleType(name.removesuffix(".py"))
    source = "import math, random\nimport torch\nfrom typing import *\n" + "\n".join([*numbers, *kept])
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def flash(checkout: Path) -> Iterator[Case]:
    """The functions in FlexAttention's form beside which flash-attention tests its kernels."""
    scores, masks = (definitions(checkout, f"{name}_mod_definitions.py") for name in ("score", "mask"))
    for name in (
        "identity", "causal", "rel_bias", "rel_bias_clamped", "rel_bias_x2", "times_two", "alibi", "sliding_window",
        "block_diagonal", "causal_v2", "squared",
    ):  # fmt: skip
        yield name, "score", getattr(scores, f"{name}_eager"), [], SIZES
    ends = torch.tensor([0, N, 2 * N])
    batch, head, each, many, also = floats(2), floats(4), floats(N), floats(2 * N), floats(2 * N)
    for name, tensors, arguments in (
        ("batch_bias", [batch], (batch,)),
        ("dual_buffer", [head, each], (head, each)),
        ("packed_kv_bias", [many], (many, ends)),
        ("packed_q_bias", [many], (many, ends)),
        ("packed_rel_plus_kv_bias", [many], (many, ends)),
        ("packed_q_and_kv_bias", [many, also], (many, also, ends, ends)),
        ("packed_logical_rel_plus_kv_bias", [many], (many, ends)),
        ("stress_complex_arithmetic", [many], (many, ends)),
        ("stress_conditional_mask", [many], (many, ends, ends)),
        ("stress_multi_buffer", [batch, head, many, also], (batch, head, many, also, floats(1025), ends, ends)),
        ("stress_global_offset", [many], (many, ends)),
        ("stress_xor_pattern", [many], (many, ends, ends)),
        ("debug_global_idx", [], (many, ends)),
        ("scaled_squared", [many], (many, ends)),
    ):
        yield name, "score", getattr(scores, f"{name}_factory")(*arguments), tensors, SIZES
    documents, thresholds = torch.arange(N).expand(2, 4, N) // 5, torch.randint(0, N, (N,)).sort().values // 2
    packed = torch.arange(2 * N) // 7
    document, ima = masks.flex_document_mask, masks.flex_ima_mask
    for name, rule in {
        "causal mask": masks.get_flex_causal_mask(0),
        "block_causal mask": masks.get_flex_block_causal_mask(3),
        "sliding_window mask": masks.get_flex_sliding_window_mask(4, 2, 0),
        "block_diagonal mask": masks.flex_block_diagonal_mask,
        "mini_causal mask": masks.flex_mini_causal_mask,
        "prefix_lm mask": masks.flex_prefix_lm_mask,
        "dilated_sliding_window mask": masks.flex_dilated_sliding_window_mask,
        "document mask": lambda b, h, i, j: document(b, h, i, j, documents),
        "ima mask": lambda b, h, i, j: ima(b, h, i, j, thresholds),
        "global_packed_doc mask": masks.global_packed_doc_flex_factory(packed, packed, ends, ends)(1, N, N),
        "global_ima mask": masks.global_ima_flex_factory(packed, ends)(1, N, N),
        "global_causal_window mask": masks.global_causal_window_flex_factory(packed, ends)(1, N, N),
    }.items():
        yield name, "mask", rule, [], SIZES


def wrong(case: Case, attend: Function) -> str:
    """Why a function does not pass, or nothing. attend: of (q, k, v, score, mask)."""
    _, argument, rule, tensors, (b, h, n_q, n_k) = case
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(b, h, n, 8, generator=generator).requires_grad_() for n in (n_q, n_k, n_k)]
    functions = (rule, None) if argument == "score" else (None, rule)
    try:
        theirs = dense(*inputs, *functions)
    except Exception as error:
        return f"runs in no vmap either: {type(error).__name__}"
    try:
        ours = attend(*inputs, *functions)
        pairs = [(ours, theirs), *zip(*(
            torch.autograd.grad(x.square().sum(), [*inputs, *tensors], materialize_grads=True) for x in (ours, theirs)
        ), strict=True)]  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    far = max((x - y).abs().max().item() for x, y in pairs)
    return "" if far < 1e-9 else f"WRONG by {far:.1e}"


def rule(q: Any, k: Any, v: Any, score: Function | None, mask: Function | None) -> torch.Tensor:
    """`regard.attention`, whose first query has index 0, as FlexAttention's."""
    out: torch.Tensor = regard.attention(q, k, v, score=score, mask=mask, offset=0, engine="tiled")
    return out


def drop_in(q: Any, k: Any, v: Any, score: Function | None, mask: Function | None) -> torch.Tensor:
    """`regard.torch.flex_attention`, with a `BlockMask` of the function."""
    sizes = *q.shape[:3], k.shape[2]
    made = None if mask is None else create_block_mask(mask, *sizes, device="cpu", BLOCK_SIZE=8)
    out: torch.Tensor = regard.torch.flex_attention(q, k, v, score, made)
    return out


def compiled(q: Any, k: Any, v: Any, score: Function | None, mask: Function | None) -> torch.Tensor:
    """A rule in a graph that is traced as a whole."""
    torch._dynamo.reset()
    call = torch.compile(partial(rule, score=score, mask=mask), fullgraph=True, backend="aot_eager")
    out: torch.Tensor = call(q, k, v)
    return out


def run(checkout: Path, of: Callable[[Path], Iterator[Case]]) -> int:
    """Print how many functions of a checkout run unchanged; the number of others that run elsewhere."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    cases, failed = list(of(checkout)), 0
    for attend in (rule, drop_in, compiled):
        reasons = {case[0]: wrong(case, attend) for case in cases}
        for name, reason in reasons.items():
            if reason:
                print(f"  {name}: {reason.splitlines()[0]}")
        passed = sum(not reason for reason in reasons.values())
        print(f"{of.__name__}, {attend.__name__}: {passed} of {len(cases)} run unchanged and are right", flush=True)
        failed += sum(bool(reason) and not reason.startswith("runs in no") for reason in reasons.values())
    return failed


def time() -> int:
    """Print the forward times of PyTorch's compiled function and of the drop-in, in turns, on one thread."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 8, 2048, 64)
    documents = torch.arange(2048) // 300
    causal, packed = (
        create_block_mask(mask, None, None, 2048, 2048, device="cpu")
        for mask in (lambda b, h, i, j: i >= j, lambda b, h, i, j: (i >= j) & (documents[i] == documents[j]))
    )
    for name, score, mask in (
        ("no function", None, None),
        ("causal", None, causal),
        ("causal, documents", None, packed),
        ("causal, ALiBi", lambda s, b, h, i, j: s + (j - i) * torch.exp2(-(h + 1.0)), causal),
        ("causal, soft cap", lambda s, b, h, i, j: 20 * torch.tanh(s / 20), causal),
    ):
        torch._dynamo.reset()
        theirs = torch.compile(flex_attention)
        took: dict[Function, list[float]] = {theirs: [], regard.torch.flex_attention: []}
        with torch.no_grad():
            for _ in range(10):
                for function, seconds in took.items():
                    began = perf_counter()
                    function(q, k, v, score, mask)
                    seconds.append(perf_counter() - began)
        (first, *others), (our_first, *ours) = took.values()
        print(
            f"{name}: PyTorch {1e3 * median(others):.0f} ms, regard {1e3 * median(ours):.0f}, "
            f"ratio {median(others) / median(ours):.2f} (minima {min(others) / min(ours):.2f}); "
            f"first call {first:.1f} s and {our_first:.1f} s",
            flush=True,
        )
    return 0
