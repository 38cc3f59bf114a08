"""Models that run here: they read typed texts, and run without some of their heads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from regard.viewer.scene.scenes import Scene

Array = np.ndarray[Any, np.dtype[Any]]
Predicts = Literal["next", "masked", ""]
Replacement = Literal["zero", "mean"]
Heads = Mapping[tuple[int, int], Replacement]
Settings = Mapping[str, Any]
Progress = Callable[[Any], object]

LISTED = 5
"""Likeliest tokens that are listed."""

LEAST = 0.005
"""The least probability of a listed token."""


@dataclass(frozen=True, eq=False)
class Expected:
    """Expectations of a model for the tokens of a text.

    logits (m, vocabulary): of the positions from `first` on. targets (m,): the token that is expected there, −1 where
    none follows. label: the piece of text of a token.
    """

    logits: Array
    targets: NDArray[np.int64]
    label: Callable[[int], str]
    first: int = 0

    @property
    def nbytes(self) -> int:
        """The memory of the logits."""
        return int(self.logits.nbytes)

    @property
    def last(self) -> int:
        """The last position."""
        return self.first + len(self.logits) - 1

    def shares(self, i: int) -> NDArray[np.float64]:
        """Return the probability of each token at position i."""
        logits = self.logits[i - self.first].astype(np.float64)
        shares = np.exp(logits - logits.max())
        return np.asarray(shares / shares.sum())

    def likeliest(self, i: int, count: int = LISTED) -> tuple[tuple[str, float], ...]:
        """Return the likeliest tokens at position i with their probabilities, without rare ones."""
        shares = self.shares(i)
        order = np.argsort(-shares, kind="stable")[:count].tolist()
        return tuple((self.label(token), float(shares[token])) for token in order if shares[token] >= LEAST)

    def actual(self, i: int) -> int | None:
        """Return the token that stands where position i expects one, None if none does."""
        token = int(self.targets[i - self.first])
        return None if token < 0 else token

    def losses(self) -> NDArray[np.float64]:
        """Return the loss (m,) of each position in nats, NaN where no token follows."""
        logits = self.logits.astype(np.float64)
        top = logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, np.maximum(self.targets, 0)[:, None], -1)
        losses = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)) - chosen)[:, 0]
        return np.where(self.targets < 0, np.nan, losses)


class HeadLosses(Protocol):
    """The mean loss of a text without each head in turn, computed some heads at a time.

    loss: with all heads, None before the first step. rows: (layer, head, loss). total: the number of heads. error: what
    stopped it.
    """

    loss: float | None
    rows: list[tuple[int, int, float]]
    total: int
    error: Exception | None

    @property
    def whole(self) -> bool: ...

    def grow(self) -> None:
        """Compute the losses without the next heads."""


class Runner(Protocol):
    """A model that runs here. Thread-safe.

    predicts: "next" tokens, "masked" ones, or "" for none.
    """

    predicts: Predicts

    def settings(self, given: Settings) -> Settings:
        """Return settings of a run from JSON.

        Raises TypeError or ValueError for an unknown one, and for one of another type.
        """

    def scenes(self, settings: Settings, progress: Progress = ...) -> tuple[Scene, ...]:
        """Run the model, and return its scenes.

        progress: is told each stage, and ends the run if it raises.

        Raises ValueError for a text that the model cannot read.
        """

    def expected(self, scene: Scene, without: Heads = ...) -> Expected:
        """Return what the model expects of the scene's text, without some heads by (layer, head) of the scene.

        Raises ValueError for a model that predicts no tokens.
        """

    def losses(self, scene: Scene, how: Replacement, wanted: Callable[[], bool] = ...) -> HeadLosses:
        """Return the losses of the scene's text without each of its heads, none computed yet.

        wanted: a step is given up, to be made again, once this is False.
        """

    def continued(self, scene: Scene, drawn: bool) -> Settings:
        """Return the settings of a run on the scene's text and one more token: the likeliest, or a drawn one.

        Raises ValueError where none can be added.
        """
