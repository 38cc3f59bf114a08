"""The table of docs/capture.md, "What holds": each row is a test, against eager weights or those of the parts."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from captures import assert_weights, eager, weights_of
from regard.interpret.capture.captured import Capture
from regard.torch import KVCache, MultiHeadAttention

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")

from small_models import DECODER, MODELS, OTHERS  # noqa: E402

ROWS: dict[str, Callable[[], None]] = {}


def row(text: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        ROWS[text] = check
        return check

    return add


def documented() -> dict[str, str]:
    """The rows of the table: what a model does, and what is captured."""
    text = (Path(__file__).parents[2] / "docs/capture.md").read_text(encoding="utf-8")
    table = text.partition("## What holds")[2].partition("## ")[0]
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)[1:])


def test_every_row_is_tested() -> None:
    assert list(ROWS) == list(documented())


@pytest.mark.parametrize("text", documented())
def test_what_holds(text: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ROWS[text]()
    ours = [x for x in caught if issubclass(x.category, regard.RegardWarning) and "masks of n_q" not in str(x.message)]
    assert len(ours) == ("a warning" in documented()[text]), [str(x.message) for x in ours]


def captured(model: nn.Module, *args: Any, **inputs: Any) -> Capture:
    with regard.capture(model) as seen:
        model(*args, **inputs)
    return seen


class Attention(nn.Module):
    """Self-attention on (..., n, 16) by a function that is given queries, keys and values (..., 2, n, 8)."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(16, 48), attend

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [y.unflatten(-1, (2, 8)).transpose(-2, -3) for y in self.qkv(x).chunk(3, -1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attend(*self.heads(x)).transpose(-2, -3).flatten(-2)

    def weights(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        q, k, _ = self.heads(x)
        return regard.weights(q, k, **options)


def same(layer: Any, weights: torch.Tensor) -> None:
    np.testing.assert_allclose(weights_of(layer), weights.reshape(-1, *weights.shape[-3:]), atol=1e-6)


BOUNDS = [(0, 3), (3, 4), (4, 9)]


def in_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    parts = ((x[..., a:b, :] for x in (q, k, v)) for a, b in BOUNDS)
    return torch.cat([scaled_dot_product_attention(*x, **options) for x in parts], -2)


@row("calls a module several times, as ALBERT does")
def repeats() -> None:
    config = transformers.AlbertConfig(
        vocab_size=60, embedding_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model, ids = transformers.AlbertModel(config).eval(), torch.randint(60, (2, 9))
    seen = captured(model, ids)
    name = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert [layer.name for layer in seen] == [name, f"{name}#2", f"{name}#3", f"{name}#4"]
    np.testing.assert_array_equal(seen.ids(f"{name}#4"), ids)
    for chosen, numbers in ((name, [0, 1, 2, 3]), (f"{name}#3", [2]), (1, [1])):
        with regard.capture(model, layers=[chosen]) as some:
            model(ids)
        assert some.numbers == numbers
    assert_weights(seen, eager(model, input_ids=ids))

    class Axial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.axis = Attention(scaled_dot_product_attention)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.axis(self.axis(x).transpose(1, 2))

    axial, x = Axial(), torch.randn(1, 3, 5, 16)
    first, second = captured(axial, x)
    same(first, axial.axis.weights(x))
    same(second, axial.axis.weights(axial.axis(x).transpose(1, 2)))


@row("attends several times in one call of a module")
def attends_twice() -> None:
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        one, other = (scaled_dot_product_attention(x[..., :1, :, :], y[..., :1, :, :], v[..., :1, :, :])
                      for x, y in ((q, k), (q.flip(-3), k.flip(-3))))  # fmt: skip
        heads = [scaled_dot_product_attention(q[..., h, :, :], k[..., h, :, :], v[..., h, :, :]) for h in range(2)]
        return torch.cat([one - 0.5 * other, torch.stack(heads, -3)], -3)

    model, x = nn.Sequential(Attention(twice)), torch.randn(1, 9, 16)
    seen = captured(model, x)
    assert [layer.name for layer in seen] == ["0", "0#2", "0#3", "0#4"]
    weights = model[0].weights(x)
    for layer, head in zip(seen, (0, 1, 0, 1), strict=True):
        same(layer, weights[:, head, None])


@row("has a module in two places")
def shared() -> None:
    attention = Attention(scaled_dot_product_attention)
    model, x = nn.Sequential(attention, nn.Sequential(nn.Tanh(), attention)), torch.randn(1, 4, 16)
    seen = captured(model, x)
    assert [layer.name for layer in seen] == ["0", "0#2"]
    same(seen[1], attention.weights(attention(x).tanh()))


@row("attends to pieces of a sequence in a loop, such as packed documents")
def pieces() -> None:
    ids = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2])
    for causal in (False, True):
        model = nn.Sequential(nn.Tanh(), Attention(lambda *qkv, causal=causal: in_pieces(*qkv, is_causal=causal)))
        for x in (torch.randn(9, 16), torch.randn(2, 9, 16)):
            (layer,) = captured(model, x)
            assert "documents" in repr(layer)
            same(layer, model[1].weights(x.tanh(), mask=regard.documents(ids), causal=causal))


def with_pictures() -> Any:
    vision = {"depth": 3, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
              "window_size": 56, "patch_size": 14, "spatial_merge_size": 2, "fullatt_block_indexes": [1]}  # fmt: skip
    text = DECODER | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=57, video_token_id=58, vision_start_token_id=55,
        vision_end_token_id=56,
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


@row("sorts the patches of pictures by windows, as Qwen2.5-VL does")
def windows() -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as module

    model = with_pictures()
    grid = torch.tensor([[1, 12, 8], [1, 6, 10]])
    pixels, n = torch.randn(156, 1176), 156
    ids = torch.tensor([[5, 55, *[57] * 24, 56, 55, *[57] * 15, 56, *[7] * 112]])
    assert ids.shape == (1, n)
    inputs = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == 57).int()}
    seen = captured(model, **inputs)
    assert [layer.name for layer in seen][1:4] == [
        "model.visual.blocks.1.attn", "model.visual.blocks.2.attn", "model.language_model.layers.0.self_attn"
    ]  # fmt: skip
    assert [layer.query_tokens for layer in seen] == [None] * 3 + ["text"] * 2
    parts: dict[nn.Module, list[torch.Tensor]] = {}
    original = module.eager_attention_forward

    def eager_attention(attention: nn.Module, *args: Any, **options: Any) -> Any:
        found = original(attention, *args, **options)
        parts.setdefault(attention, []).append(found[1][0])
        return found

    model.set_attn_implementation("eager")
    module.eager_attention_forward = eager_attention
    try:
        model(**inputs)
    finally:
        module.eager_attention_forward = original
    index, _ = module.get_vision_window_index(grid, spatial_merge_size=2, window_size=56, patch_size=14)
    rows = (index[:, None] * 4 + torch.arange(4)).flatten()
    assert not torch.equal(rows, torch.arange(n))
    for layer, block in zip(seen, model.model.visual.blocks, strict=False):
        expected = torch.zeros(2, n, n)
        for h in range(2):
            expected[h, rows[:, None], rows] = torch.block_diag(*(x[h] for x in parts[block.attn]))
        same(layer, expected)


