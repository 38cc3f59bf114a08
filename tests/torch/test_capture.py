"""Captures of PyTorch models: their weights are those of eager, whatever the model, and however it was run."""

import re
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import regard
from benchmarks.models import cache_name
from captures import assert_weights, eager, weights_of
from regard.interpret.capture import joining
from regard.interpret.capture.captured import Capture
from regard.torch import Alibi, KVCache, MultiHeadAttention, Transformer, TransformerBlock
from regard.torch.capture.texts import Texts

pytestmark = pytest.mark.engine("tiled")

try:
    import transformers

    from small_models import DECODER, MODELS
except ImportError:
    MODELS = {}

NOTHING_RAN = "no attention was seen in .*: no forward of it ran"

needs_transformers = pytest.mark.skipif(not MODELS, reason="needs transformers: pip install 'regard[transformers]'")


# Models of transformers


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_one_run_of_a_model(name: str) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    before = model.config._attn_implementation
    with regard.capture(model) as seen, torch.no_grad():
        model(**inputs)
    assert model.config._attn_implementation == before != "regard"
    assert_weights(seen, eager(model, **inputs))
    modules = dict(model.named_modules())
    assert all(layer.name in modules for layer in seen)
    group = {"llama": 2, "qwen3": 2, "mistral": 2, "gemma2": 2, "gemma3": 2, "gpt_oss": 2}.get(name, 1)
    assert {layer.group for layer in seen} == {group}
    assert [layer.kv_head(3) for layer in seen] == [3 // group] * len(seen)


GENERATING = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "t5", "whisper"]


