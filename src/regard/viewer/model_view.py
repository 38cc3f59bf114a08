"""What there is to see when a model has read a text: data alone, for the terminal, the page and the picture to draw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import regard
from regard.examplemodel import ExampleModel
from regard.insight import head_statistics

from .labels import byte_tokens, printable

Weights = NDArray[np.float32]


class Kind(NamedTuple):
    """A kind of head: its name, a short one, and what its score measures."""

    name: str
    short: str
    meaning: str


KINDS = (
    Kind("previous token", "prev", "weight on the token just before"),
    Kind("induction", "ind", "weight on what came next last time"),
    Kind("first-token sink", "sink", "weight on the first token"),
    Kind("duplicate token", "dup", "weight on earlier copies of the token"),
    Kind("current token", "self", "weight on the token itself"),
)
FEATURED = KINDS[:3]

ROWS_AT_ONCE = 1024

PREFIX = 3
"""Bytes that must agree for one place to count as a copy of another: in text, single letters recur by chance."""

NOTABLE = 0.25
"""The score from which a head is called by its kind."""

CAVEAT = "Attention shows where a head reads from. It does not by itself explain why a model answers as it does."


class HeadScore(NamedTuple):
    """A head and its score of one kind."""

    layer: int
    head: int
    score: float


class Attended(NamedTuple):
    """The number of a token that is attended to, and by how much."""

    token: int
    weight: float


@dataclass(frozen=True)
class Choice:
    """Which head, and which token as the query, to look at closely."""

    layer: int
    head: int
    token: int


@dataclass(frozen=True, eq=False)
class LookData:
    """One text as one model's heads attend to it.

    `tokens` are pieces of the text as they are to be read, `separator` what stands between them. `statistics` maps the
    name of a kind to scores (layers, heads), NaN where it has no meaning for this text (nothing repeats, say).
    `rows_of(layer, head, rows)` gives rows of the weights of a head on demand, (m, n), rows the queries; nothing else
    here is larger than O(n). `following` are the tokens the model expects next, with their probabilities.
    """

    model: str
    text: str
    tokens: tuple[str, ...]
    statistics: Mapping[str, NDArray[np.floating]]
    rows_of: Callable[[int, int, slice], Weights]
    causal: bool = True
    following: tuple[tuple[str, float], ...] = ()
    separator: str = ""

    @property
    def n(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self._shape[0])

    @property
    def heads(self) -> int:
        """The number of heads in a layer."""
        return int(self._shape[1])

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return next(iter(self.statistics.values())).shape

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The tokens, made printable."""
        return tuple(printable(token) for token in self.tokens)

    def weights(self, layer: int, head: int, rows: slice = slice(None)) -> Weights:
        """Weights (n, n) of one head, or some rows of them; NaN where the model does not let a query see a key."""
        weights = np.array(self.rows_of(layer, head, rows), dtype=np.float32)
        if self.causal:
            queries = np.arange(self.n)[rows, None]
            weights[np.arange(self.n) > queries] = np.nan
        return weights

    def pooled(self, layer: int, head: int, rows: int, cols: int) -> Weights:
        """The weights of one head, reduced to at most (rows, cols) by the largest of each block, so that a lone weight
        survives; NaN only where nothing in a block is visible. Takes O(n) memory for few rows and columns.
        """
        starts = [*block_starts(self.n, min(rows, self.n)).tolist(), self.n]
        together = max(1, ROWS_AT_ONCE * len(starts) // self.n)
        parts = []
        for first in range(0, len(starts) - 1, together):
            mine = np.array(starts[first : first + together + 1])
            tile = pooled(self.weights(layer, head, slice(int(mine[0]), int(mine[-1]))), self.n, cols)
            parts.append(np.fmax.reduceat(tile, mine[:-1] - mine[0], axis=0))
        return np.concatenate(parts)

    def strongest(self, kind: str, count: int = 3) -> tuple[HeadScore, ...]:
        """The heads with the highest scores of a kind, best first; heads without a score are left out."""
        scores = self.statistics[kind]
        order = np.argsort(-scores.ravel(), kind="stable")[:count]
        found = (HeadScore(*divmod(int(k), self.heads), float(scores.ravel()[k])) for k in order)
        return tuple(head for head in found if not np.isnan(head.score))

    def kind_of(self, layer: int, head: int) -> tuple[Kind, float] | None:
        """The kind for which a head scores highest, and that score, if it is notable. Heads rest on the first token
        where they find nothing else: a head is called a sink only if it is of no other kind.
        """
        scored = [(kind, float(self.statistics[kind.name][layer, head])) for kind in KINDS]
        notable = [(kind, score) for kind, score in scored if score >= NOTABLE]
        return max(notable, key=lambda pair: (pair[0].name != "first-token sink", pair[1]), default=None)

    def attended(self, choice: Choice, count: int = 8) -> tuple[Attended, ...]:
        """The tokens the chosen token attends to most in the chosen head, heaviest first, ties to the earliest;
        none below half a thousandth.
        """
        row = self.weights(choice.layer, choice.head, slice(choice.token, choice.token + 1))[0]
        order = np.argsort(-row, kind="stable")[:count]
        return tuple(Attended(int(j), float(row[j])) for j in order if row[j] >= 5e-4)

    def choose(self, layer: int | None = None, head: int | None = None, token: int | str | None = None) -> Choice:
        """Fill in what was not chosen: the strongest induction head (previous-token head, if nothing repeats) among
        those left, and the last token. A token is an index, from the end if negative, or the token's text (its last
        occurrence).

        Raises ValueError for a layer, head or token that is not there.
        """
        for name, value, size in (("layer", layer, self.layers), ("head", head, self.heads)):
            if value is not None and not 0 <= value < size:
                raise ValueError(f"{name} {value} does not exist: this model has {name}s 0 to {size - 1}")
        best = (0, 0)
        for kind in ("induction", "previous token"):
            scores = np.array(self.statistics[kind], dtype=np.float64)
            scores[[k for k in range(self.layers) if layer not in (None, k)], :] = np.nan
            scores[:, [k for k in range(self.heads) if head not in (None, k)]] = np.nan
            if not np.isnan(scores).all():
                best = divmod(int(np.nanargmax(scores)), self.heads)
                break
        return Choice(best[0] if layer is None else layer, best[1] if head is None else head, self._token_index(token))

    def _token_index(self, token: int | str | None) -> int:
        if token is None:
            return self.n - 1
        if isinstance(token, str):
            found = [k for k, known in enumerate(self.tokens) if token in (known, known.strip())]
            if not found:
                raise ValueError(f"token {token!r} does not occur in the text")
            return found[-1]
        if not -self.n <= token < self.n:
            raise ValueError(f"token {token} does not exist: the text has tokens 0 to {self.n - 1}")
        return token % self.n


def pooled(weights: NDArray[np.floating], rows: int, cols: int) -> NDArray[np.floating]:
    """The matrix reduced to at most (rows, cols) by taking the largest of each block, so that a lone weight survives;
    NaN only where a whole block is NaN.

    >>> pooled(np.arange(16.0).reshape(4, 4), 2, 2).tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    for axis, size in ((0, rows), (1, cols)):
        if weights.shape[axis] > size:
            weights = np.fmax.reduceat(weights, block_starts(weights.shape[axis], size), axis=axis)
    return weights


def block_starts(length: int, blocks: int) -> NDArray[np.int64]:
    """Where each of so many nearly equal blocks of a length starts."""
    return np.arange(blocks, dtype=np.int64) * length // blocks


def look_data(
    text: str, model: ExampleModel | None = None, progress: Callable[[str], object] = lambda stage: None
) -> LookData:
    """What every head of a model does with a text: its statistics, and its weights when they are asked for.

    `model` is the small decoder that comes with regard unless given; `progress` is told each stage as it begins.
    Raises ValueError if the text is empty or longer than the model reads, before the model runs.

    >>> data = look_data("to be or not to be")
    >>> data.n, data.weights(0, 0).shape, data.tokens[:3]
    (19, (19, 19), ('⊢', 't', 'o'))
    """
    if model is None:
        progress("loading the model")
        model = ExampleModel.load()
    ids = model.encode(text)
    tokens = byte_tokens(text)
    progress(f"running the model on {len(tokens)} tokens")
    trace = model.run(ids)
    heads = []
    for layer in range(trace.layers):
        progress(f"measuring the heads of layer {layer} of {trace.layers}")
        heads.append(head_statistics(partial(trace.weights, layer), ids, layer=layer, prefix=PREFIX))
    statistics = {kind.name: np.array([[head.scores[kind.name] for head in row] for row in heads]) for kind in KINDS}
    for kind, length in (("induction", PREFIX), ("duplicate token", 1)):
        if not _repeats(ids.tolist(), length):
            statistics[kind][:] = np.nan

    def rows_of(layer: int, head: int, rows: slice) -> Weights:
        q, k, lse = (kept[layer][head] for kept in (trace.q, trace.k, trace.lse))
        return regard.weights(q, k, lse=lse, rows=rows, causal=trace.causal, scale=trace.scale)

    return LookData(
        model="regard's example decoder over bytes; ⊢ is the mark it puts first",
        text=text,
        tokens=tokens,
        statistics=statistics,
        rows_of=rows_of,
        causal=trace.causal,
        following=_following(trace.logits[-1]),
    )


def _repeats(ids: Sequence[int], length: int) -> bool:
    """Whether some run of so many tokens occurs twice."""
    runs = list(zip(*(ids[k:] for k in range(length)), strict=False))
    return len(set(runs)) < len(runs)


def _following(logits: NDArray[np.floating], count: int = 5) -> tuple[tuple[str, float], ...]:
    """The likeliest next bytes and their probabilities, none below half a percent."""
    shares = np.exp(logits.astype(np.float64) - logits.max())
    shares /= shares.sum()
    order = [byte for byte in np.argsort(-shares, kind="stable")[:count].tolist() if shares[byte] >= 0.005]
    return tuple((chr(byte) if byte < 128 else f"\\x{byte:02x}", float(shares[byte])) for byte in order)
