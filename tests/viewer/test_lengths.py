"""Fewer queries than keys: of another text, and the last tokens of a text whose keys come from a cache."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.viewer.data.summary import look_data
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import arrays, translation
from regard.viewer.serve.answers import Answers
from regard.viewer.show.picture import picture

N_Q, N_K = 5, 12
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, n, 4)) for n in (N_Q, N_K, N_K))
WORDS = [f"w{j % 4}" for j in range(N_K)]


def after_cache() -> Scene:
    return arrays(Q, K, V, causal=True, offset=N_K - N_Q, tokens=WORDS[-N_Q:], key_tokens=WORDS)


SCENES = {"cross": translation(), "cache": after_cache()}


@pytest.fixture(params=SCENES)
def scene(request: pytest.FixtureRequest) -> Scene:
    return SCENES[request.param]


def weights(scene: Scene) -> np.ndarray:
    """The weights of both heads (2, n_q, n_k), 0 where hidden."""
    p = scene.layers[0].problem
    rules = {} if scene.layers[0].cross else {"causal": True, "offset": N_K - N_Q}
    return regard.weights(p.query.reshape(2, p.n_q, p.d), p.key.reshape(2, p.n_k, p.d), scale=p.scale, **rules)


def asked(scene: Scene, path: str) -> Any:
    answers = Answers([scene], patience=None)
    return answers.get(f"{next(iter(answers.scenes))}/{path}").content


def test_every_answer_has_queries_and_keys_of_its_own(scene: Scene) -> None:
    P = weights(scene)
    n_q, n_k = P.shape[1:]
    np.testing.assert_allclose(np.nan_to_num(asked(scene, "values/0/1")), P[1], atol=1e-6)
    np.testing.assert_allclose(np.nan_to_num(asked(scene, "column/0/1/2")), P[1, :, 2], atol=1e-6)
    assert asked(scene, "dots/0/1").shape == (n_q, n_k)
    assert asked(scene, f"scores/0/1/{n_q - 1}").shape == (3, n_k)
    shapes = {one["name"]: np.shape(one["values"]) for one in asked(scene, "matrices/0/1")["matrices"]}
    assert shapes["softmax"] == (n_q, n_k)
    i, j = n_q - 1, n_k - 1
    stages = {stage["name"]: stage for stage in asked(scene, f"step/0/1/{i}/{j}")["stages"]}
    assert stages["softmax weight"]["value"] == pytest.approx(P[1, i, j], abs=1e-6)
    for row in asked(scene, f"token/{i}")["rows"]:
        assert row["keys"][0] == P[row["head"], i].argmax()


def test_profiles_run_along_their_own_axis(scene: Scene) -> None:
    P = weights(scene)[0]
    profiles = asked(scene, "profiles/0/0")
    np.testing.assert_allclose(profiles["received"]["values"], P.sum(0), atol=1e-6)
    np.testing.assert_allclose(profiles["sink"]["values"], P[:, 0], atol=1e-6)
    assert len(profiles["entropy"]["values"]) == len(P)


def test_distances_are_counted_from_where_a_query_stands() -> None:
    P = weights(SCENES["cache"])[0]
    offset = asked(SCENES["cache"], "profiles/0/0")["offset"]
    back = np.arange(N_Q)[:, None] + N_K - N_Q - np.arange(N_K)
    for distance, mean in zip(offset["edges"], offset["values"], strict=False):
        assert mean == pytest.approx(P[back == distance].mean(), abs=1e-6)
    previous = asked(SCENES["cache"], "heads")["rows"][0]["scores"]["previous token"]
    assert previous == pytest.approx(P[back == 1].mean(), abs=1e-6)


def test_a_page_is_told_where_its_queries_stand() -> None:
    (cache,), (cross,) = (SCENES[name].described("x")["layers"] for name in ("cache", "cross"))
    assert cache["offset"] == N_K - N_Q
    assert "offset" not in cross


def test_pictures_and_lists_name_keys_by_their_own_tokens(scene: Scene) -> None:
    data = look_data(scene)
    choice = data.choose(0, 1)
    row = weights(scene)[1, -1]
    assert next(token for token, _ in data.attended(choice)) == row.argmax()
    drawn = picture(data, choice).decode()
    assert all(f">{label}<" in drawn for label in (*data.labels, *data.key_labels))


def test_two_texts_are_the_reason_why_heads_have_no_score() -> None:
    data = look_data(SCENES["cross"])
    drawn = picture(data, data.choose()).decode()
    assert "queries and keys are two texts" in drawn
    assert "nothing repeats" not in drawn
