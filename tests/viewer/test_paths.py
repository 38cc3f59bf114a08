"""The list of earlier heads that wrote what a head reads: its route, for scenes with values and without."""

from typing import Any

import numpy as np
import pytest

from regard.interpret.capture.captured import Capture
from regard.interpret.capture.layers import Layer
from regard.viewer.data.sentences import UNWRITTEN
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import Settings, arrays, captured, example
from regard.viewer.scene.weights import weights
from regard.viewer.serve.answers import Answers

RNG = np.random.default_rng(0)


def asked(scene: Scene, path: str) -> Any:
    answers = Answers([scene], patience=None)
    answer = answers.get(f"{next(iter(answers.scenes))}/{path}")
    answers.close()
    return answer.content


def test_the_example_is_read_through_its_previous_token_head() -> None:
    told = asked(example(Settings()), "earlier/2/2/53/25")
    first = told["heads"][0]
    assert (first["layer"], first["head"], first["key"]) == (1, 0, 24)
    assert first["product"] == pytest.approx(told["weight"] * first["weight"] * first["norm"], rel=1e-5)
    assert (told["values"], told["why"], len(told["heads"])) == (True, "", 8)


def test_weights_alone_have_products_of_weights() -> None:
    P = np.tril(RNG.dirichlet(np.ones(6), (2, 3, 6)))
    P /= P.sum(-1, keepdims=True)
    told = asked(weights(P, tokens=list("abcdef")), "earlier/1/2/5/4")
    assert told["values"] is False
    assert told["weight"] == pytest.approx(P[1, 2, 5, 4], rel=1e-5)
    best = max(told["heads"], key=lambda x: x["product"])
    assert best["product"] == pytest.approx(P[1, 2, 5, 4] * P[0, :, 4, 1:4].max(), rel=1e-5)
    assert {x["norm"] for x in told["heads"]} == {None}


def test_what_is_unknown_is_said() -> None:
    q, k = RNG.standard_normal((2, 2, 8, 4))
    assert asked(example(Settings("to be")), "earlier/0/1/3/2")["why"] == UNWRITTEN["first"]
    assert asked(arrays(q[:, :3], k), "earlier/0/1/2/2")["why"] == UNWRITTEN["two_texts"]
    assert asked(example(Settings("to be")), "earlier/1/1/9/2") == {"error": "query 9 does not exist: there are 6"}
    assert asked(example(Settings("to be")), "earlier/1/1/2/9") == {"error": "key 9 does not exist: there are 6"}


def test_keys_that_were_cached_have_no_writers() -> None:
    q, k = RNG.standard_normal((2, 2, 8, 4))
    seen = Capture([Layer.of(f"layers.{n}", q[:, 5:], k, causal=True, offset=5, number=n) for n in (0, 1)])
    (scene,) = captured(seen)
    assert asked(scene, "earlier/1/0/2/3")["why"] == UNWRITTEN["cached"]
    assert asked(scene, "earlier/1/0/2/6")["why"] == ""
