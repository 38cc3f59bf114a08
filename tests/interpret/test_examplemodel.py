"""The model that ships with regard: its forward pass, its card, and the heads the card promises."""

import re
from importlib.resources import files

import numpy as np
import pytest
from safetensors.numpy import load

from regard.examplemodel import BOS, LONGEST, ExampleModel, repeated_bytes
from regard.insight import head_statistics
from regard.interpret.examplemodel import blocks
from regard.positions import rope
from support import softmax

PERIODS = (12, 24, 40, 64, 96)
ROUNDING = 0.0051  # the card gives two decimals
TEXT = "It was a bright cold day, and it was a bright cold night."


@pytest.fixture(scope="module")
def model():
    return ExampleModel.load()


@pytest.fixture(scope="module")
def card():
    return files("regard.interpret.examplemodel").joinpath("CARD.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def repeats(model):
    """For each period of the card, the trace of random bytes and their second copy."""
    return {period: model.run(repeated_bytes(period, count=4, seed=1)) for period in PERIODS}


def all_heads(trace):
    return [h for layer in range(trace.layers) for h in head_statistics(trace.weights(layer), trace.ids, layer=layer)]


def by_hand(model, ids, *, temperature=1.0, scale=True, causal=True, ablate=()):
    """The forward pass once more, in float64, from the definition: logits (n, 256) and the weights of every layer."""
    w, config = {name: array.astype(np.float64) for name, array in model._weights.items()}, model.config
    n, r, d = len(ids), config.rotary, config.head_width
    norm = lambda x, gain: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * gain  # noqa: E731
    x, maps = w["embedding"][ids], []
    angle = np.arange(n)[:, None] * config.base ** (-np.arange(0, r, 2) / r)
    turn = np.exp(1j * angle)

    def rotate(x):
        z = (x[..., : r // 2] + 1j * x[..., r // 2 : r]) * turn
        return np.concatenate([z.real, z.imag, x[..., r:]], -1)

    for layer in range(config.layers):
        y = norm(x, w[f"{layer}.norm1"])
        flat = (y @ w[f"{layer}.{name}"] + w.get(f"{layer}.{name}_bias", 0) for name in "qkv")
        q, k, v = (x.reshape(n, -1, d).swapaxes(0, 1) for x in flat)
        scores = np.einsum("hia,hja->hij", rotate(q), rotate(k)) * (d**-0.5 if scale else 1) / temperature
        if causal:
            scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        maps.append(softmax(scores))
        out = np.einsum("hij,hjb->ihb", maps[-1], v)
        for head in range(config.heads):
            how = dict(ablate).get((layer, head))
            if how is not None:
                out[:, head] = {"zero": np.zeros(d), "mean": out[:, head].mean(0)}[how]
        x = x + out.reshape(n, -1) @ w[f"{layer}.o"]
        y = norm(x, w[f"{layer}.norm2"]) @ w[f"{layer}.up"]
        x = x + (y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))) @ w[f"{layer}.down"]
    return norm(x, w["norm"]) @ w["unembedding"], maps


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 3.0},
        {"scale": False},
        {"causal": False},
        {"ablate": {(2, 2): "zero"}},
        {"ablate": {(0, 1): "mean", (0, 3): "zero", (2, 0): "mean"}, "temperature": 2.0},
    ],
    ids=lambda options: str(options),
)
def test_forward_pass_is_its_definition(model, options):
    ids = model.encode(TEXT)
    trace = model.run(ids, **options)
    logits, maps = by_hand(model, ids, **options)
    assert trace.logits.dtype == np.float32
    np.testing.assert_allclose(trace.logits, logits, atol=1e-3)
    for layer, expected in enumerate(maps):
        np.testing.assert_allclose(trace.weights(layer), expected, atol=1e-4)


def test_trace_holds_what_its_shapes_say(model):
    ids = model.encode("shapes")
    trace = model.run(ids)
    h, n, d = model.config.heads, len(ids), model.config.head_width
    assert trace.layers == model.config.layers
    assert 2 <= trace.layers <= 4
    assert trace.heads == h
    assert trace.logits.shape == (n, 256)
    for layer in range(trace.layers):
        assert trace.q[layer].shape == trace.k[layer].shape == trace.v[layer].shape == (h, n, d)
        assert trace.lse[layer].shape == (h, n)
        np.testing.assert_allclose(trace.weights(layer).sum(-1), 1, atol=1e-5)


def test_any_tile_of_the_weights(model):
    trace = model.run(model.encode(TEXT))
    whole = trace.weights(1)
    tile = trace.weights(1, slice(10, 30), slice(5, 21))
    assert tile.shape == (model.config.heads, 20, 16)
    np.testing.assert_allclose(tile, whole[:, 10:30, 5:21], atol=1e-6)


