"""A model and its text as data for the terminal, the page and the picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.core.statistics import Pooled, bin_edges
from regard.engines.normalized import too_large
from regard.interpret.heads import all_notable
from regard.runtime.forks import cached_property
from regard.viewer.data import finding, sentences
from regard.viewer.data.outlines import Outline
from regard.viewer.data.scores import KINDS, NamedKind, estimates, layer_scores
from regard.viewer.data.sentences import CAVEAT as CAVEAT
from regard.viewer.scene.labels import place_of, printable
from regard.viewer.scene.scenes import Head, Scene

Weights = NDArray[np.float32]

ROWS_AT_ONCE = 1024
"""Rows of a map that are in memory at once."""

SINK_COLUMNS = 2
"""Columns before a map that has a learned sink: the sink's, and a gap."""


class HeadScore(NamedTuple):
    """A head and its score of one kind."""

    layer: int
    head: int
    score: float


class Attended(NamedTuple):
    """A key's index, None for the learned sink, and its weight."""

    token: int | None
    weight: float


@dataclass(frozen=True)
class Choice:
    """A head and a query to look at closely."""

    layer: int
    head: int
    token: int


@dataclass(frozen=True, eq=False)
class LookData:
    """One model's attention on one text: scores of heads, and weights on demand.

    Nothing here is larger than O(n).

    tokens: pieces of the text; `separator` joins them. key_tokens: those of the keys, if they differ. named: tokens are
    text, not numbers. prefix: tokens that make a repeated run. following: next tokens with their probabilities.

    statistics: scores (layers, heads) by kind of head, and of "normalized entropy"; NaN where a score has no meaning.
    distances: (layers, heads), the n of "n tokens back", 0 where there is none.

    rows_of(layer, head, rows): weights (m, n_k) of some queries, NaN where hidden. causal: later keys are hidden too.
    pooled_of(layer, head, rows, cols): the map of largest weights, NaN where nothing is seen; by default from
    `rows_of`. sinks_of(layer, head): the weight (n,) of each query on the head's learned sink, None without one.

    claims: what is said of each head's map, by layer and head. outlines: of these maps, from which `choose` picks.

    counts: heads by layer, where they differ. numbers: the model's number of each layer, and of its heads; by default
    their indices. cross: queries and keys belong to different sequences.
    """

    model: str
    text: str
    tokens: tuple[str, ...]
    statistics: Mapping[str, NDArray[np.floating]]
    rows_of: Callable[[int, int, slice], Weights]
    causal: bool = True
    following: tuple[tuple[str, float], ...] = ()
    separator: str = ""
    key_tokens: tuple[str, ...] | None = None
    pooled_of: Callable[[int, int, int, int], Weights] | None = None
    sinks_of: Callable[[int, int], Weights | None] = lambda layer, head: None
    counts: tuple[int, ...] | None = None
    numbers: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    distances: NDArray[np.integer] | None = None
    cross: bool = False
    named: bool = True
    prefix: int = 1
    claims: Mapping[tuple[int, int], Sequence[sentences.Told]] = field(default_factory=dict)
    outlines: Mapping[tuple[int, int], Outline] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The number of queries."""
        return len(self.tokens)

    @property
    def n_k(self) -> int:
        """The number of keys."""
        return self.n if self.key_tokens is None else len(self.key_tokens)

    @property
    def about(self) -> str:
        """The number of tokens, layers and heads, in words."""
        size = f"{self.n} tokens" if self.n == self.n_k else f"{self.n} queries of {self.n_k} keys"
        return f"{size}, {self.layers} layer{'s' * (self.layers > 1)} of {self.heads} head{'s' * (self.heads > 1)}"

    def heads_of(self, layer: int) -> int:
        """Return the number of heads in one layer."""
        return self.heads if self.counts is None else self.counts[layer]

    def number(self, layer: int, head: int | None = None) -> int:
        """Return the model's number of a layer, or of one of its heads."""
        if self.numbers is None:
            return layer if head is None else head
        return self.numbers[layer][0] if head is None else self.numbers[layer][1][head]

    def name(self, layer: int, head: int) -> str:
        """Return the name of a head: L3 H5, by the model's numbers."""
        return f"L{self.number(layer)} H{self.number(layer, head)}"

    @property
    def layers(self) -> int:
        """The number of layers."""
        return int(self._shape[0])

    @property
    def heads(self) -> int:
        """The number of heads in a layer, at most."""
        return int(self._shape[1])

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return next(iter(self.statistics.values())).shape

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Return the tokens, made printable."""
        return tuple(printable(token) for token in self.tokens)

    @cached_property
    def key_labels(self) -> tuple[str, ...]:
        """Return the tokens of the keys, made printable."""
        return self.labels if self.key_tokens is None else tuple(printable(token) for token in self.key_tokens)

    def weights(self, layer: int, head: int, rows: slice = slice(None)) -> Weights:
        """Return weights (n, n_k) of one head, or some rows of them, NaN where hidden."""
        weights = np.array(self.rows_of(layer, head, rows), dtype=np.float32)
        if self.causal:
            queries = np.arange(self.n)[rows, None]
            weights[np.arange(self.n_k) > queries] = np.nan
        return weights

    def pooled(self, layer: int, head: int, rows: int, cols: int) -> Weights:
        """Return one head's weights, max-pooled to at most (rows, cols).

        A lone weight survives. NaN only where nothing in a block is visible. Takes O(n) memory for few rows and
        columns.
        """
        if self.pooled_of is not None:
            return self.pooled_of(layer, head, min(rows, self.n), min(cols, self.n_k))
        starts = [*block_starts(self.n, min(rows, self.n)).tolist(), self.n]
        together = max(1, ROWS_AT_ONCE * len(starts) // self.n)
        parts = []
        for first in range(0, len(starts) - 1, together):
            mine = np.array(starts[first : first + together + 1])
            tile = pooled(self.weights(layer, head, slice(int(mine[0]), int(mine[-1]))), self.n, cols)
            parts.append(np.fmax.reduceat(tile, mine[:-1] - mine[0], axis=0))
        return np.concatenate(parts)

    def has_sink(self, layer: int, head: int) -> bool:
        """Return whether a learned sink takes a part of each of a head's rows."""
        return self.sinks_of(layer, head) is not None

    def beside(self, layer: int, head: int, weights: Weights) -> Weights:
        """Return a head's map, perhaps pooled, after the column of its learned sink and a gap of NaN.

        A head without a sink has its map alone.
        """
        sinks = self.sinks_of(layer, head)
        if sinks is None:
            return weights
        column = pooled(sinks[:, None], len(weights), 1)
        return np.concatenate([column, np.full_like(column, np.nan), weights], axis=1)

    def small(self, layer: int, head: int, rows: int, cols: int) -> Weights:
        """Return a head's map, max-pooled to at most (rows, cols) with a learned sink's column and gap."""
        mine = cols - SINK_COLUMNS * self.has_sink(layer, head)
        return self.beside(layer, head, self.pooled(layer, head, rows, max(1, mine)))

    def strongest(self, kind: str, count: int = 3) -> tuple[HeadScore, ...]:
        """Return the heads with the highest scores of a kind, best first.

        Heads without a score are omitted.
        """
        scores = self.statistics[kind]
        order = np.argsort(-scores.ravel(), kind="stable")[:count]
        ranked = (HeadScore(*divmod(int(k), self.heads), float(scores.ravel()[k])) for k in order)
        return tuple(head for head in ranked if not np.isnan(head.score))

    def kinds_of(self, layer: int, head: int) -> tuple[NamedKind, ...]:
        """Return every notable kind of a head, the main one first."""
        scores = {kind.name: float(self.statistics[kind.name][layer, head]) for kind in KINDS}
        distance = 0 if self.distances is None else int(self.distances[layer, head])
        by_name = {kind.name: kind for kind in KINDS}
        return tuple(
            NamedKind(by_name[x], f"{distance} tokens back" if distance and x == "n tokens back" else x, scores[x])
            for x in all_notable(scores)
        )

    def _pick(self, places: Sequence[tuple[int, int]]) -> finding.Pick:
        names = ("induction", "first-token sink", "normalized entropy")
        return finding.pick(
            [finding.Candidate(*at, *(float(self.statistics[name][at]) for name in names)) for at in places],
            self.outlines,
        )

    def says(self, choice: Choice, shade: str = sentences.SHADES[0]) -> tuple[str, ...]:
        """Return the page's sentences about a choice.

        Sentences say what the eye sees in the head's map, where its token looks, and what follows the last token.
        """
        at = choice.layer, choice.head
        row = self.weights(*at, slice(choice.token, choice.token + 1))[0]
        labels = (self.tokens, self.tokens if self.key_tokens is None else self.key_tokens) if self.named else ((), ())
        same = not self.cross and self.n == self.n_k
        first = f"{self.name(*at)}: {sentences.says(self.claims.get(at, ()), shade)}".removesuffix(": ")
        said = [first, finding.row_sentence(row, choice.token, self.n, *labels, self.prefix, same).text]
        if np.isnan(row).all() and any(claim["name"] == "nan" for claim in self.claims.get(at, ())):
            said.pop()  # NaN stands for a hidden key in a row, and here it may be a weight
        if self.following and choice.token == self.n - 1:
            said.append(sentences.expects(self.following))
        return tuple(said)

    def attended(self, choice: Choice, count: int = 8) -> tuple[Attended, ...]:
        """Return the keys that the chosen token attends to most, and the learned sink, the heaviest first.

        Ties go to the earliest. Weights below 0.0005 are omitted.
        """
        row = self.weights(choice.layer, choice.head, slice(choice.token, choice.token + 1))[0]
        sinks = self.sinks_of(choice.layer, choice.head)
        listed = [] if sinks is None else [Attended(None, float(sinks[choice.token]))]
        order = np.argsort(-row, kind="stable")[: count - len(listed)]
        listed += [Attended(int(j), float(row[j])) for j in order]
        return tuple(sorted((x for x in listed if x.weight >= 5e-4), key=lambda x: -x.weight))

    def choose(self, layer: int | None = None, head: int | None = None, token: int | str | None = None) -> Choice:
        """Return a choice, with the missing parts filled in.

        The head is that of `finding.pick` among those left; the token is its token if nothing was given, else the last.
        layer, head: the model's numbers.
        token: an index, from the end if negative, or the token's text (its last occurrence).

        Raises ValueError for a layer, head or token that does not exist.
        """
        every = [(x, y) for x in range(self.layers) for y in range(self.heads_of(x))]
        if layer is not None and layer not in (numbers := [self.number(x) for x in range(self.layers)]):
            raise ValueError(f"layer {layer} does not exist: this model has layers {_spans(numbers)}")
        left = [at for at in every if layer in (None, self.number(at[0]))]
        if head is not None and head not in (numbers := sorted({self.number(*at) for at in left})):
            of = "this model" if layer is None else f"layer {layer}"
            raise ValueError(f"head {head} does not exist: {of} has heads {_spans(numbers)}")
        left = [at for at in left if head in (None, self.number(*at))]
        picked = self._pick(left)
        if token is None:
            token = picked.query if layer is None and head is None else -1
        return Choice(picked.layer, picked.head, place_of(token, self.tokens, self.n))


