"""The example model without one head: the loss of a text, and next-token odds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.examplemodel import ExampleModel, Trace
from regard.interpret.ablation import Losses, losses_without
from regard.interpret.examplemodel.model import Replacement
from regard.viewer.scene.labels import byte_label
from regard.viewer.scene.scenes import Array, Scene
from regard.viewer.scene.sources import Settings

LIKELIEST = 5
"""Next tokens listed from each of two runs."""


@dataclass(frozen=True)
class Odds:
    """The probability of a next token, before and after a head is removed.

    actual: the text continues with this token.
    """

    token: str
    before: float
    after: float
    actual: bool


def run(model: ExampleModel, scene: Scene, heads: Mapping[tuple[int, int], Replacement]) -> Trace:
    """Run the model on the scene's text, with its settings, without some heads."""
    ids, options = _arguments(scene)
    return model.run(ids, ablate=heads, **options)


def every_head(model: ExampleModel, scene: Scene, how: Replacement, progress: Callable[[float], object]) -> Losses:
    """Return the loss of a scene's text with all heads, and without each of them."""
    ids, options = _arguments(scene)
    return losses_without(model, ids, how, progress, **options)


def odds(before: Trace, after: Trace, i: int) -> tuple[Odds, ...]:
    """Return the odds of next tokens after position i, by probability before.

    They include the likeliest `LIKELIEST` of each run, and the token that follows in the text.
    """
    shares = _softmax(before.logits[i]), _softmax(after.logits[i])
    actual = int(before.ids[i + 1]) if i + 1 < len(before.ids) else None
    listed = {int(byte) for share in shares for byte in np.argsort(-share, kind="stable")[:LIKELIEST]}
    listed |= set() if actual is None else {actual}
    order = sorted(listed, key=lambda byte: -shares[0][byte])
    return tuple(
        Odds(byte_label(byte), float(shares[0][byte]), float(shares[1][byte]), byte == actual) for byte in order
    )


def described_losses(losses: Losses) -> dict[str, Any]:
    """Return the losses as JSON."""
    rows = [{"layer": layer, "head": head, "loss": loss} for (layer, head), loss in losses.without.items()]
    return {"loss": losses.whole, "rows": rows}


def described_runs(before: Trace, after: Trace, i: int) -> dict[str, Any]:
    """Return the odds after position i, and the losses of all positions, as JSON."""
    return {
        "i": i,
        "odds": [vars(odd) for odd in odds(before, after, i)],
        "losses": {"before": before.losses().tolist(), "after": after.losses().tolist()},
    }


def nbytes_of(trace: Trace) -> int:
    """Return the memory of a run."""
    return sum(x.nbytes for x in (trace.logits, *trace.q, *trace.k, *trace.v, *trace.x, *trace.out))


def value_norms(value: Array) -> NDArray[np.float32]:
    """Return the norm of each value (n_k, d_v), ‖v_j‖, (n_k,)."""
    value = value.astype(np.float64)
    return np.asarray(np.sqrt((value * value).sum(-1)), np.float32)


def _arguments(scene: Scene) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return the ids and options of `ExampleModel.run` for a scene."""
    assert scene.ids is not None
    settings = Settings.of(scene.settings or {})
    return scene.ids[0], {"temperature": settings.temperature, "scale": settings.scaled, "causal": settings.causal}


def _softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    shares = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(shares / shares.sum())