def test_a_batch_is_its_rows(model):
    ids = repeated_bytes(9, count=3, seed=5)
    batch = model.run(ids)
    for row in range(3):
        np.testing.assert_allclose(batch.logits[row], model.run(ids[row]).logits, atol=1e-4)
    assert batch.weights(0).shape == (3, model.config.heads, 19, 19)
    assert model.loss(ids) == pytest.approx(np.mean([model.loss(row) for row in ids]), abs=1e-5)


def test_loss_is_the_mean_of_the_negative_log_probability(model):
    ids = model.encode(TEXT)
    probability = softmax(model.run(ids).logits.astype(np.float64))
    expected = -np.log([probability[i, token] for i, token in enumerate(ids[1:])])
    np.testing.assert_allclose(model.run(ids).losses(), expected, atol=1e-9)
    assert model.loss(ids) == pytest.approx(expected.mean())


def test_each_head_is_ablated_in_turn(model):
    ids = repeated_bytes(24, count=2, seed=7)
    for how in ("zero", "mean"):
        found = list(model.ablations(ids, how, causal=True))
        assert [at[:2] for at in found] == [(layer, head) for layer in range(3) for head in range(4)]
        for layer, head, trace in found[::5]:
            expected = model.run(ids, ablate={(layer, head): how})
            np.testing.assert_array_equal(trace.logits, expected.logits)
    with pytest.raises(ValueError, match="zero or mean"):
        next(model.ablations(ids, "half"))


def test_layers_before_an_ablated_head_run_once(model, monkeypatch):
    calls, compute = [], blocks.attention.attention
    monkeypatch.setattr(blocks.attention, "attention", lambda *given, **how: calls.append(1) or compute(*given, **how))
    assert len(list(model.ablations(repeated_bytes(8)))) == 12
    assert len(calls) == 3 + 4 * (2 + 1 + 0)


def test_projections_make_queries_keys_values_and_what_is_written(model):
    trace, h, d = model.run(model.encode(TEXT)), model.config.heads, model.config.head_width
    n = len(trace.ids)
    for layer in range(trace.layers):
        of = model.projections(trace, layer)
        heads = {
            name: (of["x"] @ of[name] + of.get(f"{name}_bias", 0)).reshape(n, h, d).swapaxes(0, 1) for name in "qkv"
        }
        rotated, plain = np.split(heads["q"], [model.config.rotary], axis=-1)
        rotated = rope(rotated, np.arange(n), base=model.config.base)
        np.testing.assert_allclose(np.concatenate([rotated, plain], -1), trace.q[layer], atol=1e-4)
        np.testing.assert_allclose(heads["v"], trace.v[layer], atol=1e-5)
        np.testing.assert_allclose(trace.out[layer], trace.weights(layer) @ trace.v[layer], atol=1e-4)
    zeroed = model.run(model.encode(TEXT), ablate={(1, head): "zero" for head in range(h)})
    np.testing.assert_array_equal(zeroed.x[1], trace.x[1])
    np.testing.assert_array_equal(zeroed.out[1], trace.out[1])  # before heads are ablated


def test_an_ablated_head_matters_for_what_it_does(model, card):
    layer, head, *_ = claim(card, "induction")
    ids = repeated_bytes(24, count=4, seed=1)
    whole, without = model.run(ids).losses(), model.run(ids, ablate={(layer, head): "zero"}).losses()
    assert without[:, 24:].mean() > whole[:, 24:].mean() + 0.5  # the second copy, which it copies
    assert abs(without[:, :24].mean() - whole[:, :24].mean()) < 0.2
    np.testing.assert_array_equal(model.run(ids, ablate={}).logits, model.run(ids).logits)


def test_it_has_learned_english(model):
    assert model.loss(model.encode(TEXT)) < 0.6 * model.loss(model.encode(TEXT[::-1]))


def test_text_to_ids_and_labels(model):
    ids = model.encode("a b\n\té~")
    assert ids.tolist() == [BOS, 97, 32, 98, 10, 9, 0xC3, 0xA9, 126]
    assert model.encode("\udcff").tolist() == [BOS, 0xFF]
    assert model.labels(ids) == ["⟨bos⟩", "a", "␣", "b", "⏎", "⇥", "\\xc3", "\\xa9", "~"]


def test_repeated_bytes():
    ids = repeated_bytes(7, copies=3, count=2, seed=3)
    assert ids.shape == (2, 22)
    assert (ids[:, 0] == BOS).all()
    assert (ids[:, 1:8] == ids[:, 8:15]).all()
    assert (ids[:, 1:8] == ids[:, 15:]).all()
    assert ids[:, 1:].min() > 32
    assert ids[:, 1:].max() < 127
    assert (ids[0] != ids[1]).any()
    assert (ids == repeated_bytes(7, copies=3, count=2, seed=3)).all()
    assert (ids != repeated_bytes(7, copies=3, count=2, seed=4)).any()


def test_weights_are_small():
    package = files("regard.interpret.examplemodel")
    assert len(package.joinpath("weights.safetensors").read_bytes()) <= 1_000_000


