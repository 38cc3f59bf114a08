"""`flex_attention` beside whole rows, in float64 with gradients, and in the place of PyTorch's.

The functions are those of PyTorch's own tests of FlexAttention, by their names there, written anew.
"""

import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as original
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, noop_mask, or_masks

import regard.torch
from dense import attend, same
from flex_dense import dense, scores_of
from regard.torch.dropins import flex as dropin

pytestmark = pytest.mark.engine("tiled")

B, H, N, D = 2, 4, 24, 4
Function = Callable[..., Any]
BOTH = AuxRequest(lse=True, max_scores=True)
flex_attention = regard.torch.flex_attention


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    """Floats of indices are float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def operands(*sizes: int, b: int = B, h: int = H, h_kv: int = H, b_kv: int = B, n_k: int = N) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    n_q, d, d_v = (*sizes, N, D, D)[:3]
    shapes = (b, h, n_q, d), (b_kv, h_kv, n_k, d), (b_kv, h_kv, n_k, d_v)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


G = torch.Generator().manual_seed(1)
HEADS, BATCHES, TOKENS = (torch.randn(n, dtype=torch.float64, generator=G) for n in (H, B, N))
ROWS = torch.randn(B, N, dtype=torch.float64, generator=G)
PAIRS = torch.randn(B, H, N, N, dtype=torch.float64, generator=G)
RELATIVE = torch.randn(2 * N, dtype=torch.float64, generator=G)
TRAINED = [HEADS, BATCHES, TOKENS, ROWS, PAIRS, RELATIVE]
DOCUMENTS, LENGTHS, STARTS = torch.arange(N) // 7, torch.tensor([5, 17]), torch.tensor([0, 7, 14, 21])
LATE, ONE, ZERO = torch.arange(N) >= N // 2, torch.tensor(1), torch.tensor(0)
TRIANGLE = torch.ones(B, 1, N, N, dtype=torch.bool).tril()
LONGER = torch.linspace(0, 1, B + H + 1)
INF = float("inf")


def causal(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where(i >= j, s, -INF)


SCORES: dict[str, Function] = {
    "identity": lambda s, b, h, i, j: s,
    "times_two": lambda s, b, h, i, j: s * 2,
    "squared": lambda s, b, h, i, j: s * s,
    "causal": causal,
    "inverse_causal": lambda s, b, h, i, j: torch.where(i <= j, s, -INF),
    "rel_bias": lambda s, b, h, i, j: s + (i - j),
    "rel_causal": lambda s, b, h, i, j: torch.where(i >= j, s + (i - j), -INF),
    "alibi_bias": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / H)),
    "head_offset": lambda s, b, h, i, j: s * HEADS[h],
    "trig": lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b),
    "trig2": lambda s, b, h, i, j: torch.sin(s) * torch.cos(s) + torch.tan(b),
    "doc_mask_sparse": lambda s, b, h, i, j: torch.where((i >= j) & (DOCUMENTS[i] == DOCUMENTS[j]), s, -INF),
    "longer than the call": lambda s, b, h, i, j: s + LONGER[b] * LONGER[h],
    "index_multiple": lambda s, b, h, i, j: s + ROWS[b][i],
    "index_weird1": lambda s, b, h, i, j: s + PAIRS[0][h, i][j],
    "index_weird2": lambda s, b, h, i, j: s + PAIRS[b][h][ZERO, i],
    "skip_odd_keys": lambda s, b, h, i, j: torch.where(j % 2 == 0, s, -INF),
    "function_composition": lambda s, b, h, i, j: torch.where(i <= j, s + (i - j), -INF),
    "captured_buffers_all_dims": lambda s, b, h, i, j: s + TOKENS[i] + BATCHES[b] + HEADS[h],
    "seq_masking": lambda s, b, h, i, j: torch.where(LATE[i] == LATE[j], s, -INF),
    "bias_seq_only": lambda s, b, h, i, j: s + PAIRS[0, 0][i, j],
    "bias_seq_batch": lambda s, b, h, i, j: s + PAIRS[:, 1][b, i, j],
    "bias_head_seq_batch": lambda s, b, h, i, j: s + PAIRS[b, h, i, j],
    "rel_bias, captured": lambda s, b, h, i, j: s + RELATIVE[(i - j) + N],
    "dependent_causal_bidirectional": lambda s, b, h, i, j: torch.where(
        ((i <= LENGTHS[b]) & (j <= LENGTHS[b])) | (i >= j), s, -INF
    ),
    "natten_2d": lambda s, b, h, i, j: torch.where(
        ((i / 6 - j / 6).abs() <= 3) | ((i % 6 - j % 6).abs() <= 1), s, -INF
    ),
    "respect_decomposition": lambda s, b, h, i, j: s - i // (1 + j),
    "silu_on_score": lambda s, b, h, i, j: torch.nn.functional.silu(s),
    "padded_dense_causal": lambda s, b, h, i, j: torch.where(s <= LENGTHS[b] - 4, causal(s, b, h, i, j), -INF),
    "captured_scale": lambda s, b, h, i, j: s + ONE,
    "captured_reduction": lambda s, b, h, i, j: s + ROWS[b].sum(dim=-1),
    "njt_causal": lambda s, b, h, i, j: causal(s, b, h, i - STARTS[DOCUMENTS[i]], j - STARTS[DOCUMENTS[j]]),
    "new_empty_mask_mod": lambda s, b, h, i, j: s + TRIANGLE[b, h.new_zeros(h.shape), i, j],
    "logit_softcap": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
}
MASKS: dict[str, tuple[Function, tuple[Any, Any]]] = {  # with the B and H of create_block_mask
    "causal_block": (lambda b, h, i, j: i >= j, (1, 1)),
    "causal_slidewindow": (lambda b, h, i, j: (i >= j) & (i <= j + 6), (1, None)),
    "and_masks": (and_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: i - j <= 9), (1, 1)),
    "or_masks": (or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: i < j), (1, 1)),
    "noop_mask": (noop_mask, (None, None)),
    "document_masking_edge_case": (lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], (2, 1)),
    "new_empty_mask_mod": (lambda b, h, i, j: TRIANGLE[b, h.new_zeros(h.shape), i, j], (B, None)),
    "fully_masked_out_rows": (lambda b, h, i, j: i < N // 2, (B, 1)),
    "head_dependent": (lambda b, h, i, j: (i - j <= 3 * h) & (j <= i + h), (1, H)),
    "weird": (lambda b, h, i, j: (j < 4) | (j >= 20), (None, None)),
    "prefix of each batch": (lambda b, h, i, j: (j < LENGTHS[b]) | (i == j), (B, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    inputs = operands()
    for x in TRAINED:
        x.requires_grad_()
    same(flex_attention(*inputs, SCORES[name]), dense(*inputs, SCORES[name]), [*inputs, *TRAINED])


@pytest.mark.parametrize("size", [8, (4, 16)])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, size: Any) -> None:
    function, (b, h) = MASKS[name]
    mask, inputs = create_block_mask(function, b, h, N, N, device="cpu", BLOCK_SIZE=size), operands()
    same(flex_attention(*inputs, block_mask=mask), dense(*inputs, None, function), inputs)
    assert torch.equal(flex_attention(*inputs, block_mask=mask), flex_attention(*inputs, None, mask, kernel_options={}))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((N // 2,), {}),  # different_seqlen
        ((N,), {"n_k": 10}),
        ((N, 6, 3), {}),  # non_equal_head_dims
        ((N,), {"h": 4, "h_kv": 2}),  # GQA
        ((N,), {"b": 3, "b_kv": 1}),  # kv_batch_broadcast
        ((1,), {"h": 4, "h_kv": 1}),
        ((23,), {"n_k": 23}),  # block_mask_non_divisible
    ],
)
def test_shapes(sizes: tuple[int, ...], options: Any) -> None:
    inputs, function = operands(*sizes, **options), MASKS["causal_slidewindow"][0]
    (b, h, n_q, _), (_, h_kv, n_k, _) = inputs[0].shape, inputs[1].shape
    mask = create_block_mask(function, b, None, n_q, n_k, device="cpu", BLOCK_SIZE=8)
    ours, aux = flex_attention(*inputs, SCORES["rel_bias"], mask, 0.7, h != h_kv, return_aux=BOTH)
    whole = [inputs[0], *(x.expand(b, -1, -1, -1) for x in inputs[1:])]
    scores = scores_of(whole[0], whole[1], SCORES["rel_bias"], function, 0.7)
    same(ours, attend(scores, whole[2])[0], inputs)
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


def test_lse_and_rows_without_keys() -> None:
    function = MASKS["fully_masked_out_rows"][0]
    mask, inputs = create_block_mask(function, 1, 1, N, N, device="cpu", BLOCK_SIZE=8), operands()
    out, aux = flex_attention(*inputs, SCORES["times_two"], mask, return_aux=BOTH)
    scores = scores_of(inputs[0], inputs[1], SCORES["times_two"], function)
    for found, expected in ((aux.lse, scores.logsumexp(-1)), (aux.max_scores, scores.amax(-1))):
        assert (found[:, :, N // 2 :] == -INF).all()
        torch.testing.assert_close(found, expected)
    assert (out[:, :, N // 2 :] == 0).all()
    seen = slice(0, N // 2)
    same(aux.lse[..., seen], scores.logsumexp(-1)[..., seen], inputs)
    assert not aux.max_scores.requires_grad
    assert torch.equal(flex_attention(*inputs, SCORES["times_two"], mask, return_lse=True)[1], aux.lse)
    out, aux = flex_attention(*inputs, return_aux=AuxRequest())
    assert aux == (None, None)


def test_tables_that_say_less_than_their_function_count() -> None:
    counts, indices = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[0, 9, 9], [2, 0, 9], [9, 9, 9]]]])
    full, full_indices = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[1, 0, 0], [9, 9, 9], [2, 9, 9]]]])
    inputs, function = operands(), MASKS["causal_block"][0]
    mask = BlockMask.from_kv_blocks(counts, indices, full, full_indices, 8, function, compute_q_blocks=False)
    blocks = torch.zeros(2, 3, 3, dtype=torch.bool)
    for n, at in ((0, (0, 0)), (0, (1, 2)), (0, (1, 0)), (1, (0, 1)), (1, (2, 2))):
        blocks[(n, *at)] = True
    listed, whole = blocks.repeat_interleave(8, 1).repeat_interleave(8, 2)
    visible = whole | (listed & torch.ones(N, N).tril().bool())
    same(flex_attention(*inputs, None, mask), dense(*inputs, None, lambda b, h, i, j: visible[i, j]), inputs)
    compiled = torch.compile(lambda *x: flex_attention(*x, None, mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), flex_attention(*inputs, None, mask))


@pytest.mark.parametrize("name", MASKS)
def test_tables_that_follow_from_their_function_cost_nothing(name: str) -> None:
    """Bounds prove it where they are exact: not of two comparisons of which one or the other always holds."""
    function, (b, h) = MASKS[name]
    mask = create_block_mask(function, b, h, N, N, device="cpu", BLOCK_SIZE=8)
    rule = dropin._visible(mask, *operands()[:2])
    assert ("blocks(" in str(rule)) == (name == "or_masks"), rule


def test_every_derivative() -> None:
    slopes = torch.rand(H, dtype=torch.float64)
    mask = create_block_mask(MASKS["causal_block"][0], None, None, N, N, device="cpu", BLOCK_SIZE=8)
    inputs = (*(x.detach() for x in operands()), slopes)

    def both(ours: bool) -> Function:
        def out(q: Any, k: Any, v: Any, w: Any) -> Any:
            functions = (lambda s, b, h, i, j: torch.sin(s) * w[h]), MASKS["causal_block"][0]
            return flex_attention(q, k, v, functions[0], mask) if ours else dense(q, k, v, *functions)

        return out

    tangents = tuple(torch.linspace(-1, 1, x.numel()).reshape(x.shape) for x in inputs)
    cotangent = torch.randn(B, H, N, D)
    for transform in (
        lambda f: torch.func.jvp(f, inputs, tangents),
        lambda f: torch.func.vjp(f, *inputs)[1](cotangent),
        lambda f: torch.func.jvp(lambda *x: torch.func.vjp(f, *x)[1](cotangent), inputs, tangents)[1],
        lambda f: torch.func.vmap(f, (0, None, None, None))(torch.stack([inputs[0], -inputs[0]]), *inputs[1:]),
        lambda f: torch.func.vmap(f, (None, None, None, 0))(*inputs[:3], torch.stack([slopes, -slopes])),
    ):
        torch.testing.assert_close(transform(both(True)), transform(both(False)))
    leaves = [x.clone().requires_grad_() for x in inputs]
    for second in zip(
        *(
            torch.autograd.grad(sum(x.square().sum() for x in torch.autograd.grad(
                f(*leaves).square().sum(), leaves, create_graph=True
            )), leaves) for f in map(both, (True, False))
        ),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(*second)


@pytest.mark.parametrize("names", [("rel_bias", "head_dependent"), ("head_offset", "document_masking_edge_case")])
def test_in_a_graph(names: tuple[str, str]) -> None:
    inputs, (function, sizes) = operands(), MASKS[names[1]]
    mask = create_block_mask(function, *sizes, N, N, device="cpu", BLOCK_SIZE=8)
    HEADS.requires_grad_()

    def call(*x: torch.Tensor) -> Any:
        out, aux = flex_attention(*x, SCORES[names[0]], mask, return_aux=BOTH)
        return out, aux.lse, aux.max_scores

    ours = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(ours, call(*inputs))
    same(ours[0], call(*inputs)[0], [*inputs, HEADS])


@pytest.mark.engine("cpu")
def test_the_compiled_engine() -> None:
    inputs, function = operands(), MASKS["causal_slidewindow"][0]
    mask = create_block_mask(function, 1, 1, N, N, device="cpu", BLOCK_SIZE=8)
    HEADS.requires_grad_()
    same(flex_attention(*inputs, SCORES["head_offset"], mask), dense(*inputs, SCORES["head_offset"], function), inputs)


WRONG: dict[str, Function] = {
    "dimensions": lambda f, q, m: f(q[0], q[0], q[0]),
    "one dimension": lambda f, q, m: f(q[0, 0, 0], q, q),
    "head dimension": lambda f, q, m: f(q, q[..., :2], q),
    "heads": lambda f, q, m: f(q, q[:, :2], q[:, :2]),
    "GQA": lambda f, q, m: f(q, q[:, :3], q[:, :3], enable_gqa=True),
    "batch without a mask": lambda f, q, m: f(q, q[:1], q[:1]),
    "batch of the mask": lambda f, q, m: f(q[:1].expand(3, -1, -1, -1), q[:1], q[:1], block_mask=m),
    "a shorter mask": lambda f, q, m: f(*[q.repeat(1, 1, 2, 1)] * 3, block_mask=m),
    "a longer mask": lambda f, q, m: f(*[q[:, :, :9]] * 3, block_mask=m),
    "a sliced mask": lambda f, q, m: f(q, q, q, block_mask=m[:, :, :3]),
    "both of lse": lambda f, q, m: f(q, q, q, return_lse=True, return_aux=BOTH),
    "nested": lambda f, q, m: f(*[torch.nested.nested_tensor([q[0], q[1]])] * 3),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_wrong_use_raises_what_pytorch_raises(name: str) -> None:
    q = operands()[0].detach()
    mask = create_block_mask(MASKS["causal_block"][0], 1, 1, N, N, device="cpu", BLOCK_SIZE=8)
    with pytest.raises(Exception) as theirs:  # noqa: PT011  # PyTorch's own, whatever it is
        WRONG[name](original.flex_attention, q, mask)
    with pytest.raises(theirs.type):
        WRONG[name](flex_attention, q, mask)


def test_what_a_function_cannot_do_is_named() -> None:
    q = operands()[0]
    for function, text in (
        (lambda s, b, h, i, j: torch.cumsum(s, 0), "torch.cumsum is not available in a rule"),
        (lambda s, b, h, i, j: s if i > j else -s, "no truth value"),
    ):
        with pytest.raises(TypeError, match=text):
            flex_attention(q, q, q, function)
    with pytest.raises(TypeError, match="block_mask must be a BlockMask, got function"):
        flex_attention(q, q, q, block_mask=noop_mask)
    flat = BlockMask.from_kv_blocks(torch.ones(3).int(), torch.zeros(3, 3).int(), BLOCK_SIZE=8)
    with pytest.raises(ValueError, match=r"block_mask must have batch and heads, got tables of shape \(3, 3\)"):
        flex_attention(q, q, q, block_mask=flat)
    nothing = original._create_empty_block_mask(q, q)  # which callers hand on
    assert torch.equal(flex_attention(q, q, q, None, nothing), flex_attention(q, q, q))


def test_flex_replaces_every_reference() -> None:
    user = types.ModuleType("a user's module")
    theirs: Any = original.flex_attention
    user.own, user.compiled, user.other = theirs, torch.compile(theirs), math.sin  # type: ignore[attr-defined]
    before = dict(vars(user))
    sys.modules[user.__name__] = user
    try:
        with regard.torch.flex():
            with regard.torch.flex():
                assert user.own is user.compiled is original.flex_attention is flex_attention
            assert user.own is flex_attention
            assert user.other is math.sin
            q = operands()[0]
            user.compiled(q, q, q, SCORES["head_offset"]).sum().backward()
        assert dict(vars(user)) == before
        assert original.flex_attention is theirs
    finally:
        del sys.modules[user.__name__]


def test_flex_serves_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.set_default_dtype(torch.float32)
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids, mask = torch.randint(1, 30, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    results = []
    for name in ("eager", "flex_attention"):
        model.set_attn_implementation(name)
        model.zero_grad()
        with regard.torch.flex(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        results.append([logits, *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    held = sys.modules["transformers.integrations.flex_attention"]
    assert held.WrappedFlexAttention._instance is None
    assert held.flex_attention is original.flex_attention