@row("attends with some queries after the other in a loop")
def some_queries() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([scaled_dot_product_attention(q[..., a:b, :], k, v) for a, b in BOUNDS], -2)

    model, x = nn.Sequential(Attention(attend)), torch.randn(2, 9, 16)
    (layer,) = captured(model, x)
    same(layer, model[0].weights(x))


@row("attends to batch elements in a loop, or to copies of pieces")
def loops() -> None:
    def elements(*qkv: torch.Tensor) -> torch.Tensor:
        return torch.stack([scaled_dot_product_attention(*x) for x in zip(*qkv, strict=True)])

    def copies(*qkv: torch.Tensor) -> torch.Tensor:
        parts = ((x[..., a:b, :].contiguous() for x in qkv) for a, b in BOUNDS)
        return torch.cat([scaled_dot_product_attention(*x) for x in parts], -2)

    model, x = nn.Sequential(Attention(elements)), torch.randn(5, 3, 16)
    for b, layer in enumerate(captured(model, x)):
        same(layer, model[0].weights(x)[b])
    model, x = nn.Sequential(Attention(copies)), torch.randn(1, 9, 16)
    for (a, b), layer in zip(BOUNDS, captured(model, x), strict=True):
        q, k, _ = model[0].heads(x)
        same(layer, regard.weights(q[..., a:b, :], k[..., a:b, :]))