def test_weights_survive_a_file(model):
    data = model.to_safetensors()
    again, ids = ExampleModel.from_safetensors(data), model.encode("to be")
    np.testing.assert_array_equal(again.run(ids).logits, model.run(ids).logits)
    assert (again.config, load(data)["0.q"].dtype) == (model.config, np.float16)


def test_the_second_copy_costs_what_the_card_says(card, repeats):
    claims = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", card, re.MULTILINE)
    assert tuple(int(period) for period, *_ in claims) == PERIODS
    for period, first, second in claims:
        losses = repeats[int(period)].losses()
        first_loss, second_loss = losses[:, : int(period)].mean(), losses[:, int(period) :].mean()
        assert first_loss == pytest.approx(float(first), abs=ROUNDING)
        assert second_loss == pytest.approx(float(second), abs=ROUNDING)
        assert second_loss < first_loss / 3


def claim(card, kind):
    """Layer, head and score of the strongest head of a kind, and the best score of the control."""
    row = re.search(rf"^\| {kind} \| layer (\d), head (\d) \| ([\d.]+) \| ([\d.]+) \|$", card, re.MULTILINE)
    layer, head, score, control = row.groups()
    return int(layer), int(head), float(score), float(control)


@pytest.mark.parametrize("kind", ["previous token", "induction"])
def test_the_head_that_the_card_names(card, repeats, kind):
    layer, head, score, _ = claim(card, kind)
    scores = np.array([[h.scores[kind] for h in all_heads(trace)] for trace in repeats.values()])
    named = scores[:, layer * repeats[12].heads + head]
    assert named.min() == pytest.approx(score, abs=ROUNDING)
    assert named.min() > 0.5
    assert (named > 3 * np.median(scores, axis=1)).all()


def test_the_sink_that_the_card_names(card, model):
    layer, head, score, _ = claim(card, "first-token sink")
    traces = [model.run(repeated_bytes(period, copies=1, count=4, seed=1)) for period in PERIODS]
    scores = [head_statistics(trace.weights(layer), trace.ids)[head].sink for trace in traces]
    assert min(scores) == pytest.approx(score, abs=ROUNDING)
    assert score > 0.3


def test_it_copies_words_too(card, model):
    layer, head, *_ = claim(card, "induction on text")
    words = "The lighthouse at Valparaiso kept forty letters for Quillon Marsh. "
    ids = model.encode(words + words)
    trace = model.run(ids)
    losses = trace.losses()
    assert losses[len(words) :].mean() < losses[: len(words)].mean() / 2
    scores = [
        h.induction for layer in range(trace.layers) for h in head_statistics(trace.weights(layer), ids, prefix=3)
    ]
    assert scores[layer * trace.heads + head] > max(0.3, 3 * np.median(scores))


def test_previous_token_heads_come_before_the_induction_heads_that_use_them(card):
    assert claim(card, "previous token")[0] < claim(card, "induction")[0]


def test_the_control_of_one_layer_did_not_learn_to_copy(card):
    assert claim(card, "induction")[3] < 0.2
    seconds = re.findall(r"^\| \d+ \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|$", card, re.MULTILINE)
    assert min(map(float, seconds)) > 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda model: model.encode(""), ValueError, "text is empty: give at least one character"),
        (lambda model: model.encode(b"x"), TypeError, "text must be a str, got bytes"),
        (lambda model: model.run([]), ValueError, r"ids must hold at least one token, got shape \(0,\)"),
        (lambda model: model.run([0, 256]), ValueError, r"ids must lie in 0\.\.255, got 0 to 256"),
        (lambda model: model.run([0, -1]), ValueError, r"ids must lie in 0\.\.255, got -1 to 0"),
        (lambda model: model.run([0.0, 1.0]), TypeError, "ids must be integers, got float64"),
        (lambda model: model.run(np.zeros(LONGEST + 1, int)), ValueError, "too long: 16385 tokens, at most 16384"),
        (lambda model: model.run([0, 1], temperature=0), ValueError, "temperature must be positive and finite, got 0"),
        (lambda model: model.run([0, 1], temperature=np.nan), ValueError, "temperature must be positive .* got nan"),
        (lambda model: model.run([0, 1], ablate={(3, 0): "zero"}), ValueError, r"3 layers of 4 heads, got \(3, 0\)"),
        (
            lambda model: model.run([0, 1], ablate={(0, 0): "half"}),
            ValueError,
            "zero or mean for each head, got 'half'",
        ),
        (lambda model: model.run([0, 1], ablate=[(0, 0)]), TypeError, r"ablate must be a mapping of .* got list"),
        (lambda model: model.loss([0]), ValueError, "ids must hold at least 2 tokens to have a loss, got 1"),
    ],
)
def test_bad_input_is_one_clear_error(model, call, error, message):
    with pytest.raises(error, match=message):
        call(model)
