"""A guided tour: six to eight states of the page, with a few sentences each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.interpret.formats import score_text, weight_text
from regard.interpret.heads import NOTABLE, HeadStatistics
from regard.viewer.data import sentences
from regard.viewer.data.dots import dots
from regard.viewer.data.finding import Candidate, Pick, name_of, row_sentence
from regard.viewer.data.paths import described
from regard.viewer.scene.scenes import Head, Scene

LATE = 64
"""Last queries, among which "Without 1/√d" chooses its row."""


@dataclass(frozen=True)
class TourStep:
    """A title, a text, and a state of the page.

    settings: the example model's settings in this step, if they change.
    """

    title: str
    text: str
    state: Mapping[str, Any]
    settings: Mapping[str, Any] | None = field(default=None)


def tour(scene: Scene, name: str, every: Sequence[HeadStatistics], picked: Pick, b: int = 0) -> tuple[TourStep, ...]:
    """Return the steps of the tour that a scene can show.

    name: the scene's id. every: the statistics of all heads. picked: what the page opens on.
    """
    last = scene.layers[0].problem.n_q - 1
    first = {"scene": name, "i": last, "j": -1, "layer": picked.layer, "head": picked.head, "type": False}
    called = _called(scene, picked.layer, picked.head)
    sums = sentences.SUMS[scene.layers[picked.layer].problem.sink is not None]
    steps = [
        TourStep(
            "What a map is",
            f"This is one head, {called}. Each row is a token that looks, a query; each column is one it may look at, "
            f"a key. The cell says how much, from 0 to 1, and {sums}. The marked cell is where the "
            f"{'last' if picked.query < 0 else 'marked'} row looks most. On the right is that row alone.",
            first | {"view": "overview", "i": last if picked.query < 0 else picked.query},
        )
    ]
    previous, induction = (_best(every, kind) for kind in ("previous token", "induction"))
    if previous is not None:
        steps.append(
            TourStep(
                "A previous-token head",
                f"{_called(scene, previous.layer, previous.head)} looks at the token just before, with a mean weight "
                f"of {score_text(previous.previous)}: all its weight lies on the line beside the diagonal. So every "
                "token learns which token came before it.",
                first | {"view": "map", "layer": previous.layer, "head": previous.head},
            )
        )
    if induction is not None:
        row = scene.layers[induction.layer].head(induction.head, b).weights_of(np.array([last]))[0]
        said = row_sentence(row, last, last + 1, scene.query_tokens, scene.key_tokens, scene.prefix).text
        expected = f" {sentences.expects(scene.following[:1])}" if scene.following else ""
        steps.append(
            TourStep(
                "An induction head",
                f"{_called(scene, induction.layer, induction.head)} looks at what came next the last time. "
                f"{said}{expected} The short line away from the diagonal is a passage that repeats.",
                first | {"view": "overview", "layer": induction.layer, "head": induction.head},
            )
        )
        if previous is not None and previous.layer < induction.layer:
            steps.append(_composed(scene, first, previous, induction, b))
    if not scene.layers[picked.layer].lacks:
        steps.append(_unscaled(scene.layers[picked.layer].head(picked.head, b), first))
    if scene.settings is not None and scene.settings.get("causal"):
        steps.append(
            TourStep(
                "Without the mask",
                "Here the same model runs without its causal mask: every token also sees those after it, and the "
                "half above the diagonal fills. The model was never trained like that: compare what it expects next.",
                first | {"view": "overview"},
                {**scene.settings, "causal": False},
            )
        )
    sink = _best(every, "first-token sink")
    if sink is not None:
        column = scene.layers[sink.layer].head(sink.head, b).weights(range(last + 1), range(1))[:, 0]
        row = int(column[last // 2 :].argmax()) + last // 2
        steps.append(
            TourStep(
                "The sink",
                f"{_called(scene, sink.layer, sink.head)} rests on the first token, with a mean weight of "
                f"{score_text(sink.sink)}. Weights must sum to 1, also where a head finds nothing to copy: token "
                f"{name_of(scene.query_tokens, row)} puts {weight_text(column[row])} of its weight there.",
                first | {"view": "overview", "layer": sink.layer, "head": sink.head, "i": row, "j": 0},
            )
        )
    if scene.settings is not None:
        steps.append(
            TourStep(
                "Your own text",
                "Type a text that repeats something, a name or a phrase, and stop in the middle of it. See which head "
                "finds the earlier place, and what the model expects next.",
                first | {"view": "overview", "type": True},
            )
        )
    return tuple(steps)


def candidates(heads: Sequence[HeadStatistics]) -> list[Candidate]:
    """Return the candidates for a finding."""
    return [Candidate(x.layer, x.head, x.induction, x.sink, x.normalized_entropy) for x in heads]


def _composed(
    scene: Scene, first: dict[str, Any], previous: HeadStatistics, induction: HeadStatistics, b: int
) -> TourStep:
    """Return the step about a path: the earlier heads that wrote what the last query of an induction head reads."""
    one, other = (_called(scene, x.layer, x.head) for x in (previous, induction))
    last = first["i"]
    row = scene.layers[induction.layer].head(induction.head, b).weights_of(np.array([last]))[0]
    j = 1 + int(row[1:].argmax())  # the first token is where heads rest
    at = (induction.layer, induction.head, last, j)
    ranked = described(scene.layers, lambda layer, head: scene.layers[layer].head(head, b), at, b)["heads"]
    first_is = ranked and (ranked[0]["layer"], ranked[0]["head"]) == (previous.layer, previous.head)
    place = f", and {one} comes first" if first_is else ""
    return TourStep(
        "How the two compose",
        f"{one} comes first: it tells each token what stood before it. {other}, in a later layer, looks for tokens "
        "that were told the same as the current one is: those that came after an earlier copy. Two heads together copy "
        f"what came next. The marked list ranks the earlier heads that wrote what {other} reads now{place}. "
        "A large product is no proof of a cause: what it leaves out stands below the list.",
        first | {"view": "token", "layer": induction.layer, "head": induction.head, "j": j},
    )


def _unscaled(head: Head, first: dict[str, Any]) -> TourStep:
    row, scaled, unscaled = _saturated(head)
    return TourStep(
        "Without 1/√d",
        f"Scores are dot products of d = {head.problem.d} features, and their variance grows with d. Left: scores "
        f"times 1/√d. Right: the same scores without it. The largest weight of the marked row is "
        f"{weight_text(scaled)} with it and {weight_text(unscaled)} without. Near 1 the softmax saturates, and almost "
        "no gradient is left to learn from. Move the temperature to see it come and go.",
        first | {"view": "scale", "i": row},
    )


def _saturated(head: Head) -> tuple[int, float, float]:
    """Return the late query that 1/√d changes most, and its largest weights.

    Weights are with and without that scale: 1 / Σ exp(scale · (q·k − max q·k)).
    """
    start = max(0, head.n_q - LATE)
    products = dots(head, range(start, head.n_q), range(head.n_k)).astype(np.float64)
    below = products - np.fmax.reduce(products, axis=1, keepdims=True)
    scaled, unscaled = (
        1 / np.maximum(1, np.nansum(np.exp(scale * below), axis=1)) for scale in (head.problem.d**-0.5, 1.0)
    )
    row = int(np.argmax(unscaled - scaled))
    return start + row, float(scaled[row]), float(unscaled[row])


def _best(heads: Sequence[HeadStatistics], kind: str) -> HeadStatistics | None:
    notable = [head for head in heads if head.scores[kind] >= NOTABLE]
    return max(notable, key=lambda head: head.scores[kind], default=None)


def _called(scene: Scene, layer: int, head: int) -> str:
    of = scene.layers[layer]
    return f"L{of.number} H{of.numbers[head]}"