def generated(name: str, inputs: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Capture, torch.Tensor]:
    model = MODELS[name].build()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    given = MODELS[name].inputs() if inputs is None else inputs
    given.pop("decoder_input_ids", None)
    with regard.capture(model) as seen:
        # Not Whisper's own `generate`, which is for transcripts: it cuts off and stitches together.
        out = transformers.GenerationMixin.generate(
            model, **given, **{"max_new_tokens": 9, "do_sample": False} | options
        )
    return model, seen, out


def padded(mask: torch.Tensor, n: int) -> dict[str, torch.Tensor]:
    mask = torch.cat([mask, torch.ones(len(mask), n - mask.shape[1], dtype=torch.long)], 1)
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@row("generates with a growing, sliding or static cache, and padding on the left")
def caches() -> None:
    for name, options in (
        ("llama", {}), ("gemma2", {}), ("mistral", {"cache_implementation": "static", "disable_compile": True}),
    ):  # fmt: skip
        model, seen, out = generated(name, **options)
        np.testing.assert_array_equal(seen.ids(0), out[:, :-1])
        mask = padded(MODELS[name].inputs()["attention_mask"], out.shape[1] - 1)
        assert_weights(seen, eager(model, input_ids=out[:, :-1], **mask))


@row("generates with cross-attention")
def cross() -> None:
    model, seen, out = generated("t5")
    inputs = MODELS["t5"].inputs() | {"decoder_input_ids": out[:, :-1]}
    assert [layer.query_tokens for layer in seen if layer.cross] == ["decoder"] * 2
    assert_weights(seen, eager(model, **inputs))


REPEATING = torch.tensor([[7, 9, 21, 4, 33, 8, 50, 12, 9, 21, 4, 33, 8, 50, 9, 21, 4]])


@row("generates with prompt lookup or an assistant")
def accepted() -> None:
    for name in ("llama", "gemma2", "gpt2"):
        model, seen, out = generated(
            name, {"input_ids": REPEATING.clone()}, prompt_lookup_num_tokens=4, max_new_tokens=12
        )
        np.testing.assert_array_equal(seen.ids(0), out[:, :-1])
        assert_weights(seen, eager(model, input_ids=out[:, :-1]))
    assistant = MODELS["llama"].build()
    for parameter in assistant.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    model, seen, out = generated(
        "llama", {"input_ids": REPEATING.clone()}, assistant_model=assistant, max_new_tokens=12
    )
    np.testing.assert_array_equal(seen.ids(0), out[:, :-1])
    assert_weights(seen, eager(model, input_ids=out[:, :-1]))


@row("generates with beams")
def beams() -> None:
    for name in ("llama", "gemma2", "t5", "whisper"):
        model, seen, out = generated(name, num_beams=3)
        inputs = {x: y.repeat_interleave(3, 0) for x, y in MODELS[name].inputs().items()}
        ids = torch.from_numpy(seen.ids(-1))
        assert ids.shape == (6, out.shape[1] - 1)
        if MODELS[name].kind == "decoder":
            whole = {"input_ids": ids} | padded(inputs["attention_mask"], ids.shape[1])
        else:
            whole = inputs | {"decoder_input_ids": ids}
        expected = eager(model, **whole)
        decoder = [n for n, layer in enumerate(seen) if layer.batch == 6]  # an encoder reads each text once
        assert_weights(Capture([seen[n] for n in decoder]), [expected[n] for n in decoder])
        assert len(decoder) == {"decoder": 2}.get(MODELS[name].kind, 4)


