"""The matrices of the page are the steps of `regard.steps`, and its bars the scores of one query."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.viewer.data.matrices import MOST
from regard.viewer.scene.sources import Settings, arrays, example, for_page
from regard.viewer.serve.answers import Answers

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((4, 9, 4)), RNG.standard_normal((2, 11, 4)), RNG.standard_normal((2, 11, 3))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.7},
    "rules": {
        "mask": regard.window(3, 1),
        "score": [regard.softcap(3.0), regard.alibi(RNG.random(4))],
        "bias": RNG.standard_normal((4, 9, 11)),
        "sink": RNG.standard_normal(4),
    },
    "some see nothing": {"mask": RNG.random((4, 9, 11)) < 0.1},
}


def asked(answers: Answers, path: str) -> Any:
    found = answers.get(path)
    assert found.status == 200, found.content
    return found.content


def numbers(values: Any) -> np.ndarray:
    """Values of JSON, with null for what is not finite: here −∞ alone."""
    return np.array([[-np.inf if x is None else x for x in row] for row in values], float)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_the_steps(name: str) -> None:
    call, head = CASES[name], 3
    told = asked(Answers([arrays(Q, K, V, **call)], patience=None), f"arrays/matrices/0/{head}")["matrices"]
    steps = regard.steps(Q, K, V, **call)
    assert [x["symbol"] for x in told if x["name"] != "lse"][:3] == ["Q", "K", "V"]
    for x in told:
        if x["name"] == "score":  # the rules of a call are one
            expected = steps["score 2"].value[head]
        elif x["name"] in ("keys", "values"):
            expected = steps[f"{x['name']} per head"].value[head]
        else:
            expected = steps[x["name"]].value[head]
        expected = expected if expected.ndim > 1 else expected[:, None]
        np.testing.assert_allclose(numbers(x["values"]), expected, rtol=1e-5, atol=1e-12, err_msg=x["name"])
    names = {x["name"] for x in told}
    assert {"raw scores", "softmax", "output", "lse"} <= names
    assert ("masked" in names) == ("mask" in call or "causal" in call)


def test_matrices_of_the_example() -> None:
    answers = Answers([example(Settings("to be or not"))], patience=None)
    told = {x["name"]: x for x in asked(answers, "example/matrices/1/2")["matrices"]}
    assert told["scaled"]["formula"] == "S[i,j] = R[i,j] / √32"
    weights = np.stack([asked(answers, f"example/row/1/2/{i}") for i in range(13)])
    np.testing.assert_allclose(numbers(told["softmax"]["values"]), np.nan_to_num(weights), rtol=1e-4, atol=1e-7)


def test_projections_stand_around_the_steps() -> None:
    """What makes queries, keys and values, and what all heads write, of the shipped model."""
    answers = Answers([example(Settings("to be or not"))], patience=None)
    head, of = 2, answers.scenes["example"].layers[1].projections
    told = {x["name"]: x for x in asked(answers, f"example/matrices/1/{head}")["matrices"]}
    assert list(told) == [
        "input", "query projection", "projected queries", "key projection", "projected keys", "value projection",
        "queries", "keys", "values", "raw scores", "scaled", "masked", "lse", "softmax", "output",
        "heads side by side", "output projection", "written",
    ]  # fmt: skip
    values = {name: numbers(x["values"]) for name, x in told.items()}
    own = slice(head * 32, (head + 1) * 32)
    for what, bias in (("query", of.b_q), ("key", of.b_k)):
        plural = {"query": "queries", "key": "keys"}[what]
        bare = values["input"] @ values[f"{what} projection"] + bias[own]
        np.testing.assert_allclose(values[f"projected {plural}"], bare, atol=1e-4)
        assert told[f"projected {plural}"]["rotary"] == 16
        rotated = regard.positions.rope(values[f"projected {plural}"][:, :16], np.arange(13), base=100.0)
        np.testing.assert_allclose(values[plural][:, :16], rotated, atol=1e-3)
        np.testing.assert_allclose(values[plural][:, 16:], values[f"projected {plural}"][:, 16:], atol=1e-4)
    np.testing.assert_allclose(values["input"] @ values["value projection"], values["values"], atol=1e-4)
    np.testing.assert_allclose(values["heads side by side"][:, own], values["output"], atol=1e-4)
    np.testing.assert_allclose(values["heads side by side"] @ values["output projection"], values["written"], atol=1e-4)


def test_a_cross_attention_to_be_read_number_by_number() -> None:
    answers = Answers(for_page([example(Settings("to be"))]), patience=None)
    assert list(answers.scenes) == ["example", "hand", "cross"]
    scene = asked(answers, "scenes")["scenes"][2]
    assert (scene["layers"][0]["cross"], scene["layers"][0]["n_q"], scene["layers"][0]["n_k"]) == (True, 4, 5)
    assert answers.get("cross/tokens", {"axis": "query"}).content["tokens"] == ["le ", "chat ", "blanc ", "dort"]
    for head in range(2):
        told = {x["name"]: numbers(x["values"]) for x in asked(answers, f"cross/matrices/0/{head}")["matrices"]}
        assert max(max(x.shape) for x in told.values()) <= 12  # the page prints them as numbers
        assert "projected queries" not in told
        np.testing.assert_allclose(told["input"] @ told["query projection"], told["queries"])
        np.testing.assert_allclose(told["source"] @ told["key projection"], told["keys"])
        np.testing.assert_allclose(told["source"] @ told["value projection"], told["values"])
        np.testing.assert_allclose(told["heads side by side"] @ told["output projection"], told["written"], rtol=1e-5)
        looks = told["softmax"].argmax(axis=1).tolist()
        assert looks == [[0, 2, 1, 4], [2, 4, 2, 2]][head]  # le → the, chat → cat, blanc → white, dort → sleeping
    assert for_page(()) == ()
    others = (arrays(Q, K, V),)
    assert for_page(others) == others


def test_a_self_attention_to_be_read_number_by_number() -> None:
    answers = Answers(for_page([example(Settings("to be"))]), patience=None)
    layer = asked(answers, "scenes")["scenes"][1]["layers"][0]
    assert (layer["cross"], layer["causal"], layer["n_q"], layer["n_k"]) == (False, True, 5, 5)
    for head in range(2):
        told = {x["name"]: numbers(x["values"]) for x in asked(answers, f"hand/matrices/0/{head}")["matrices"]}
        assert max(max(x.shape) for x in told.values()) <= 8  # the page prints them as numbers
        for name, letter in (("queries", "query"), ("keys", "key"), ("values", "value")):
            np.testing.assert_array_equal(told["input"] @ told[f"{letter} projection"], told[name])
        np.testing.assert_allclose(told["heads side by side"] @ told["output projection"], told["written"], rtol=1e-5)
        looks = told["softmax"].argmax(axis=1).tolist()
        assert looks == [[0, 0, 1, 2, 1], [0, 1, 2, 3, 2]][head]  # slept → cat, → sat
        assert not np.triu(told["softmax"], 1).any()


def test_without_values_there_is_no_output() -> None:
    told = asked(Answers([arrays(Q, K)], patience=None), "arrays/matrices/0/0")["matrices"]
    assert [x["symbol"] for x in told] == ["Q", "K", "R", "S", "lse", "P"]


def test_long_heads_have_no_matrices() -> None:
    q = RNG.standard_normal((1, MOST + 1, 2))
    found = Answers([arrays(q, q, q)], patience=None).get("arrays/matrices/0/0")
    assert found.content == {"error": "matrices are shown up to 128 tokens, here are 129 queries and 129 keys"}
    assert found.status == 422


@pytest.mark.parametrize("name", CASES)
def test_scores_before_and_after_the_mask(name: str) -> None:
    call, head, i = CASES[name], 1, 6
    found = asked(Answers([arrays(Q, K, V, **call)], patience=None), f"arrays/scores/0/{head}/{i}")
    before = regard.steps(Q, K, V, **{option: x for option, x in call.items() if option not in ("mask", "causal")})
    after = regard.steps(Q, K, V, **call)
    expected = [steps[symbol].value[head, i] for steps, symbol in ((before, "S"), (after, "S"), (after, "P"))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert found.dtype == np.float32
