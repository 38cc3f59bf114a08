"""Scenes of weights alone: all that reads weights shows what was given, and the rest says what is missing."""

import re
import zlib
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.viewer.data.scores import estimates, layer_scores
from regard.viewer.looking import scenes_of
from regard.viewer.scene.sources import arrays
from regard.viewer.scene.weights import LACKS, Operands, weights
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.saving import Still, archive

RNG = np.random.default_rng(0)
N, HEADS = 12, 3
Q, K, V = RNG.standard_normal((3, HEADS, N, 8)).astype(np.float32)
TOKENS = [f"{word} " for word in ["the", "cat", "sat", "on", "the", "mat", "as", "the", "cat", "was", "tired", "."]]
P = regard.attention(Q, K, V, causal=True, return_weights=True)[1]


def shown(scene: Any, layer: int = 0, b: int = 0) -> np.ndarray:
    """The weights of a layer's heads."""
    of = scene.layers[layer]
    return np.stack([of.head(h, b).weights(range(of.problem.n_q), range(of.problem.n_k)) for h in range(of.heads)])


def asked(scene: Any, path: str, **query: str) -> Any:
    answers = Answers([scene], patience=None)
    return answers.get(f"{next(iter(answers.scenes))}/{path}", query)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1), st.booleans())
def test_weights_are_those_given(heads: int, n_q: int, n_k: int, seed: int, leaking: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.dirichlet(np.full(n_k, 0.3), (heads, n_q)) * (rng.uniform(0, 1, (heads, n_q, 1)) if leaking else 1)
    rows[rng.random((heads, n_q)) < 0.1] = 0  # queries that see nothing
    scene = weights(rows)
    if scene.layers[0].problem.sink is None:  # sums of 1, except for rounding
        rows = rows / np.maximum(rows.sum(-1, keepdims=True), 1e-300)
    np.testing.assert_allclose(shown(scene), rows, atol=2e-6)
    some = scene.layers[0].head(0).weights_of(np.arange(n_q))
    np.testing.assert_allclose(some, shown(scene)[0], atol=1e-6)


VIEWS = (
    "heads", "finding", "token/7", "thumbs/0", "map/0/1", "tile/0/1/0/0/0", "values/0/1", "row/0/2/5", "column/0/0/3",
    "sinks/0/0",
)  # fmt: skip


def alike(one: Any, other: Any) -> None:
    """Compare two answers; numbers as numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            alike(one[name], other[name])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            alike(*pair)
    elif isinstance(one, float | np.ndarray):
        np.testing.assert_allclose(np.asarray(one, float), np.asarray(other, float), atol=1e-3)
    else:
        assert one == other


@pytest.mark.parametrize("path", VIEWS)
def test_views_of_weights_are_those_of_queries_and_keys(path: str) -> None:
    one, other = (asked(x, path) for x in (arrays(Q, K, V, tokens=TOKENS, causal=True), weights(P, tokens=TOKENS)))
    assert one.status == other.status == 200
    alike(one.content, other.content)


SCORED = ("step/0/{h}/5/3", "matrices/0/{h}", "scores/0/{h}/5", "dots/0/{h}", "variance/0/{h}")


@pytest.mark.parametrize("path", SCORED)
def test_what_needs_queries_and_keys(path: str) -> None:
    scene = weights(P, tokens=TOKENS, operands={(0, 2): Operands(Q[2], K[2], V[2])})
    answer = asked(scene, path.format(h=1))
    assert (answer.status, answer.content) == (422, {"error": f"{LACKS}; those of L0 H2 are here."})
    known = asked(arrays(Q, K, V, causal=True), path.format(h=2))
    alike(known.content, asked(scene, path.format(h=2)).content)
    assert len(asked(scene, "norms/0/2").content) == N
    assert len(asked(scene, "norms/0/1").content) == 0
    assert "lse" not in asked(scene, "profiles/0/0").content


def test_what_rows_leave_is_the_sink() -> None:
    half = P / 2
    scene = weights(half, tokens=TOKENS)
    np.testing.assert_allclose(shown(scene), half, atol=1e-6)
    np.testing.assert_allclose(asked(scene, "sinks/0/0").content, 0.5, atol=1e-6)
    assert scene.layers[0].described()["sink"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_models(dtype: torch.dtype) -> None:
    """Eager models return a tuple with (batch, heads, n_q, n_k) of each layer, and None for layers of another kind."""
    both = torch.tensor(np.stack([P, P[::-1]])).to(dtype)
    (scene,) = scenes_of(weights=(both, None, both.flip(0)))
    assert [layer.number for layer in scene.layers] == [0, 2]
    assert scene.batch == 2
    for layer, b, expected in ((0, 0, P), (0, 1, P[::-1]), (1, 0, P[::-1])):
        np.testing.assert_allclose(shown(scene, layer, b), expected, atol=5e-3 if dtype != torch.float32 else 1e-6)
    assert not scene.layers[0].described()["sink"]  # what rounding leaves is no sink


@pytest.mark.parametrize("name", ["gpt_oss", "bert", "t5"])
def test_transformers_return_weights(name: str) -> None:
    """With sinks, padding on either side, and cross-attention."""
    from small_models import MODELS

    model = MODELS[name].build()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**MODELS[name].inputs(), output_attentions=True)
    kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"] if name == "t5" else ["attentions"]
    for of in kinds:
        (scene,) = scenes_of(weights=outputs[of])
        for layer, expected in enumerate(outputs[of]):
            for b in range(scene.batch):
                np.testing.assert_allclose(shown(scene, layer, b), expected[b], atol=1e-6)
        assert scene.layers[0].cross == (of == "cross_attentions")
        assert scene.layers[0].described()["sink"] == (name == "gpt_oss")


def test_weights_of_other_forms() -> None:
    for form in (P[None], [P], {0: jnp.asarray(P)}, torch.tensor(P), [P.tolist()]):
        (scene,) = scenes_of(weights=form, tokens=TOKENS)
        np.testing.assert_allclose(shown(scene), P, atol=1e-6)
    few = P[:, :, :5] / P[:, :, :5].sum(-1, keepdims=True)
    (scene,) = scenes_of(weights={3: few}, tokens=TOKENS, key_tokens="abcde")
    assert (scene.layers[0].number, scene.layers[0].cross, scene.key_tokens) == (3, True, tuple("abcde"))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other things": ({"weights": "map"}, "weights must be an array, or arrays of layers, got str"),
    "one head": ({"weights": P[0]}, "weights must be (layers, heads, n_q, n_k), or (heads, n_q, n_k) of one layer,"),
    "none": ({"weights": (None, None)}, "weights hold no layer; models of transformers return them with attn_impl"),
    "text": ({"weights": [np.array([[["a"]]])]}, "weights of layer 0 must be real numbers, got <U1"),
    "booleans": ({"weights": [P > 0]}, "weights of layer 0 must be real numbers, got bool"),
    "a name": ({"weights": {"first": P}}, "weights must be by numbers of layers, from 0 on, got 'first'"),
    "nothing": ({"weights": [P[:, :0]]}, "weights of layer 0 must be (heads, n_q, n_k) or (batch, heads, n_q, n_k)"),
    "rows": ({"weights": [[[[0.5, 0.5], [1.0]]]]}, "weights of layer 0 must be (heads, n_q, n_k) or (batch"),
    "nan": ({"weights": [P, np.where(P > 0, P, np.nan)]}, "weights of layer 1 must be finite, got nan at head 0"),
    "scores": ({"weights": P - 0.5}, "weights of layer 0 must be at least 0, as a softmax makes them, got -0.5 at"),
    "sums": ({"weights": 1.5 * P}, "weights of layer 0 must sum to at most 1 in a row, got 1.5 at head 0, query 0"),
    "sizes": ({"weights": [P, P[:, :4, :4]]}, "weights of every layer must be of the same tokens: layer 0 has 12"),
    "tokens": ({"weights": P, "tokens": "abc"}, "tokens must be one for each row, 12, got 3"),
    "keys": ({"what": Q, "key": K, "weights": P}, "weights go with tokens and key_tokens alone, not with what, key"),
    "rules": ({"weights": P, "causal": True}, "weights go with tokens and key_tokens alone, not with causal"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_weights(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        scenes_of(**call)


def test_files(tmp_path: Path) -> None:
    regard.look(weights=P, tokens=TOKENS, save=[tmp_path / "map.svg", tmp_path / "page.html", tmp_path / "map.npz"])
    assert "cat" in (tmp_path / "map.svg").read_text("utf-8")
    held = re.search(r'"answers":"([^"]+)"', (tmp_path / "page.html").read_text("utf-8"))
    assert held is not None
    assert LACKS in zlib.decompress(b64decode(held[1])).decode()
    np.testing.assert_allclose(np.load(tmp_path / "map.npz")["weights"], P, atol=1e-6)
    known = weights(P, tokens=TOKENS, operands={(0, 2): Operands(Q[2], K[2], V[2])})
    assert '"weights/0/2":{"n_q":12' in Answers([known], patience=None).page("weights")
    assert set(np.load(BytesIO(archive(known)))) == {"weights", "tokens"}
    assert "cat" in Still(known).data.text


def test_a_weight_of_0_is_visible() -> None:
    one_hot = np.zeros((1, 8, 8))
    one_hot[0, 0] = 1 / 8
    one_hot[0, np.arange(1, 8), np.arange(1, 8)[::-1]] = 1
    one_hot[0, 5] = 0  # a row that sees nothing
    scene = weights(one_hot)
    (estimate,) = estimates(scene, 0, 8)
    assert "even" not in [claim.name for claim in estimate.outline.claims]
    (head,) = layer_scores(scene, 0)
    assert head.entropy == pytest.approx(0.0, abs=1e-6)  # without row 0, as 0 · log 0 = 0
    assert head.normalized_entropy == pytest.approx(0.0, abs=1e-6)
    found = scene.layers[0].head(0).seen(range(8), range(8))
    np.testing.assert_allclose(found, one_hot[0], atol=1e-7)
    visible = scene.layers[0].head(0).visible_of(np.arange(8))
    np.testing.assert_array_equal(visible, np.arange(8)[:, None].repeat(8, 1) != 5)


def test_zeros_beside_a_learned_sink() -> None:
    P = np.array([[[0.5, 0.0], [0.0, 0.25]]])
    head = weights(P).layers[0].head(0)
    np.testing.assert_allclose(head.weights_of(np.arange(2)), P[0], atol=1e-6)
    np.testing.assert_allclose(head.sinks(), [0.5, 0.75], atol=1e-6)
