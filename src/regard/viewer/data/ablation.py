"""Expectations of a model without one head: the loss of a text, and odds of tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.viewer.scene.running import LISTED, Expected, HeadLosses, Predicts
from regard.viewer.scene.scenes import Array


@dataclass(frozen=True)
class Odds:
    """The probability of a token, before and after a head is removed.

    actual: it is the token of the text.
    """

    token: str
    before: float
    after: float
    actual: bool


def odds(before: Expected, after: Expected, i: int) -> tuple[Odds, ...]:
    """Return the odds of tokens at position i, by probability before.

    The likeliest tokens of each run are included, and the token of the text.
    """
    shares = before.shares(i), after.shares(i)
    actual = before.actual(i)
    listed = {int(token) for share in shares for token in np.argsort(-share, kind="stable")[:LISTED]}
    listed |= set() if actual is None else {actual}
    order = sorted(listed, key=lambda token: -shares[0][token])
    return tuple(
        Odds(before.label(token), float(shares[0][token]), float(shares[1][token]), token == actual) for token in order
    )


def described_losses(losses: HeadLosses) -> dict[str, Any]:
    """Return the losses so far as JSON."""
    rows = [{"layer": layer, "head": head, "loss": loss} for layer, head, loss in losses.rows]
    return {"loss": losses.loss, "rows": rows, "done": round(len(rows) / losses.total, 3)}


def described_runs(before: Expected, after: Expected, i: int, predicts: Predicts) -> dict[str, Any]:
    """Return the odds at position i, and the losses of all positions, as JSON.

    predicts: what position i of the scene's queries tells of.
    """
    return {
        "i": i,
        "predicts": predicts,
        "odds": [vars(odd) for odd in odds(before, after, i)],
        "first": before.first,
        "losses": {"before": _numbers(before.losses()), "after": _numbers(after.losses())},
    }


def described_expected(expected: Expected, i: int) -> dict[str, Any]:
    """Return the likeliest tokens at position i, and the one of the text, as JSON; none before the first position."""
    if i < expected.first:
        return {"i": i, "likeliest": [], "actual": None}
    shares, actual = expected.shares(i), expected.actual(i)
    of_text = None if actual is None else {"token": expected.label(actual), "probability": float(shares[actual])}
    likeliest = [{"token": token, "probability": share} for token, share in expected.likeliest(i)]
    return {"i": i, "likeliest": likeliest, "actual": of_text}


def value_norms(value: Array) -> NDArray[np.float32]:
    """Return the norm of each value (n_k, d_v), ‖v_j‖, (n_k,)."""
    value = value.astype(np.float64)
    return np.asarray(np.sqrt((value * value).sum(-1)), np.float32)


def _numbers(losses: NDArray[np.float64]) -> list[float | None]:
    """Return losses as JSON, None where no token follows, without such at the end."""
    end = 1 + max(np.flatnonzero(~np.isnan(losses)), default=-1)
    return [None if np.isnan(x) else float(x) for x in losses[:end]]
