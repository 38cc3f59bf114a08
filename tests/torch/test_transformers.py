"""Models of transformers with attn_implementation="regard" against "eager": logits, gradients, generation."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard
from benchmarks.models import cache_name
from regard.torch.dropins import transformers as integration
from regard.warning import RegardWarning, warn_once
from small_models import ADDING, MODELS, OTHERS, VOCABULARY

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")
DENSE = transformers.masking_utils.sdpa_mask

EPS = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
GENERATING = [name for name, model in MODELS.items() if model.kind not in ("encoder", "image")]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register_transformers()


@pytest.fixture(autouse=True)
def nothing_was_told() -> None:
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def masks_are_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense masks are made by these functions alone; the tests turn them back on for eager."""
    from transformers import masking_utils

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a dense mask was made")

    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)


def real(inputs: dict[str, Any], logits: Any) -> Any:
    """The logits of positions that are not padding."""
    mask = inputs.get("attention_mask")
    if "input_features" in inputs and mask is not None:  # a frame for each 8
        mask = mask[:, :: mask.shape[1] // logits.shape[1]].bool()
    if mask is not None and "decoder_input_ids" not in inputs and mask.shape == logits.shape[:2]:
        return logits[mask.bool()]
    return logits


def logits_and_gradients(model: Any, implementation: str, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    torch.manual_seed(2)  # of what a model samples
    found = model(**inputs)
    logits = real(inputs, found.logits if "logits" in found else found.last_hidden_state)
    (
        logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    ).sum().backward()
    found = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    assert all(x.isfinite().all() for x in found.values())
    return logits.detach(), found


def assert_close(got: Any, expected: Any, of: Any = None) -> None:
    """Two computations with as many roundings: they differ by some tens of the dtype's eps."""
    assert got.shape == expected.shape
    size = (expected if of is None else of).norm()
    assert (got - expected).norm() <= 100 * EPS[expected.dtype] * size


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    got, gradients = logits_and_gradients(model, "regard", inputs)
    monkeypatch.undo()
    expected, those_of_eager = logits_and_gradients(model, "eager", inputs)
    assert_close(got, expected)
    assert gradients.keys() == those_of_eager.keys()
    for parameter, gradient in those_of_eager.items():
        assert_close(gradients[parameter], gradient, of=torch.cat([g.flatten() for g in those_of_eager.values()]))


def generated(model: Any, implementation: str, inputs: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    given = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    # Not Whisper's own `generate`, which is for transcripts: it cuts off and stitches together.
    return transformers.GenerationMixin.generate(
        model, **given, min_new_tokens=12, max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=repr)
@pytest.mark.parametrize("name", GENERATING)
def test_generation_is_that_of_eager_token_for_token(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    got = generated(model, "regard", inputs, **options)
    monkeypatch.undo()
    expected = generated(model, "eager", inputs, **options)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == 12
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        assert_close(ours, theirs)


def test_packed_sequences_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["mistral"].build()
    inputs = {
        "input_ids": MODELS["mistral"].inputs()["input_ids"],
        "position_ids": torch.cat([torch.arange(4), torch.arange(7)])[None],
    }
    got, _ = logits_and_gradients(model, "regard", inputs)
    monkeypatch.undo()
    expected, _ = logits_and_gradients(model, "eager", inputs)
    assert_close(got, expected)
    first, _ = logits_and_gradients(model, "regard", {"input_ids": inputs["input_ids"][:, :4]})
    assert_close(got[:, :4], first)


@pytest.mark.parametrize("floats", [False, True])
def test_masks_of_four_dimensions_are_read_as_they_are(floats: bool) -> None:
    model, ids = MODELS["llama"].build(), MODELS["llama"].inputs()["input_ids"]
    model.set_attn_implementation("regard")
    dense = torch.ones(11, 11, dtype=torch.bool).tril()[None, None].expand(2, 1, 11, 11)
    if floats:
        dense = torch.where(dense, 0.0, torch.finfo(torch.float32).min)
    assert_close(model(input_ids=ids, attention_mask=dense).logits, model(input_ids=ids).logits)


def test_weights_are_returned_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS["gemma2"].build(), MODELS["gemma2"].inputs()
    model.set_attn_implementation("regard")
    got = model(**inputs, output_attentions=True).attentions
    assert model(**inputs).attentions is None
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    expected = model(**inputs, output_attentions=True).attentions
    rows = inputs["attention_mask"].bool()
    for ours, theirs in zip(got, expected, strict=True):
        assert_close(ours.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows])


# Models that ask more of attention


READS_ITS_MASK = ["deepseek_v32", "glm_moe_dsa", "doge", "lasr", "t5gemma2"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_give_what_eager_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, inputs = OTHERS[name].build(), OTHERS[name].inputs()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        got, gradients = logits_and_gradients(model, "regard", inputs)
    told = [str(x.message) for x in given if x.category is RegardWarning]
    about = "reads the elements of its attention mask" if name in READS_ITS_MASK else "does not support other attention"
    assert len(told) == (name in READS_ITS_MASK or name == "inkling2")
    assert all(about in text for text in told)
    expected, those_of_eager = logits_and_gradients(model, "eager", inputs)
    assert_close(got, expected)
    assert gradients.keys() == those_of_eager.keys()
    for parameter, gradient in those_of_eager.items():
        assert_close(gradients[parameter], gradient, of=torch.cat([g.flatten() for g in those_of_eager.values()]))


@pytest.mark.filterwarnings("ignore:Inkling2PreTrainedModel does not support")
@pytest.mark.parametrize("name", ["gpt_oss", "inkling2", "parakeet"])
def test_other_weights_are_those_of_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model, inputs = (MODELS | OTHERS)[name].build(), (MODELS | OTHERS)[name].inputs()
    found = []
    for implementation in ("regard", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model(**inputs, output_attentions=True).attentions)
    for ours, theirs in zip(*found, strict=True):
        assert_close(real(inputs, ours.transpose(1, 2)), real(inputs, theirs.transpose(1, 2)))


def test_weights_of_a_model_that_does_not_tell_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes = {"image_size": 16, "patch_size": 4, "projection_dim": 8}
    torch.manual_seed(0)
    model = transformers.Aimv2VisionModel(transformers.Aimv2VisionConfig(**options, **sizes)).eval()
    pixels, found = torch.randn(2, 3, 16, 16), []
    for implementation in ("regard", "eager"):
        model.set_attn_implementation(implementation)
        found.append(model(pixel_values=pixels, output_attentions=True).attentions)
        assert model(pixel_values=pixels).attentions is None
    assert len(found[0]) == 2
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("size", [1.0, 300.0, 1e4])
@pytest.mark.parametrize("sink", [None, "heads", "queries"])
def test_weights_are_as_exact_as_a_softmax(size: float, sink: str | None) -> None:
    torch.manual_seed(0)
    module, x = torch.nn.Module(), torch.randn(2, 3, 40, 8)
    bias, sinks = size * torch.randn(3, 40, 40), size * torch.randn(3)
    given = {"heads": {"s_aux": sinks}, "queries": {"sinks": sinks[:, None, None].expand(2, -1, 40, 1)}}.get(sink, {})
    out, weights = integration.attention(module, x, x, x, bias, scaling=0.3, output_attentions=True, **given)

    def softmax(dtype: torch.dtype) -> torch.Tensor:
        scores = 0.3 * x.to(dtype) @ x.to(dtype).mT + bias.to(dtype)
        extra = [] if sink is None else [sinks.to(dtype)[:, None, None].expand(2, -1, 40, 1)]
        return torch.cat([scores, *extra], -1).softmax(-1)[..., :40]

    exact = softmax(torch.float64)
    assert (weights - exact).norm() <= 2 * (softmax(torch.float32) - exact).norm() + 8 * EPS[torch.float32]
    assert_close(out, (weights @ x).transpose(1, 2))


def test_a_query_that_masks_by_the_least_number_sees_every_key_alike() -> None:
    x, mask = torch.randn(1, 2, 32, 8), torch.full((1, 1, 32, 32), torch.finfo(torch.float32).min)
    out, weights = integration.attention(torch.nn.Module(), x, x, x, mask, output_attentions=True)
    assert_close(weights, torch.full_like(weights, 1 / 32))
    assert_close(out, x.mean(-2, keepdim=True).expand_as(x).transpose(1, 2))
    hidden = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    out, weights = integration.attention(torch.nn.Module(), x, x, x, hidden, output_attentions=True)
    assert not weights.any()
    assert not out.any()


class Choosing(torch.nn.Module):
    """Attention that names two keywords in its call, and takes others."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor | None, **options: Any) -> torch.Tensor:
        options["sliding_window"] = 3
        return integration.attention(self, x, x, x, None, block_indices=chosen, position_ids=chosen, **options)[0]


def test_a_tensor_that_a_module_names_is_an_error_if_it_is_not_known() -> None:
    x, chosen = torch.zeros(1, 1, 3, 4), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        NotImplementedError,
        match="does not know the keyword 'block_indices', a tensor that Choosing gives to its attention: use 'eager'",
    ):
        Choosing()(x, chosen)
    assert Choosing()(x, None, pixel_values=x).shape == (1, 3, 1, 4)
    compiled = torch.compile(Choosing(), backend="aot_eager", fullgraph=True)
    assert compiled(x, None, pixel_values=x).shape == (1, 3, 1, 4)


def test_a_tensor_that_eager_attention_takes_is_an_error_if_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama as llama

    def eager_attention_forward(module: Any, query: Any, *, prior: Any = None) -> None:
        """A new model's."""

    monkeypatch.setattr(llama, "eager_attention_forward", eager_attention_forward)
    integration._is_given.cache_clear()
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="does not know the keyword 'prior', a tensor that LlamaAttention"):
        integration.attention(MODELS["llama"].build().model.layers[0].self_attn, x, x, x, None, prior=x)
    integration._is_given.cache_clear()


@pytest.mark.parametrize("masked", [False, True, "floats"])
def test_indices_choose_among_the_keys_that_are_visible(masked: bool | str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    indices = torch.randint(-1, 9, (2, 3, 4), dtype=torch.int32)
    module = torch.nn.Module()
    module.is_causal = False
    visible = torch.rand(2, 1, 3, 9) > 0.3
    mask = {False: None, True: visible, "floats": torch.where(visible, 0.5, -torch.inf)}[masked]
    out, _ = integration.attention(module, q, k, k, mask, indices=indices)
    chosen = (indices[..., None] == torch.arange(9)).any(-2)[:, None]
    seen = chosen & visible if masked else chosen
    expected = F.scaled_dot_product_attention(q, k, k, seen, enable_gqa=True).nan_to_num()
    assert_close(out, expected.transpose(1, 2))


def test_indices_leave_causal_as_it_is() -> None:
    x, indices = torch.randn(1, 2, 5, 8), torch.tensor([[[0, 4], [1, 4], [0, 2], [3, 4], [0, 4]]])
    out, _ = integration.attention(torch.nn.Module(), x, x, x, None, indices=indices)
    chosen = (indices[..., None] == torch.arange(5)).any(-2)[:, None] & torch.ones(5, 5, dtype=torch.bool).tril()
    assert_close(out, F.scaled_dot_product_attention(x, x, x, chosen).transpose(1, 2))
    again, _ = integration.attention(torch.nn.Module(), x, x, x, integration.mask(1, 5, 5), indices=indices)
    assert torch.equal(again, out)


def test_dropout_repeats_with_pytorchs_seed() -> None:
    model, inputs = MODELS["bert"].build().train(), MODELS["bert"].inputs()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    model.set_attn_implementation("regard")
    torch.manual_seed(3)
    first, again = (model(**inputs).logits for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(model(**inputs).logits, first)
    assert not torch.equal(first, again)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, inputs = MODELS["gemma3"].build().train(), MODELS["gemma3"].inputs()
    _, plain = logits_and_gradients(model, "regard", inputs)
    for reentrant in (False, True):
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        _, again = logits_and_gradients(model, "regard", inputs)
        for name, gradient in plain.items():
            assert_close(again[name], gradient)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5", "whisper"])
def test_models_compile_in_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS[name].build(), MODELS[name].inputs()
    torch.compiler.reset()
    integration._traced_once.cache_clear()  # so that rules are traced while the graph is
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        got, again = logits_and_gradients(compiled, "regard", inputs)
    except torch._dynamo.exc.BackendCompilerFailed:  # the experts of some versions, whatever computes attention
        monkeypatch.setattr("transformers.masking_utils.sdpa_mask", DENSE)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            logits_and_gradients(compiled, "eager", inputs)
        pytest.skip("this model does not compile in this version, with eager either")
    expected, gradients = logits_and_gradients(model, "regard", inputs)
    assert_close(got, expected)
    for name, gradient in gradients.items():
        assert_close(again[f"_orig_mod.{name}"], gradient)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_steps_of_decoding_compile_in_one_graph(static: bool, padded: bool) -> None:
    model, inputs = MODELS["gpt_oss"].build(), MODELS["gpt_oss"].inputs()
    model.set_attn_implementation("regard")
    torch.compiler.reset()
    compiled, name = torch.compile(model, backend="aot_eager", fullgraph=True), cache_name(model)
    caches = [
        transformers.StaticCache(config=model.config, max_cache_len=20)
        if static
        else transformers.DynamicCache(config=model.config)
        for _ in range(2)
    ]
    with torch.no_grad():
        for part in (slice(0, 8), slice(8, 9), slice(9, 10)):
            given = {"input_ids": inputs["input_ids"][:, part]}
            if padded:  # the window, of which a dynamic cache keeps the last keys alone, begins inside of the padding
                given["attention_mask"] = inputs["attention_mask"][:, : part.stop]
            expected = model(**given, **{name: caches[0]}).logits[:, -1]
            function = compiled if part.start else model
            assert_close(function(**given, **{name: caches[1]}).logits[:, -1], expected)


def test_generation_compiles() -> None:
    model, inputs = MODELS["gemma2"].build(), MODELS["gemma2"].inputs()
    model.set_attn_implementation("regard")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected = model.generate(**inputs, **options)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_a_mask_in_a_graph_has_elements_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def weights(x: torch.Tensor) -> torch.Tensor:
        found = integration.mask(1, 4, 4, allow_is_causal_skip=True)
        read = torch.where(found, 0.0, -torch.inf) + found[:, :, :, :4].float() + (found.logical_not() & found).float()
        out, _ = integration.attention(torch.nn.Module(), x, x, x, found)
        return out + integration.attention(torch.nn.Module(), x, x, x, read)[0]

    x = torch.randn(1, 1, 4, 8)
    with pytest.warns(RegardWarning, match="reads the elements of its attention mask"):
        expected = weights(x)
    warn_once.cache_clear()
    torch.compiler.reset()
    with pytest.warns(RegardWarning, match="reads the elements of its attention mask"):
        got = torch.compile(weights, backend="aot_eager", fullgraph=True)(x)
    assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_packed_sequences_compile_around_attention() -> None:
    model, ids = MODELS["llama"].build(), MODELS["llama"].inputs()["input_ids"]
    packed = {"input_ids": ids, "position_ids": torch.tensor([[*range(6), *range(5)]] * 2), "use_cache": False}
    expected, gradients = logits_and_gradients(model, "regard", packed)
    torch.compiler.reset()
    got, again = logits_and_gradients(torch.compile(model, backend="aot_eager"), "regard", packed)
    assert_close(got, expected)
    for name, gradient in gradients.items():
        assert_close(again[f"_orig_mod.{name}"], gradient)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without which transformers takes sequences as packed"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**packed)


# Rules on top of a model's masks


def on_masks(model: Any, change: Callable[[Any], Any]) -> list[Any]:
    """Let the attention of the second layer get changed masks; return the hook."""

    def hook(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, options | {"attention_mask": change(options["attention_mask"])}

    return [model.model.layers[1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)]


def edge(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (h != 2) | (i < 7) | (j != 4)


def other_heads(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (h != 1) & (i + j >= 0)


def ahead(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 3) & (h < 2) & (i >= 0)


EDGE, AHEAD = regard.mask(edge), regard.mask(ahead)
COMBINED: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "mask & rule": (lambda mask: mask & EDGE, edge),
    "rule & mask": (lambda mask: EDGE & mask, edge),
    "mask & function": (lambda mask: mask & other_heads, other_heads),
    "function & mask": (lambda mask: other_heads & mask, other_heads),
    "mask | rule": (lambda mask: mask | AHEAD, ahead),
    "rule | mask": (lambda mask: AHEAD | mask, ahead),
    "mask & rule of a tensor": (
        lambda mask: mask & regard.documents(torch.arange(11) // 6),
        lambda b, h, i, j: i // 6 == j // 6,
    ),
}


def dense(mask: Any, heads: int, rule: Callable[..., Any], joined: str) -> Any:
    """What `joined` says, of a mask with elements."""
    h, j = torch.arange(heads)[:, None, None], torch.arange(mask.shape[-1])
    pairs = rule(0, h, torch.arange(mask.shape[-1] - mask.shape[-2], mask.shape[-1])[:, None], j)
    return mask & pairs if "&" in joined else mask | pairs


@pytest.mark.parametrize("how", COMBINED)
def test_rules_on_top_of_masks_are_those_of_dense_masks(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS["mistral"].build(), MODELS["mistral"].inputs()
    change, rule = COMBINED[how]
    plain, _ = logits_and_gradients(model, "regard", inputs)
    (hook,) = on_masks(model, change)
    got, gradients = logits_and_gradients(model, "regard", inputs)
    hook.remove()
    assert not torch.allclose(got, plain, rtol=1e-3)
    monkeypatch.undo()
    on_masks(model, lambda mask: dense(mask, model.config.num_attention_heads, rule, how))
    expected, others = logits_and_gradients(model, "sdpa", inputs)
    assert_close(got, expected)
    for parameter, gradient in others.items():
        assert_close(gradients[parameter], gradient, of=torch.cat([g.flatten() for g in others.values()]))


def test_rules_on_top_of_masks_know_where_a_step_of_decoding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    (hook,) = on_masks(model, lambda mask: mask & EDGE)
    got = generated(model, "regard", inputs)
    hook.remove()
    monkeypatch.undo()
    on_masks(model, lambda mask: dense(mask, model.config.num_attention_heads, edge, "&"))
    for ours, theirs in zip(got.logits, generated(model, "sdpa", inputs).logits, strict=True):
        assert_close(ours, theirs)


def test_a_mask_that_lets_everyone_see_all_takes_rules() -> None:
    every = integration.mask(2, 1, 9, q_offset=8)  # a step of decoding
    assert every.rule is None
    assert (every & EDGE).rule is EDGE
    assert every | EDGE is every


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("how", ["mask & rule", "mask & function", "mask | rule", "rule & mask"])
def test_rules_on_top_of_masks_compile_in_one_graph(how: str) -> None:
    model, inputs = MODELS["llama"].build(), MODELS["llama"].inputs()
    on_masks(model, COMBINED[how][0])
    torch.compiler.reset()
    got, _ = logits_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), "regard", inputs)
    expected, _ = logits_and_gradients(model, "regard", inputs)
    assert_close(got, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_rules_on_top_of_masks_have_elements(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def elements(x: torch.Tensor) -> torch.Tensor:
        mask = integration.mask(1, 4, 4, allow_is_causal_skip=True)
        both, read = (mask & regard.window(1)) | regard.prefix(2), mask | regard.prefix(2)
        either = torch.where(both, x, 0.0), torch.where(read, x, 0.0), torch.where(read & regard.window(0, 1), x, 0.0)
        return torch.stack(either)

    run = torch.compile(elements, backend="aot_eager", fullgraph=True) if compiled else elements
    torch.compiler.reset()
    with pytest.warns(RegardWarning, match="the model reads the elements of its attention mask"):
        got = run(torch.ones(4, 4))
    i, j = torch.arange(4)[:, None], torch.arange(4)
    causal, band = j <= i, (j == i) | (j == i + 1)
    expected = [causal & (i - j <= 1) | (j < 2), causal | (j < 2), (causal | (j < 2)) & band]
    assert torch.equal(got[:, 0, 0], torch.stack(expected).float())


def test_rules_of_heads_on_top_of_masks_have_no_elements() -> None:
    mask = integration.mask(1, 9, 9, config=MODELS["llama"].build().config) & EDGE
    with pytest.warns(RegardWarning), pytest.raises(NotImplementedError) as told:
        mask.float()
    assert str(told.value) == (
        "llama reads the elements of its attention mask, which are the same for all heads, but mask(edge) differs "
        "between heads: it serves models that only hand their mask to attention"
    )


# Masks


def group_mask(groups: Any) -> Callable[..., Any]:
    def inner(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        last = groups.shape[-1] - 1
        of_q, of_kv = groups[batch_idx, q_idx.clamp(max=last)], groups[batch_idx, kv_idx.clamp(max=last)]
        of_q = torch.where(q_idx <= last, of_q, -1)
        return (of_q == of_kv) & (of_q >= 0)

    return inner


def functions() -> dict[str, Callable[..., Any]]:
    from transformers import masking_utils as m

    left = torch.tensor([2, 0])
    groups = torch.tensor([[0, 0, -1, 1, 1, 1, -1, 2, 2, 2, 2, 2], [3] * 5 + [-1] * 7])
    packed = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    return {
        "causal": m.causal_mask_function,
        "bidirectional": m.bidirectional_mask_function,
        "window": m.sliding_window_causal_mask_function(3),
        "window, both sides": m.sliding_window_bidirectional_mask_function(2),
        "chunks": m.chunked_causal_mask_function(4, left),
        "blocks": m.or_masks(m.causal_mask_function, m.blockwise_overlay(groups)),
        "packed": m.and_masks(m.packed_sequence_mask_function(packed), m.sliding_window_causal_mask_function(3)),
        "groups": m.or_masks(m.causal_mask_function, group_mask(groups[:, :9])),
    } | {name: m.and_masks(arithmetic(name)) for name in ARITHMETIC}


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "div trunc": lambda q, k: torch.div(k - 5, 3, rounding_mode="trunc") >= torch.div(q - 7, -2, rounding_mode="trunc"),
    "div floor": lambda q, k: torch.div(k - 5, 3, rounding_mode="floor") >= q.div(-2, rounding_mode="floor"),
    "div": lambda q, k: torch.div(q, 2) < k.div(3),
    "floor_divide": lambda q, k: torch.eq(torch.floor_divide(q - k, 3), (k - q).floor_divide(-2)),
    "remainder": lambda q, k: torch.remainder(q - k, 4).eq((k - q).remainder(-3)),
    "sums": lambda q, k: torch.add(q, 2).sub(k).mul(2).neg().le(-3),
    "differences": lambda q, k: torch.sub(3, torch.mul(k, 2)).abs() < torch.abs(9 - q),
    "ends": lambda q, k: torch.maximum(q - 8, k).minimum(q).clamp(2, max=6).clamp_min(3) == torch.clip(k, 3, 5),
    "logical": lambda q, k: (
        torch.logical_or(q.lt(k).logical_not(), (k > 7).logical_xor(q != 9)) & torch.logical_and(q, k)
    ),
    "bits": lambda q, k: torch.bitwise_not(q.bitwise_and(k).bitwise_xor(torch.bitwise_or(q, 4)) > 6),
    "dtypes": lambda q, k: (q - k).to(torch.bool) & (q.to(torch.float32) / 2 > k.long().int()) | (k - 8).bool(),
    "where": lambda q, k: torch.where(q > 8, k, 12 - k).sign().ge(torch.where(k < 3, 0, 1)),
    "methods": lambda q, k: (q * 1).less_equal(k).logical_or(k.greater(q - 3)).ne(q.ge(10)),
}


def arithmetic(name: str) -> Callable[..., Any]:
    return lambda batch_idx, head_idx, q_idx, kv_idx: ARITHMETIC[name](q_idx, kv_idx)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", [(12, 12, 0, 0), (3, 12, 7, 0), (2, 5, 8, 5)], ids=str)
@pytest.mark.parametrize("name", functions())
def test_a_rule_is_the_mask_that_transformers_makes(
    name: str, sizes: tuple[int, int, int, int], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q_length, kv_length, q_offset, kv_offset = sizes
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[0, :6] = False
    options = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": functions()[name], "attention_mask": padding if padded else None,
    }  # fmt: skip
    found = integration.mask(**options)
    monkeypatch.undo()
    from transformers.masking_utils import sdpa_mask

    expected = sdpa_mask(**options, allow_is_causal_skip=False)
    assert found.shape == expected.shape
    q, k = np.zeros((2, 1, q_length, 4)), np.zeros((2, 1, kv_length, 4))
    weights = regard.weights(q, k, mask=found.rule, offset=found.offset, origin=found.origin, engine="tiled")
    np.testing.assert_array_equal(weights > 0, expected)


@pytest.mark.parametrize("sizes", [(1, 7), (7, 1), (1, 1), (7, 7)], ids=str)
def test_a_mask_of_one_query_or_one_key_broadcasts(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    padding = torch.ones(2, sizes[1], dtype=torch.bool)
    padding[0, : sizes[1] // 2] = False
    found = integration.mask(2, *sizes, q_offset=5 if sizes[0] == 1 else 0, attention_mask=padding)
    out, _ = integration.attention(torch.nn.Module(), q, k, k, found)
    expected = F.scaled_dot_product_attention(q, k, k, found.make(), enable_gqa=True).nan_to_num()
    assert_close(out, expected.transpose(1, 2))


def test_a_mask_has_a_shape_and_no_elements() -> None:
    n = 2**20
    found = integration.mask(1, n, n)
    assert (found.ndim, found.shape, found.dtype) == (4, (1, 1, n, n), torch.bool)
    for copy in (
        found.contiguous(),
        found.to("cpu"),
        found.clone(),
        found.detach(),
        found.to(torch.device("cpu"), copy=True),
    ):
        assert copy.rule is found.rule
        assert copy.shape == found.shape


def test_elements_of_a_mask_are_made_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = MODELS["llama"].build().config
    found = integration.mask(1, 6, 6, config=config)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(1, 1, 6, 6)
    message = (
        "llama reads the elements of its attention mask, which is therefore no rule with attn_implementation='regard': "
        "masks of n_q × n_k are made for it"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(found[:, :, 2:, :4], causal[:, :, 2:, :4])
        assert torch.equal(found & found, causal)
        assert torch.equal(torch.where(integration.mask(1, 6, 6, config=config), 0.0, -1.0), causal.float() - 1)
        assert torch.equal(found.to(torch.float32), causal.float())
    assert [str(x.message) for x in told] == [message]
    x = torch.randn(1, 1, 6, 8)
    out, _ = integration.attention(torch.nn.Module(), x, x, x, found)
    assert_close(out, F.scaled_dot_product_attention(x, x, x, causal).transpose(1, 2))
    found[:, :, :, 0] = False  # what a model changes is read
    changed = causal.clone()
    changed[..., 0] = False
    for mask in (found, found.clone()):
        out, _ = integration.attention(torch.nn.Module(), x, x, x, mask)
        assert_close(out[:, 1:], F.scaled_dot_product_attention(x, x, x, changed).transpose(1, 2)[:, 1:])


# Models that know eager's masks alone


def eager_config(name: str = "GptOss") -> Any:
    return getattr(transformers, f"{name}PreTrainedModel").config_class()


SKIPS = [
    ("bidirectional_mask_function", {"allow_is_bidirectional_skip": True}),
    ("bidirectional_mask_function", {}),
    ("causal_mask_function", {"allow_is_causal_skip": True}),
    ("window", {"allow_is_bidirectional_skip": True, "local_size": 3}),
    ("window", {"allow_is_bidirectional_skip": True, "local_size": 9}),
]


@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ADDING)
def test_models_that_add_their_mask_give_what_eager_gives(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model, inputs = ADDING[name].build(), ADDING[name].inputs()
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    padded = [x for x in inputs if x.endswith("attention_mask")]
    for given in (inputs, inputs | {x: inputs[x].flip(1) for x in padded})[: 1 + len(padded)]:
        got, gradients = logits_and_gradients(run, "regard", given)
        expected, those_of_eager = logits_and_gradients(model, "eager", given)
        assert_close(got, expected)
        for parameter, gradient in those_of_eager.items():
            found = gradients[f"_orig_mod.{parameter}" if compiled else parameter]
            assert_close(found, gradient, of=torch.cat([g.flatten() for g in those_of_eager.values()]))


@pytest.mark.filterwarnings("ignore::regard.RegardWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["git", "deepseek_v4", "bigbird_pegasus"])
def test_models_that_add_their_mask_do_not_see_the_future(
    name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model, inputs = ADDING[name].build(), ADDING[name].inputs()
    model.set_attn_implementation("regard")
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    later = inputs[ids].clone()
    later[:, -2:] = 3 + (later[:, -2:] - 2) % (VOCABULARY - 3)  # another token
    with torch.no_grad():
        before, after = (run(**inputs | {ids: x}).logits[1] for x in (inputs[ids], later))  # without padding
    assert torch.equal(before[:-2], after[:-2])
    assert not torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:gpt_oss reads the elements")
@pytest.mark.parametrize(("model", "compiled"), [("GptOss", False), ("GptOss", True), ("Git", True)])
@pytest.mark.parametrize("padded", [None, False, True])
@pytest.mark.parametrize(("function", "options"), SKIPS, ids=str)
def test_masks_of_models_without_sdpa_are_those_of_eager(
    function: str,
    options: dict[str, Any],
    padded: bool | None,
    model: str,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    from transformers import masking_utils

    window = masking_utils.sliding_window_bidirectional_mask_function(3)
    # Without options transformers composed the mask, which a rule reads outside of the graph.
    one_graph = bool(options) or model == "Git"
    options = options | {"mask_function": getattr(masking_utils, function, window), "config": eager_config(model)}
    padding = None if padded is None else torch.tensor([[True] * 6, [True] * 4 + [not padded] * 2])

    def both(make: Any, padding: Any, x: torch.Tensor) -> Any:
        mask = make(2, 6, 6, attention_mask=padding, dtype=torch.float16, device="cpu", **options)
        return None if mask is None else (mask.dtype, x + mask)

    ours, theirs = (partial(both, make) for make in (integration.mask, masking_utils.eager_mask))
    if compiled:
        torch.compiler.reset()
        ours, theirs = (torch.compile(x, backend="aot_eager", fullgraph=one_graph) for x in (ours, theirs))
    x = torch.zeros(2, 3, 6, 6, dtype=torch.float16)
    assert found_equal(ours(padding, x), theirs(padding, x))


def found_equal(got: Any, expected: Any) -> bool:
    if got is None or expected is None:
        return got is expected
    return got[0] is expected[0] is torch.float16 and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("compiled", [False, True])
def test_no_mask_of_a_model_without_sdpa_hides_nothing(compiled: bool) -> None:
    module, x = torch.nn.Module(), torch.randn(1, 2, 5, 8)
    module.is_causal, module.config = True, eager_config()

    def run(x: torch.Tensor) -> torch.Tensor:
        return integration.attention(module, x, x, x, None)[0]

    torch.compiler.reset()
    out = torch.compile(run, backend="aot_eager", fullgraph=True)(x) if compiled else run(x)
    assert_close(out, F.scaled_dot_product_attention(x, x, x).transpose(1, 2))
    module.config = MODELS["llama"].build().config
    assert_close(run(x), F.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2))


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("how", ["&", "|"])
def test_rules_on_top_of_a_mask_of_floats(how: str, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.manual_seed(0)
    mask, x = integration.mask(1, 6, 6, config=eager_config(), dtype=torch.float32), torch.randn(1, 2, 6, 8)
    rule, causal = regard.window(2, 1), torch.ones(6, 6, dtype=torch.bool).tril()
    if read:
        with pytest.warns(RegardWarning, match="gpt_oss reads the elements"):
            mask[..., 0] += 0.5  # what the model adds stays
    both = mask & rule if how == "&" else mask | rule
    assert both.dtype is torch.float32
    out, _ = integration.attention(torch.nn.Module(), x, x, x, both)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    band = (distance <= 2) & (distance >= -1)
    bias = torch.zeros(6, 6).masked_fill(~(causal & band if how == "&" else causal | band), -torch.inf)
    if read:
        bias[:, 0] += 0.5 * (causal & ~(band & (how == "|")))[:, 0]
    assert_close(out, F.scaled_dot_product_attention(x, x, x, bias).transpose(1, 2))


# Models that do not run on regard


def test_a_model_with_attention_of_its_own_runs_on_eager_and_says_so() -> None:
    options = {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}
    message = (
        "XLNetPreTrainedModel computes its attention itself, without transformers' attention interface: "
        "it runs with attn_implementation='eager', not on regard"
    )
    config = transformers.XLNetConfig(**options, attn_implementation="regard")
    with pytest.warns(RegardWarning) as told:
        model = transformers.XLNetLMHeadModel(config)
    assert [str(x.message) for x in told] == [message]
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("regard")
    assert model.config._attn_implementation == "eager"


def test_layers_with_attention_of_their_own_keep_it_and_say_so() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 48, "image_size": 32,
             "patch_size": 8, "output_channels": 16, "global_attn_indexes": [1], "window_size": 2}  # fmt: skip
    message = (
        "SamVisionSdpaAttention computes attention itself, without transformers' attention interface: layers of this "
        "class run with attn_implementation='sdpa', not on regard"
    )
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = []
    for name in ("regard", "sdpa"):
        torch.manual_seed(0)
        config = transformers.SamVisionConfig(**sizes, attn_implementation=name)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = transformers.SamVisionModel(config).eval()
        assert (message in [str(x.message) for x in told]) == (name == "regard")
        with torch.no_grad():
            found.append(model(x).last_hidden_state)
    assert torch.equal(*found)


def test_a_model_that_supports_no_other_attention_is_taken_with_a_warning() -> None:
    model = OTHERS["inkling2"].build()
    with pytest.warns(RegardWarning, match="Inkling2PreTrainedModel does not support other attention"):
        model.set_attn_implementation("regard")
    assert model.config._attn_implementation == "regard"
    for name in ("t5", "whisper", "gpt2"):  # says nothing, or that it does
        MODELS[name].build().set_attn_implementation("regard")


def test_a_mask_for_other_sizes_is_an_error() -> None:
    x = torch.zeros(1, 1, 3, 4)
    with pytest.raises(ValueError, match="the mask is for 5 queries and 5 keys, but the call has 3 and 3"):
        integration.attention(torch.nn.Module(), x, x, x, integration.mask(1, 5, 5))


def test_a_function_that_is_no_rule_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"torch\.cumsum is not available in a rule"):
        integration.mask(1, 3, 3, mask_function=lambda b, h, q, k: torch.cumsum(q, 0) > 0)


@pytest.mark.parametrize("version", ["5.19.3", "5.25.0", "6.0.0.dev0"])
def test_a_version_that_is_not_tested_is_served_with_one_warning(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", version)  # the module may have replaced itself since the import
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", DENSE)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        integration.register_transformers()
        integration.register_transformers()
    assert [str(x.message) for x in told] == [
        f"register_transformers is tested with transformers 5.20 to 5.24, and {version} is installed: compare results "
        "with those of attn_implementation='eager'"
    ]


def test_what_transformers_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa_mask(batch_size: int, cache_position: Any, kv_length: int, kv_offset: int = 0, **options: Any) -> None:
        """As before 5.5, with the options that are read here."""

    monkeypatch.setattr("transformers.__version__", "5.4.0")
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", sdpa_mask)
    begin = r"^register_transformers reads names that transformers 5\.4\.0 does not have: "
    with pytest.raises(ImportError, match=begin + "q_length= of masking_utils.sdpa_mask, q_offset= of"):
        integration.register_transformers()
    monkeypatch.delattr("transformers.masking_utils.prepare_padding_mask")
    with pytest.raises(ImportError, match=begin + r"masking_utils.prepare_padding_mask; pip install 'regard\[transf"):
        integration.register_transformers()