def _spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text.

    >>> _spans([0, 1, 2, 3]), _spans([2, 5, 9])
    ('0 to 3', '2, 5, 9')
    """
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def pooled(weights: NDArray[np.floating], rows: int, cols: int) -> NDArray[np.floating]:
    """Max-pool a matrix to at most (rows, cols).

    NaN only where a whole block is NaN.

    >>> pooled(np.arange(16.0).reshape(4, 4), 2, 2).tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    for axis, size in ((0, rows), (1, cols)):
        if weights.shape[axis] > size:
            weights = np.fmax.reduceat(weights, block_starts(weights.shape[axis], size), axis=axis)
    return weights


def block_starts(length: int, blocks: int) -> NDArray[np.intp]:
    """Return the starts of `blocks` nearly equal blocks of a length."""
    return (np.arange(blocks, dtype=np.int64) * length // blocks).astype(np.intp)


def look_data(scene: Scene, progress: Callable[[str], object] = lambda stage: None) -> LookData:
    """Return a scene's data: statistics of heads, and weights on demand.

    Data are of the first batch element. progress: called with each stage as it begins.

    >>> from regard.viewer.scene.sources import Settings, example
    >>> data = look_data(example(Settings("to be or not to be")))
    >>> data.n, data.weights(0, 0).shape, data.tokens[:3]
    (19, (19, 19), ('⊢', 't', 'o'))
    """
    layers, most = scene.layers, max(layer.heads for layer in scene.layers)
    names = (*(kind.name for kind in KINDS), "normalized entropy")
    statistics = {name: np.full((len(layers), most), np.nan) for name in names}
    sampled = finding.sample_rows(scene)
    outlines: dict[tuple[int, int], Outline] = {}
    distances = np.zeros((len(layers), most), np.int64)
    for number in range(len(layers)):
        progress(f"measuring the heads of layer {number} of {len(layers)}")
        for head in layer_scores(scene, number):
            for name, score in (head.scores | {"normalized entropy": head.normalized_entropy}).items():
                statistics[name][number, head.head] = score
            distances[number, head.head] = head.distance or 0
        outlines |= {(number, head): x.outline for head, x in enumerate(estimates(scene, number, sampled))}
    first = layers[0].problem

    @cache
    def head_of(layer: int, head: int) -> Head:
        return layers[layer].head(head)

    def rows_of(layer: int, head: int, rows: slice) -> Weights:
        one = head_of(layer, head)
        wanted = range(one.n_q)[rows]
        return one.seen(wanted, range(one.n_k))

    def pooled_of(layer: int, head: int, rows: int, cols: int) -> Weights:
        one = head_of(layer, head)
        if too_large(one.lse).any():
            whole = Pooled((rows, cols, "max"))
            largest = one.engine.forward(replace(one.problem, observe=(whole,)))[1][whole][0]
        else:
            largest = one.engine.maps(one.problem, one.lse[None], rows, cols)[1][0]
        largest = largest.astype(np.float32)
        hidden = one.hidden(bin_edges(rows, one.n_q), bin_edges(cols, one.n_k))
        return largest if hidden is None else np.where(hidden, np.float32(np.nan), largest)

    def sinks_of(layer: int, head: int) -> Weights | None:
        return None if layers[layer].problem.sink is None else head_of(layer, head).sinks()

    named = bool(scene.query_tokens and scene.key_tokens)
    return LookData(
        model=scene.about or scene.name,
        text="".join(scene.query_tokens) or scene.name,
        tokens=scene.query_tokens if named else tuple(map(str, range(first.n_q))),
        key_tokens=scene.key_tokens if named else tuple(map(str, range(first.n_k))),
        statistics=statistics,
        rows_of=rows_of,
        pooled_of=pooled_of,
        sinks_of=sinks_of,
        causal=False,
        following=scene.following,
        separator="" if named else " ",
        counts=tuple(layer.heads for layer in layers),
        numbers=tuple((layer.number, layer.numbers) for layer in layers),
        distances=distances,
        cross=layers[0].cross,
        named=named,
        prefix=scene.prefix,
        claims={at: sentences.of_head(scene, one, at[0]) for at, one in outlines.items()},
        outlines=outlines,
    )
