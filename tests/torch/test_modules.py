"""Attention modules: against PyTorch's own and `regard.multihead_attention`; the example model written in them."""

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.examplemodel import ExampleModel, repeated_bytes
from regard.positions import LinearScaling, YaRNScaling, alibi_slopes, rope
from regard.rules import At, evaluate
from regard.torch import Alibi, FeedForward, KVCache, MultiHeadAttention, Relative, Rope, Transformer, TransformerBlock
from regard.torch.public.padding import real_keys
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

nn = torch.nn
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # float64, and sums of some dozen terms in another order


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def randomized(module: Any) -> Any:
    """With random parameters, those too that begin at zero or one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return module


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, **CLOSE)


# From PyTorch's modules


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 5, "vdim": 7}, {"add_zero_attn": True}, {"kdim": 12, "vdim": 12, "bias": False}],
    ids=repr,
)
def test_multihead_attention_from_torch(options: dict[str, Any]) -> None:
    theirs = randomized(nn.MultiheadAttention(12, 3, dtype=torch.float64, batch_first=True, **options))
    ours = MultiHeadAttention.from_torch(theirs)
    query, key, value = randn(2, 4, 12), randn(2, 6, options.get("kdim", 12)), randn(2, 6, options.get("vdim", 12))
    hidden = torch.tensor([[False] * 6, [False, True, False, False, True, True]])
    blocked = torch.rand(4, 6) < 0.3
    blocked[:, 0] = False
    expected, weights = theirs(query, key, value, key_padding_mask=hidden, attn_mask=blocked)
    out, mean = ours(query, key, value, key_padding_mask=~hidden, mask=~blocked, return_weights="mean")
    close(out, expected)
    close(mean, weights[..., :6])
    _, heads = ours(query, key, value, key_padding_mask=~hidden, mask=~blocked, return_weights=True)
    close(heads.mean(-3), mean)

    expected.square().sum().backward()
    out.square().sum().backward()
    close(ours.w_o.weight.grad, theirs.out_proj.weight.grad)
    if theirs.in_proj_weight is not None:
        close(torch.cat([w.weight.grad for w in (ours.w_q, ours.w_k, ours.w_v)]), theirs.in_proj_weight.grad)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.nn.functional.silu])
@pytest.mark.parametrize("bias", [True, False])
def test_encoder_layer_from_torch(norm_first: bool, activation: Any, bias: bool) -> None:
    options = {"norm_first": norm_first, "activation": activation, "bias": bias, "layer_norm_eps": 1e-3}
    theirs = randomized(nn.TransformerEncoderLayer(12, 3, 20, dtype=torch.float64, batch_first=True, **options)).eval()
    ours = TransformerBlock.from_torch(theirs)
    x, hidden = randn(2, 5, 12), torch.tensor([[False] * 5, [False, False, True, False, True]])
    close(ours(x, key_padding_mask=~hidden), theirs(x, src_key_padding_mask=hidden))
    assert not ours.training


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_layer_from_torch(norm_first: bool) -> None:
    theirs = nn.TransformerDecoderLayer(12, 3, 20, dtype=torch.float64, batch_first=True, norm_first=norm_first)
    theirs = randomized(theirs).eval()
    ours = TransformerBlock.from_torch(theirs, causal=True)
    x, memory, hidden = randn(2, 5, 12), randn(2, 4, 12), torch.tensor([[False] * 4, [True, False, True, False]])
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=hidden)
    close(ours(x, memory, context_padding_mask=~hidden), expected)


def test_stacks_from_torch() -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 20, dtype=torch.float64, batch_first=True, norm_first=True, dropout=0.0)
    norm = nn.LayerNorm(12, dtype=torch.float64)
    encoder = randomized(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))
    x = randn(2, 5, 12)
    close(Transformer.from_torch(encoder)(x), encoder(x))
    layer = nn.TransformerDecoderLayer(12, 3, 20, dtype=torch.float64, batch_first=True, dropout=0.0)
    decoder = randomized(nn.TransformerDecoder(layer, 2))
    close(Transformer.from_torch(decoder)(x, x), decoder(x, x))


def test_what_is_taken_from_torch_is_copied() -> None:
    theirs = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
    ours, x = TransformerBlock.from_torch(theirs), torch.randn(2, 5, 12)
    before = ours(x)
    randomized(theirs)
    assert torch.equal(ours(x), before)


def test_what_torch_has_and_regard_has_not() -> None:
    with pytest.raises(ValueError, match="add_bias_kv=True, a key and value of its own, has no counterpart here"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(12, 3, add_bias_kv=True))
    with pytest.raises(TypeError, match=r"from_torch takes a nn.TransformerEncoderLayer or .*, got Linear"):
        TransformerBlock.from_torch(nn.Linear(3, 3))


# Multi-head attention


@pytest.mark.parametrize("bias", on_cpu([True, False, "qk"], True))
def test_attention_is_that_of_numpy(bias: bool | str) -> None:
    module = MultiHeadAttention(
        12, 4, num_kv_heads=2, head_dim=5, value_head_dim=3, bias=bias, causal=True, mask=regard.window(3),
        score=regard.softcap(2.0), scale=0.7, dtype=torch.float64,
    )  # fmt: skip
    x = randn(2, 3, 6, 12)
    w = arrays(randomized(module))
    expected, weights = regard.multihead_attention(
        x.numpy(), x.numpy(), x.numpy(), 4, num_kv_heads=2, **w, causal=True, mask=regard.window(3),
        score=regard.softcap(2.0), scale=0.7, return_weights=True,
    )  # fmt: skip
    out, got = module(x, return_weights="heads")
    np.testing.assert_allclose(out.detach(), expected, **CLOSE)
    np.testing.assert_allclose(got.detach(), weights, **CLOSE)
    np.testing.assert_allclose(module(x[0, 0]).detach(), expected[0, 0], **CLOSE)
    assert set(w) == {"w_q", "w_k", "w_v", "w_o", *(f"b_{c}" for c in ("qkvo" if bias is True else bias or ""))}


def arrays(module: Any) -> dict[str, Any]:
    """The parameters as `regard.multihead_attention` takes them."""
    state = {name: x.numpy() for name, x in module.state_dict().items()}
    found = {name.split(".")[0]: x.T for name, x in state.items() if name.endswith(".weight")}
    return found | {f"b_{name[2]}": x for name, x in state.items() if name.endswith(".bias")}


@pytest.mark.parametrize("positions", [None, "rope", "alibi", "relative", Relative(4, num_buckets=8, max_distance=9)])
def test_positions_in_a_module(positions: Any) -> None:
    scores = [regard.softcap(0.5)] if positions in ("rope", "alibi") else []  # positions are added after them
    module = randomized(MultiHeadAttention(16, 4, positions=positions, causal=True, score=scores or None).double())
    x = randn(2, 7, 16)
    q, k, v = (
        w(x).unflatten(-1, (4, 4)).transpose(1, 2).detach().numpy() for w in (module.w_q, module.w_k, module.w_v)
    )
    if positions == "rope":
        q, k = rope(q), rope(k)
    elif positions == "alibi":
        scores.append(regard.alibi(alibi_slopes(4)))
    elif positions is not None:
        table = module.positions.table.detach().numpy()
        options = {} if positions == "relative" else {"buckets": "t5", "max_distance": 9}
        scores.append(regard.relative(table, **options))
    expected = regard.attention(q, k, v, causal=True, score=scores).swapaxes(1, 2).reshape(2, 7, 16)
    out = module(x)
    close(out, module.w_o(torch.from_numpy(expected)))
    if isinstance(module.positions, Relative):
        out.square().sum().backward()
        assert (module.positions.table.grad != 0).any()


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0), YaRNScaling(4.0, 32)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rope_is_that_of_numpy(pairing: Any, scaling: Any, dtype: Any) -> None:
    x = torch.randn(2, 5, 3, 8).to(dtype)
    options = {"base": 100.0, "pairing": pairing, "scaling": scaling}
    expected = rope(as_numpy(x), np.arange(4, 9), dim=6, layout="bnhd", **options)
    got = as_numpy(Rope(6, **options)(x, first=4))
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=4 * eps, atol=4 * eps)


def as_numpy(x: Any) -> Any:
    import ml_dtypes

    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def test_a_sink_takes_weight() -> None:
    module = randomized(MultiHeadAttention(8, 2, sink=True).double())
    x = randn(3, 8)
    q, k, v = (w(x).unflatten(-1, (2, 4)).transpose(0, 1) for w in (module.w_q, module.w_k, module.w_v))
    close(module(x), module.w_o(regard.attention(q, k, v, sink=module.sink).transpose(0, 1).flatten(-2)))
    module(x).sum().backward()
    assert (module.sink.grad != 0).all()


def test_a_query_that_sees_nothing_gives_the_bias() -> None:
    module = randomized(MultiHeadAttention(8, 2))
    x = torch.randn(2, 3, 8)
    out = module(x, key_padding_mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
    assert torch.equal(out[1], module.w_o.bias.expand(3, 8))


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ([[1, 1, 1], [1, 0, 0]], "padding"),
        ([[0, 0, 0], [1, 1, 0]], "padding"),
        ([[1, 1, 0]], "padding"),
        ([[1, 1, 1], [0, 1, 1]], "mask(padding)"),
        ([[1, 0, 1], [1, 1, 1]], "mask(padding)"),
        ([[1, 1, 1], [1, 1, 1]], "None"),
    ],
    ids=str,
)
def test_padding_on_the_right_is_its_lengths(flags: list[list[int]], rule: str) -> None:
    real = torch.tensor(flags, dtype=torch.bool)
    found = real_keys(real)
    assert repr(found).startswith(rule)
    if found is not None:
        at = At(np.arange(len(real))[:, None], np.zeros(1, int), np.zeros(1, int), np.arange(3))
        assert np.broadcast_to(evaluate([found.node], at)[0], real.shape).tolist() == real.tolist()


def test_a_padding_mask_may_change_in_place() -> None:
    module, x = MultiHeadAttention(8, 2).double(), randn(2, 5, 8)
    real = torch.tensor([[True] * 5, [True, True, True, False, False]])
    for length in (3, 1, 5):
        real[1] = torch.arange(5) < length
        close(module(x, key_padding_mask=real)[1, :length], module(x[1, :length]))


@pytest.mark.engine("cpu")
def test_padding_has_no_influence() -> None:
    module, x = MultiHeadAttention(8, 2, causal=True, positions="rope").double(), randn(2, 5, 8)
    real = torch.tensor([[True] * 5, [True, True, True, False, False]])
    close(module(x, key_padding_mask=real)[1, :3], module(x[1, :3]))
    x[1, 3:] = torch.nan
    assert module(x, key_padding_mask=real)[1, :3].isfinite().all()


def test_dropout_is_for_training_and_repeats_with_the_seed() -> None:
    module, x = MultiHeadAttention(8, 2, dropout=0.5, bias=False), torch.randn(2, 6, 8)
    torch.manual_seed(4)
    first, second = module(x), module(x)
    torch.manual_seed(4)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)
    module.eval()
    assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("positions", [None, "rope", "alibi", "relative"])
def test_step_by_step_is_all_at_once(positions: Any) -> None:
    options = {"causal": True, "positions": positions, "num_kv_heads": 2, "mask": regard.window(4)}
    module = randomized(MultiHeadAttention(16, 4, **options).double())
    x, cache = randn(2, 9, 16), KVCache()
    with torch.no_grad():
        steps = [module(part, cache=cache) for part in x.split([3, 1, 1, 2, 1, 1], dim=1)]
        close(torch.cat(steps, dim=1), module(x))
    assert len(cache) == 9


def test_a_cache_can_be_reordered() -> None:
    module, x, cache = MultiHeadAttention(8, 2, causal=True).double(), randn(2, 4, 8), KVCache()
    with torch.no_grad():
        module(x[:, :3], cache=cache)
        cache.reorder(torch.tensor([1, 1]))
        close(module(x[:, 3:], cache=cache)[0], module(torch.cat([x[1:, :3], x[:1, 3:]], dim=1))[0, 3:])


def test_a_cache_is_for_inference() -> None:
    with pytest.raises(RuntimeError, match="a KVCache is for inference"):
        MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), cache=KVCache())


# Blocks and stacks


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "swiglu"])
def test_a_block_is_its_formula(norm_first: bool, activation: Any) -> None:
    F = nn.functional
    block = TransformerBlock(12, 3, 20, norm="rms", norm_first=norm_first, activation=activation, bias=False).double()
    block, x = randomized(block), randn(2, 5, 12)
    f = {"gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "relu": F.relu, "silu": F.silu}

    def feed_forward(y: Any) -> Any:
        ff = block.feed_forward
        up = ff.w_up(y)
        return ff.w_down(F.silu(ff.w_gate(y)) * up if activation == "swiglu" else f[activation](up))

    def norm(y: Any, n: Any) -> Any:
        return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * n.weight

    one, two = block.attention_norm, block.feed_forward_norm
    if norm_first:
        y = x + block.attention(norm(x, one))
        expected = y + feed_forward(norm(y, two))
    else:
        y = norm(x + block.attention(x), one)
        expected = norm(y + feed_forward(y), two)
    close(block(x), expected)


def test_a_decoder_step_by_step() -> None:
    decoder = Transformer(
        2, 16, 4, 24, cross_attention=True, context_dim=6, causal=True, positions="rope", norm_first=True
    ).double()  # fmt: skip
    decoder, x, context = randomized(decoder), randn(2, 7, 16), randn(2, 5, 6)
    real = torch.tensor([[True] * 5, [True, False, True, True, False]])
    cache = decoder.new_cache()
    with torch.no_grad():
        expected = decoder(x, context, context_padding_mask=real)
        steps = [decoder(part, context, context_padding_mask=real, cache=cache) for part in x.split([4, 1, 2], dim=1)]
    close(torch.cat(steps, dim=1), expected)


def test_the_example_model_written_in_modules() -> None:
    numpy_model = ExampleModel.load()
    config, weights = numpy_model.config, numpy_model._weights
    model = nn.Sequential(
        nn.Embedding(256, config.width),
        Transformer(
            config.layers, config.width, config.heads, config.hidden, norm="rms", norm_eps=1e-6, norm_first=True,
            activation="gelu_tanh", bias=False, attention_bias="qk", causal=True,
            positions=Rope(config.rotary, base=config.base),
        ),
        nn.Linear(config.width, 256, bias=False),
    )  # fmt: skip
    names = {"attention_norm": "norm1", "feed_forward_norm": "norm2", "w_up": "up", "w_down": "down"}
    found = {}
    for name in model.state_dict():
        index, *parts = name.split(".")
        if parts[0] == "blocks":
            kind = parts[-2]
            short = names.get(kind, kind.removeprefix("w_")) + ("_bias" if parts[-1] == "bias" else "")
            array = weights[f"{parts[1]}.{short}"]
        else:
            array = weights[{"0": "embedding", "1": "norm", "2": "unembedding"}[index]]
        found[name] = torch.from_numpy(np.ascontiguousarray(array if array.ndim == 1 or index == "0" else array.T))
    model.load_state_dict(found)
    ids = np.concatenate([numpy_model.encode("to be or not to be, that is the question: "), repeated_bytes(20)[0]])
    with torch.no_grad():
        got = model(torch.from_numpy(ids)[None])[0].numpy()
    np.testing.assert_allclose(got, numpy_model.run(ids).logits, atol=1e-3)  # what the training script asks for


# As PyTorch's users expect


def test_the_size_of_a_block() -> None:
    block = TransformerBlock(d_model=512, num_heads=8, d_ff=2048)
    theirs = nn.TransformerEncoderLayer(512, 8, 2048)
    assert sum(p.numel() for p in block.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert block(torch.randn(2, 100, 512)).shape == (2, 100, 512)


def test_state_dict_pickle_and_copy() -> None:
    options = {"causal": True, "mask": regard.window(5), "score": regard.softcap(3.0), "positions": "relative"}
    stack = randomized(Transformer(2, 16, 4, sink=True, **options))
    x = torch.randn(2, 7, 16)
    again = Transformer(2, 16, 4, sink=True, **options)
    again.load_state_dict(stack.state_dict())
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for other in (again, copy.deepcopy(stack), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), stack(x))
    assert {name.split(".")[-2] for name in stack.state_dict() if "attention." in name} == {
        "w_q", "w_k", "w_v", "w_o", "positions", "attention",
    }  # fmt: skip


def test_dtype_and_device() -> None:
    stack = Transformer(1, 16, 4, positions="relative", sink=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in stack.parameters()} == {("meta", torch.bfloat16)}
    stack = Transformer(1, 16, 4, positions="rope", causal=True).to(torch.bfloat16)
    out = stack(torch.randn(2, 7, 16, dtype=torch.bfloat16))
    assert out.dtype is torch.bfloat16
    assert Transformer(1, 16, 4).double()(randn(2, 7, 16)).dtype is torch.float64


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"causal": True, "positions": "rope"}, {}),
        ({"positions": "relative", "sink": True, "score": regard.softcap(3.0)}, {"key_padding_mask": 1}),
        ({"mask": regard.window(3)}, {"key_padding_mask": 1, "mask": 1}),
        ({"positions": "alibi"}, {"mask": regard.window(2, 1)}),
    ],
    ids=repr,
)
def test_a_compiled_stack_is_one_graph(options: dict[str, Any], call: dict[str, Any]) -> None:
    stack, x = randomized(Transformer(2, 16, 4, **options).double()), randn(2, 6, 16)
    tensors = {
        "key_padding_mask": torch.tensor([[1] * 6, [1, 0, 1, 1, 0, 0]]),
        "mask": torch.ones(6, 6, dtype=torch.bool).tril(),
    }
    call = {name: tensors[name] if isinstance(given, int) else given for name, given in call.items()}
    torch.compiler.reset()
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    close(compiled(x, **call), stack(x, **call))
    grads = [torch.autograd.grad(f(x, **call).square().sum(), list(stack.parameters())) for f in (compiled, stack)]
    for got, expected in zip(*grads, strict=True):
        close(got, expected)


def test_functional_call_and_per_sample_gradients() -> None:
    module = Transformer(1, 8, 2, positions="rope", causal=True).double()
    parameters, x = dict(module.named_parameters()), randn(3, 4, 8)

    def loss(p: Any, one: Any) -> Any:
        return torch.func.functional_call(module, p, (one[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name, p in parameters.items():
        for n in range(3):
            close(each[name][n], torch.autograd.grad(loss(parameters, x[n]), p)[0])


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (lambda: MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, mask=regard.window(5), sink=True),
         "d_model=16, num_heads=4, num_kv_heads=2, head_dim=4, causal=True, mask=window(5), sink=True"),
        (lambda: MultiHeadAttention(16, 4, value_head_dim=3, dropout=0.1),
         "d_model=16, num_heads=4, head_dim=4, value_head_dim=3, dropout=0.1"),
        (lambda: Rope(8, scaling=LinearScaling(2.0)),
         "dim=8, base=10000, pairing='half', scaling=LinearScaling(factor=2.0)"),
        (lambda: Alibi(4), "num_heads=4"),
        (lambda: Relative(4, num_buckets=32, bidirectional=False),
         "num_heads=4, max_distance=128, num_buckets=32, bidirectional=False"),
        (lambda: FeedForward(4, 8, activation="swiglu"), "activation='swiglu'"),
        (lambda: TransformerBlock(4, 2, norm_first=True), "norm_first=True"),
    ],
)  # fmt: skip
def test_what_modules_show(module: Any, text: str) -> None:
    assert module().extra_repr() == text


X = torch.zeros(2, 3, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiHeadAttention(8, 3), ValueError, "num_heads=3 must divide d_model=8, unless head_dim is given"),
        (lambda: MultiHeadAttention(8, 4, num_kv_heads=3), ValueError,
         "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        (lambda: MultiHeadAttention(8, 2, bias="qx"), ValueError, "bias must be a bool or letters of 'qkvo', got 'qx'"),
        (lambda: MultiHeadAttention(8, 2, dropout=1.0), ValueError, "dropout must be in [0, 1), got 1.0"),
        (lambda: MultiHeadAttention(8, 2, positions="learned"), ValueError,
         "positions must be 'rope', 'alibi', 'relative', or a Rope, Alibi or Relative, got 'learned'"),
        (lambda: MultiHeadAttention(8, 2)(X, value=X), ValueError,
         "value is given without key: self-attention takes query alone, cross-attention both"),
        (lambda: MultiHeadAttention(8, 2)(X, return_weights="all"), ValueError,
         "return_weights must be a bool, 'heads' or 'mean', got 'all'"),
        (lambda: MultiHeadAttention(8, 2)(X, key_padding_mask=torch.ones(2, 4, dtype=torch.bool)), ValueError,
         "key_padding_mask must be (..., n_k) = (2, 3), got (2, 4)"),
        (lambda: MultiHeadAttention(8, 2)(X, key_padding_mask=torch.ones(2, 3)), TypeError,
         "key_padding_mask must be booleans or 0/1 integers, True = attend, got torch.float32"),
        (lambda: FeedForward(8, 8, activation="tanh"), ValueError,
         "activation must be a function or one of gelu, gelu_tanh, relu, silu, swiglu, got 'tanh'"),
        (lambda: TransformerBlock(8, 2, norm="batch"), ValueError, "norm must be 'layer' or 'rms', got 'batch'"),
        (lambda: TransformerBlock(8, 2)(X, X), ValueError, "this block takes no context"),
        (lambda: TransformerBlock(8, 2, cross_attention=True)(X), ValueError,
         "this block has cross-attention: give it a context"),
        (lambda: Transformer(0, 8, 2), ValueError, "num_layers must be at least 1, got 0"),
        (lambda: Rope(8, pairing="pairs"), ValueError, "pairing must be 'half' or 'interleaved', got 'pairs'"),
    ],
)  # fmt: skip
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message