@row("generates inside of its forward")
def inside() -> None:
    class Answers(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)

    for name in ("llama", "t5"):
        model, ids = MODELS[name].build(), MODELS[name].inputs()["input_ids"]
        model.set_attn_implementation("regard")
        answers = Answers(model)
        with regard.capture(answers) as seen:
            out = answers(ids)
        np.testing.assert_array_equal(seen.ids(-1), out[:, :-1])
        whole = {"input_ids": out[:, :-1]} if name == "llama" else {"input_ids": ids, "decoder_input_ids": out[:, :-1]}
        assert_weights(seen, eager(model, **whole))

    class Universal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MultiHeadAttention(16, 2, causal=True)

        def forward(self, x: torch.Tensor) -> None:
            caches = [KVCache() for _ in range(3)]
            for a, b in ((0, 5), (5, 6), (6, 7)):
                y = x[:, a:b]
                for cache in caches:
                    y = y + self.block(y, cache=cache)

    model, x = Universal().eval(), torch.randn(1, 7, 16)
    seen, y = captured(model, x), x
    for layer in seen:
        out, weights = model.block(y, return_weights=True)
        same(layer, weights)
        y = y + out
    assert len(seen) == 3


@row("generates twice, or reads another text")
def another() -> None:
    model, ids = MODELS["llama"].build(), MODELS["llama"].inputs()["input_ids"]
    with regard.capture(model) as seen:
        model.generate(ids, max_new_tokens=5, do_sample=False)
        out = model.generate(ids[:, 4:], max_new_tokens=9, do_sample=False)
    np.testing.assert_array_equal(seen.ids(0), out[:, :-1])
    assert_weights(seen, eager(model, input_ids=out[:, :-1]))


@row("computes layers again in backward, for gradient checkpoints")
def checkpoints() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention(scaled_dot_product_attention)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for n in range(3):
                x = torch.utils.checkpoint.checkpoint(self.block, x * (n + 1), use_reentrant=False)
            return x

    model, x = Checkpointed(), torch.randn(1, 5, 16)
    with regard.capture(model) as seen, torch.enable_grad():
        model(x).square().sum().backward()
        assert model.block.qkv.weight.grad is not None
    y = x
    for n, layer in enumerate(seen):
        same(layer, model.block.weights(y * (n + 1)))
        y = model.block(y * (n + 1))
    assert len(seen) == 3