@needs_transformers
@pytest.mark.parametrize("cache", ["dynamic", "static", "none"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_makes_one_sequence(name: str, cache: str) -> None:
    kind, model = MODELS[name].kind, MODELS[name].build()
    given = {x: y for x, y in MODELS[name].inputs().items() if x != "decoder_input_ids"}
    options = {
        "dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True},
        "none": {"use_cache": False},
    }[cache]  # fmt: skip
    with regard.capture(model) as seen:
        # Not Whisper's own `generate`, which is for transcripts: it cuts off and stitches together.
        out = transformers.GenerationMixin.generate(
            model, **given, min_new_tokens=9, max_new_tokens=9, do_sample=False, **options
        )
    text = seen.tokens["text" if kind != "encoder-decoder" else "decoder"].ids
    np.testing.assert_array_equal(text, out[:, :-1])
    assert {layer.n_q for layer in seen if "decoder" in layer.name or kind == "decoder"} == {text.shape[-1]}
    if kind == "decoder":
        mask = torch.cat([given["attention_mask"], torch.ones(2, 8, dtype=torch.long)], 1)
        whole = {"input_ids": out[:, :-1], "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    else:
        whole = given | {"decoder_input_ids": out[:, :-1]}
    assert_weights(seen, eager(model, **whole))
    assert all("lambda" not in repr(layer) for layer in seen)


@needs_transformers
def test_a_prompt_in_pieces_makes_one_sequence() -> None:
    model, inputs = MODELS["gemma2"].build(), MODELS["gemma2"].inputs()
    cache = transformers.DynamicCache(config=model.config)
    ids, padded = inputs["input_ids"], inputs["attention_mask"]
    with regard.capture(model) as seen, torch.no_grad():
        for begin, end in ((0, 5), (5, 8), (8, 9), (9, 11)):
            model(input_ids=ids[:, begin:end], attention_mask=padded[:, :end], **{cache_name(model): cache})
    assert_weights(seen, eager(model, input_ids=ids, attention_mask=padded))
    np.testing.assert_array_equal(seen.ids(0), ids)


@needs_transformers
def test_another_text_takes_the_place_of_the_last() -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    ids = inputs["input_ids"]
    with regard.capture(model) as seen, torch.no_grad():
        model(input_ids=ids)
        model(input_ids=ids[:, :7])
    np.testing.assert_array_equal(seen.ids(1), ids[:, :7])
    assert_weights(seen, eager(model, input_ids=ids[:, :7]))


@needs_transformers
def test_a_cache_that_was_there_before() -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    ids = inputs["input_ids"]
    with torch.no_grad():
        cache = model(input_ids=ids[:, :6])[cache_name(model)]
        with regard.capture(model) as seen:
            model(input_ids=ids[:, 6:], **{cache_name(model): cache})
    assert (seen[0].n_q, seen[0].n_k, seen[0].query_tokens) == (5, 11, None)
    assert_weights(seen, [x[:, :, 6:] for x in eager(model, input_ids=ids)])
    assert not np.isnan(seen.measure()[0].previous)


@needs_transformers
def test_layers_heads_and_memory(tmp_path: Path) -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    found = eager(model, **inputs)

    def seen_with(**options: Any) -> Capture:
        with regard.capture(model, **options) as seen, torch.no_grad():
            model(**inputs)
        return seen

    assert_weights(seen_with(layers=[1]), found[1:])
    assert_weights(seen_with(layers=["*.0.self_attn"]), found[:1])
    some = seen_with(heads=[3, 0])
    assert_weights(some, [x[:, [3, 0]] for x in found])
    assert [(head.head, head.kv_head) for head in some.measure()[:2]] == [(3, 1), (0, 0)]
    size = seen_with(layers=[0]).nbytes
    with pytest.warns(regard.RegardWarning, match=r"layers that were not kept: .*layers\.1\.self_attn.*over memory="):
        small = seen_with(memory=size)
    assert_weights(small, found[:1])
    assert list(small.dropped) == ["model.layers.1.self_attn"]
    with pytest.raises(ValueError, match=r"heads must be from 0 to 3, got \[4\]"):
        seen_with(heads=[4])


@needs_transformers
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_on_disk_it_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SPILLED", 0)
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    given = {x: y for x, y in inputs.items() if x != "decoder_input_ids"}
    captures = []
    for path in (None, tmp_path / "seen.safetensors"):
        with regard.capture(model, path=path) as seen:
            model.generate(**given, min_new_tokens=5, max_new_tokens=5, do_sample=False)
        captures.append(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["seen.safetensors"]
    inside, outside = captures
    assert repr(inside) == repr(outside)
    for ours, theirs in zip(inside, outside, strict=True):
        assert not theirs.query.flags.writeable
        np.testing.assert_array_equal(weights_of(ours), weights_of(theirs))
    np.testing.assert_array_equal(inside.ids(0), outside.ids(0))


def test_a_failed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    model = Transformer(1, 8, 2)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise ZeroDivisionError

    handle = model.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), regard.capture(model, path=tmp_path / "x"):
        model(torch.randn(1, 3, 8))
    handle.remove()
    assert list(tmp_path.iterdir()) == []
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    x = torch.randn(1, 2, 4)
    assert torch.equal(regard.attention(x, x, x), regard.attention(x, x, x))


def test_a_file_that_could_not_be_read_again_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = "a capture's file needs safetensors, which is missing: pip install 'regard[look]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        regard.capture(Transformer(1, 8, 2), path=tmp_path / "x")  # before the `with` begins


@needs_transformers
def test_labels() -> None:
    model, inputs = MODELS["gpt2"].build(), MODELS["gpt2"].inputs()
    with regard.capture(model, tokenizer=lambda ids: [f"<{n}>" for n in ids]) as seen:
        model(**inputs)
    assert seen.labels(0, batch=1) == tuple(f"<{n}>" for n in inputs["input_ids"][1].tolist())

    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return ["Ġto", "▁be", "Ċ"][: len(ids)] + ["x"] * (len(ids) - 3)

    with regard.capture(model, tokenizer=Tokenizer()) as seen:
        model(**inputs)
    assert seen.labels(1, "key")[:4] == (" to", " be", "\n", "x")
    with pytest.raises(TypeError, match="tokenizer must be a tokenizer of transformers or a function from a list"):
        regard.capture(model, tokenizer=3).__enter__()


@needs_transformers
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_bfloat16() -> None:
    config = transformers.LlamaConfig(**DECODER)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = MODELS["llama"].inputs()["input_ids"]
    with regard.capture(model) as seen, torch.no_grad():
        model(input_ids=ids)
    assert str(seen[0].query.dtype) == "bfloat16"
    assert seen[0].weights(0).dtype == np.float32
    single = model.float()
    with regard.capture(single) as cast, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        single(input_ids=ids)
    assert str(cast[0].query.dtype) == "bfloat16"


# Other models


class Block(nn.Module):
    """Self-attention by PyTorch's function, which was imported by name, and a cache of its own."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.masked = masked
        self.past: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.past.append(torch.stack([k, v]))
        k, v = torch.cat(self.past, -2)
        n, m = q.shape[-2], k.shape[-2]
        if self.masked:
            visible = torch.ones(n, m, dtype=torch.bool).tril(m - n)
            return scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return scaled_dot_product_attention(q, k, v, is_causal=n > 1)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 16)
        self.first, self.second = Block(**options), Block(**options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.second(x + self.first(x).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("masked", [False, True])
def test_pytorchs_own_function(masked: bool) -> None:
    torch.manual_seed(0)
    model, ids = Model(masked=masked).eval(), torch.arange(12).reshape(2, 6) % 9
    inside = scaled_dot_product_attention
    with regard.capture(model) as seen, torch.no_grad():
        for begin, end in ((0, 4), (4, 5), (5, 6)):
            model(ids[:, begin:end])
    assert scaled_dot_product_attention is inside
    assert [layer.name for layer in seen] == ["first", "second"]
    np.testing.assert_array_equal(seen.ids(1, "key"), ids)
    for layer, module in zip(seen, (model.first, model.second), strict=True):
        q, k = torch.from_numpy(layer.query.copy()), torch.cat(module.past, -2)[0]
        scores = q @ k.transpose(-1, -2) / 8**0.5
        expected = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        np.testing.assert_allclose(weights_of(layer), expected.detach(), atol=1e-6)


@pytest.mark.engine("cpu")
def test_pytorchs_modules() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    x, other = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    with regard.capture(layer) as seen, torch.no_grad():
        out = layer(x, other, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5), tgt_is_causal=True)
        expected = layer(x, other)
    assert out.shape == expected.shape
    assert [(found.name, found.cross) for found in seen] == [("self_attn", False), ("multihead_attn", True)]
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    with regard.capture(attention) as seen, torch.no_grad():
        _, weights = attention(x, other, other, average_attn_weights=False)
    assert seen[0].cross
    np.testing.assert_allclose(weights_of(seen[0]), weights, atol=1e-6)


@pytest.mark.engine("cpu")
def test_modules_of_regard() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(16, 4, num_kv_heads=2, cross_attention=True, positions=Alibi(4), causal=True).eval()
    x, context = torch.randn(2, 6, 16), torch.randn(2, 4, 16)
    with regard.capture(block) as seen:
        block(x, context)  # with gradients
    assert [(layer.name, layer.cross, layer.kv_heads) for layer in seen] == [
        ("attention", False, 2), ("cross_attention", True, 4),
    ]  # fmt: skip
    (_, weights) = block.attention(x, return_weights=True)
    np.testing.assert_allclose(weights_of(seen[0]), weights.detach(), atol=1e-6)


def test_the_product_with_a_metric_is_kept_as_the_query() -> None:
    class Metric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return regard.attention(x, x, x, metric=metric, causal=True)

    torch.manual_seed(0)
    x, metric = torch.randn(1, 2, 6, 4), torch.randn(2, 4, 4)
    model = Metric()
    with regard.capture(model) as seen, torch.no_grad():
        model(x)
    _, weights = regard.attention(x, x, x, metric=metric, causal=True, return_weights=True)
    np.testing.assert_allclose(weights_of(seen[0]), weights, atol=1e-6)


def test_a_cache_of_regard_makes_one_sequence() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(16, 2, causal=True, mask=regard.window(3)).eval()
    x, cache = torch.randn(7, 16), KVCache()
    with regard.capture(attention) as seen, torch.no_grad():
        attention(x[:4], cache=cache)
        for n in range(4, 7):
            attention(x[n : n + 1], cache=cache)
    _, weights = attention(x, return_weights=True)
    np.testing.assert_allclose(weights_of(seen[0])[0], weights.detach(), atol=1e-6)


def test_a_choice_of_layers_keeps_their_numbers_and_must_be_there(tmp_path: Path) -> None:
    model, x = Transformer(4, 16, 2, causal=True), torch.randn(1, 5, 16)

    def layers(*chosen: int | str, **options: Any) -> list[tuple[int, str]]:
        with regard.capture(model, layers=chosen, **options) as seen:
            model(x)
        return list(zip(seen.numbers, [layer.name for layer in seen], strict=True))

    assert layers(3, "*.1.*") == [(1, "blocks.1.attention"), (3, "blocks.3.attention")]
    for chosen in ("blocks.7.*", 4, -1):
        message = (
            f"layers: {chosen!r} is no layer of Transformer; it has 0 blocks.0.attention, 1 blocks.1.attention, 2 bl"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            layers(0, chosen, path=tmp_path / "seen")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_attends_twice() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return regard.attention(x, x, x) + regard.attention(x, 2 * x, x)

    model = nn.Sequential(Twice())
    x = torch.randn(3, 4, 8)
    with regard.capture(model) as seen:
        model(x)
        regard.attention(x, x, x)  # not of the model
    assert [layer.name for layer in seen] == ["0", "0#2"]
    np.testing.assert_allclose(seen[1].weights(2), regard.weights(x, 2 * x)[2], atol=1e-6)


def test_a_model_without_attention() -> None:
    model = nn.Linear(3, 3)
    message = "no attention was seen in Linear: it calls neither regard"
    with pytest.raises(RuntimeError, match=message), regard.capture(model):
        model(torch.ones(3))


def test_what_cannot_be_captured() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        regard.capture(3)


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining.JoinedCalls, "_see", lambda self, call: self.masks.append((0, joining.EVERYONE)))
    attention, cache = MultiHeadAttention(16, 2, causal=True).eval(), KVCache()
    capture = regard.capture(attention)
    capture.__enter__()
    with torch.no_grad():
        attention(torch.randn(4, 16), cache=cache)
        attention(torch.randn(1, 16), cache=cache)
    with pytest.raises(ValueError, match="the weights of layer 'attention' do not sum to 1"):
        capture.__exit__(None, None, None)


@needs_transformers
def test_the_last_generated_token_is_never_a_query() -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    with regard.capture(model) as seen:
        whole = model.generate(**inputs, min_new_tokens=4, max_new_tokens=4, do_sample=False)
    assert {(layer.n_q, layer.n_k) for layer in seen} == {(whole.shape[1] - 1,) * 2}
    np.testing.assert_array_equal(seen.ids(0), whole[:, :-1])


def test_a_model_that_writes_over_its_tensors() -> None:
    class Overwriting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, bias = x.clone(), torch.ones(4, 4).tril()
            out = regard.attention(q, q, q, bias=bias)
            q.zero_()
            bias.zero_()
            return out

    x = torch.randn(2, 4, 8)
    model = Overwriting()
    with regard.capture(model) as seen:
        model(x)
    expected = regard.weights(x, x, bias=torch.ones(4, 4).tril())
    np.testing.assert_allclose(weights_of(seen[0])[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("HuggingFaceTB/SmolLM2-135M", " HuggingFaceTB/SmolLM2-135M"), ("gpt2", " gpt2"), ("", ""),
        ("/home/someone/models/smol", " smol"), ("/home/someone/models/smol/", " smol"), ("~/smol", " smol"),
        ("./smol", " smol"), ("models/trained/smol", " smol"), (r"C:\Users\someone\smol", " smol"), ("/", ""),
    ],
)  # fmt: skip
def test_a_capture_does_not_name_the_path_of_a_model(given: str, named: str) -> None:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(name_or_path=given)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=NOTHING_RAN), regard.capture(model) as seen:
        pass
    assert seen.model == f"Linear{named}"


def test_a_capture_names_the_folder_of_a_model_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "private" / "smol").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(name_or_path="private/smol")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=NOTHING_RAN), regard.capture(model) as seen:
        pass
    assert seen.model == "Linear smol"


def test_no_later_ids_get_the_address_of_those_that_were_read() -> None:
    """Else a step of a generation counts as passed on from an outer module, and the text loses a token."""
    texts, ids = Texts(), torch.arange(6)[:, None]
    kept = weakref.ref(ids)
    texts.read("decoder", {"input_ids": ids}, named=True, depth=1)
    del ids
    assert kept() is not None
    texts.read("decoder", {"input_ids": torch.arange(6)[:, None]}, named=True, depth=1)
    assert texts.times["decoder"] == 2


class Mixing(nn.Module):
    """Attention of one tensor for queries, keys and values, and a convolution over its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.conv = nn.Linear(8, 24), nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.conv(2 * out.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("queries", [None, [3]])
def test_no_activation_outlives_its_layer(queries: Any) -> None:
    """Queries, keys and values that a model computes as one tensor are freed with it, and what its modules read."""
    inside: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def note(*tensors: torch.Tensor) -> None:
        inside.extend(weakref.ref(x.untyped_storage()) for x in tensors)

    model = nn.Sequential(*(Mixing() for _ in range(3)))
    for layer in model:
        layer.qkv.register_forward_hook(lambda module, read, made: note(made))
        layer.conv.register_forward_hook(lambda module, read, made: note(*read, made))
        layer.register_forward_hook(lambda *_: alive.extend(place() is not None for place in inside))
    with torch.no_grad(), regard.capture(model, queries=queries) as seen:
        model(torch.randn(1, 5, 8))
    assert alive == [False] * (3 + 6 + 9)
    assert [layer.n_q for layer in seen] == [5 if queries is None else 1] * 3