@row("has towers for words and for pictures")
def towers() -> None:
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = size | {"vocab_size": 60, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=size | {"image_size": 16, "patch_size": 4})
    model, ids = transformers.CLIPModel(config).eval(), torch.randint(3, 60, (2, 17))
    seen = captured(model, input_ids=ids, pixel_values=torch.randn(2, 3, 16, 16))
    assert [(layer.name.partition("_")[0], layer.n_q, layer.query_tokens, layer.key_tokens) for layer in seen] == [
        ("vision", 17, None, None), ("text", 17, "text", "text"),
    ]  # fmt: skip

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = nn.Embedding(9, 16), Attention(scaled_dot_product_attention)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embedding(ids))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.patches = Words(), nn.Sequential(nn.Tanh(), Attention(scaled_dot_product_attention))

        def forward(self, ids: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
            return self.patches(patches) + self.words(ids)

    seen = captured(Both(), torch.randint(9, (2, 6)), torch.randn(2, 6, 16))
    assert [(layer.name, layer.query_tokens, layer.key_tokens) for layer in seen] == [
        ("patches.1", None, None), ("words.attention", "text", "text"),
    ]  # fmt: skip


def own_softmax(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, is_causal: bool | None = None, **_: Any
) -> Any:
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(99 if is_causal is False else 0)
    scores = (q @ k.transpose(-1, -2) * scaling).masked_fill(~mask, -1e30)
    return (scores.softmax(-1) @ v).transpose(1, 2), None


def own_sdpa(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **_: Any) -> Any:
    return scaled_dot_product_attention(2 * q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2), None


def hot_softmax(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
    return own_softmax(module, q, k, v, mask, 1.5 * scaling)


def with_own(function: Any) -> tuple[Any, dict[str, Any], Capture]:
    """A model with a function of its own, which is no other after a capture, and gives what it gives without one."""
    transformers.AttentionInterface.register("own", function)
    transformers.AttentionMaskInterface.register("own", transformers.masking_utils.sdpa_mask)
    model, inputs = MODELS["gpt2"].build(), MODELS["gpt2"].inputs()
    inputs["attention_mask"][:] = 1
    model.set_attn_implementation("own")
    outside = model(**inputs).logits
    with regard.capture(model) as seen:
        inside = model(**inputs).logits
    np.testing.assert_allclose(inside, outside, atol=1e-12)
    assert model.config._attn_implementation == "own"
    assert transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["own"] is function
    return model, inputs, seen


@row("runs your own function of transformers' attention interface")
def own_function() -> None:
    model, inputs, seen = with_own(own_softmax)
    assert_weights(seen, eager(model, **inputs))
    _, _, sharper = with_own(own_sdpa)
    layer = sharper[0]
    plain = seen[0].query.copy()
    np.testing.assert_allclose(layer.query, 2 * plain, atol=1e-12)
    visual = with_pictures().model.visual
    inputs = {"hidden_states": torch.randn(96, 1176), "grid_thw": torch.tensor([[1, 12, 8]])}
    plain = [weights_of(layer) for layer in captured(visual, **inputs)]
    transformers.AttentionInterface.register("own", own_softmax)
    visual.set_attn_implementation("own")
    for layer, expected in zip(captured(visual, **inputs), plain, strict=True):
        np.testing.assert_allclose(weights_of(layer), expected, atol=1e-6)


@row("runs your own function, which is something else")
def own_function_of_another_kind() -> None:
    _, _, seen = with_own(hot_softmax)
    seen.check(rows=11)


class Cached(nn.Module):
    """Attention with a cache of its own, whose keys change in each step."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.attention, self.change = Attention(self.attend), change
        self.past: list[torch.Tensor] = []

    def attend(self, *qkv: torch.Tensor) -> torch.Tensor:
        q, *kv = qkv
        self.past = [self.change(torch.cat([*self.past, torch.stack(kv)], -2))]
        k, v = self.past[0]
        return scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)


@row("changes keys in its cache, as quantized ones do")
def changed_keys() -> None:
    model, x = Cached(lambda past: past * 0.99), torch.randn(1, 6, 16)
    with regard.capture(model) as seen:
        for a, b in ((0, 4), (4, 5), (5, 6)):
            model(x[:, a:b])
    assert [(layer.n_q, layer.n_k) for layer in seen] == [(1, 6)]


@row("attends to its own and another sequence at once, as T5Gemma 2 does, and generates")
def merged() -> None:
    model, inputs = OTHERS["t5gemma2"].build(), OTHERS["t5gemma2"].inputs()
    inputs.pop("decoder_input_ids")
    with regard.capture(model) as seen:
        model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert [(layer.n_q, layer.n_k) for layer in seen][2:] == [(1, 16), (1, 17)]


class Rows(Attention):
    """Attention of the rows from `first` on to all, with options that depend on it."""

    def __init__(self, options: Callable[[int], dict[str, Any]]) -> None:
        super().__init__(regard.attention)
        self.options = options

    def forward(self, x: torch.Tensor, first: int) -> None:
        q, k, v = self.heads(x)
        self.attend(q[..., first:, :], k, v, **self.options(first))


class Layers(nn.Module):
    def __init__(self, other: Callable[[int], dict[str, Any]]) -> None:
        super().__init__()
        self.causal, self.other = Rows(lambda first: {"causal": True}), Rows(other)

    def forward(self, x: torch.Tensor, first: int) -> None:
        self.causal(x, first)
        self.other(x, first)


@row("replaces keys that earlier queries have seen, as diffusion by blocks may")
def replaced_keys() -> None:
    model, x = Layers(lambda first: {}), torch.randn(1, 6, 16)
    later = torch.cat([x[:, :4], torch.randn(1, 2, 16)], 1)
    with regard.capture(model) as seen:
        model(x, 0)
        model(later, 4)
    assert [(layer.name, layer.n_q) for layer in seen] == [("causal", 6)]
    same(seen[0], model.causal.weights(later, causal=True))
    assert seen.dropped == {"other": "a later call replaces keys that its queries have seen"}


@row("changes a scale, a score or a sink from step to step")
def changed_options() -> None:
    model, x = Layers(lambda first: {"causal": True, "scale": 1 / (first + 1)}), torch.randn(1, 6, 16)
    with regard.capture(model) as seen:
        model(x[:, :4], 0)
        model(x, 4)
    assert [(layer.name, layer.n_q) for layer in seen] == [("causal", 6)]
    assert seen.dropped == {"other": "its scale changes from call to call"}
