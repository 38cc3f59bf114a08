"""A finding to begin with: the head to open on, and where its last query looks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.interpret.heads import CLEAR, NOTABLE
from regard.viewer.data import sentences
from regard.viewer.scene.scenes import Scene

LONGEST_RUN = 24
"""The longest repeated run to search for and name, in tokens."""

EVERY = 2**20
"""Pairs of a scene, over all heads, above which queries are sampled."""

SAMPLED = 2**21
"""Approximate number of pairs in a sample."""

FEWEST, MOST = 4, 64
"""Minimum and maximum number of queries of each head in a sample."""


class Candidate(NamedTuple):
    """A head, and its scores that a finding depends on."""

    layer: int
    head: int
    induction: float
    sink: float
    normalized_entropy: float


class Pick(NamedTuple):
    """The chosen head, and the scores that explain the choice.

    by_induction: it was chosen as an induction head. highest: the largest induction score of all heads.
    """

    layer: int
    head: int
    by_induction: bool
    highest: float
    normalized_entropy: float


def pick(candidates: Iterable[Candidate]) -> Pick:
    """Choose the strongest induction head, else the most concentrated head.

    Heads that rest on the first token count as concentrated only if there are no others.

    >>> pick([Candidate(0, 0, 0.1, 0.9, 0.1), Candidate(0, 1, 0.2, 0.0, 0.5)])[:3]
    (0, 1, False)
    """
    every = list(candidates)
    scored = [x for x in every if not np.isnan(x.induction)]
    best = max(scored, key=lambda x: x.induction, default=None)
    highest = best.induction if best else float("nan")
    if best is not None and highest >= NOTABLE:
        return Pick(best.layer, best.head, True, highest, best.normalized_entropy)
    free = [x for x in every if not x.sink >= CLEAR] or every  # NaN is no sink
    least = min(free, key=lambda x: np.inf if np.isnan(x.normalized_entropy) else x.normalized_entropy)
    return Pick(least.layer, least.head, False, highest, least.normalized_entropy)


def sample_rows(scene: Scene) -> int:
    """Return the number of queries to sample from each head for a finding."""
    pairs = sum(layer.heads * layer.problem.n_q * layer.problem.n_k for layer in scene.layers)
    if pairs <= EVERY:
        return scene.layers[0].problem.n_q
    keys = sum(layer.heads * layer.problem.n_k for layer in scene.layers)
    return int(np.clip(SAMPLED // keys, FEWEST, MOST))


def why(picked: Pick, name: str, *, cross: bool, tokens: bool) -> str:
    """Return the sentence that says why this head is shown."""
    if picked.by_induction:
        return sentences.induction_found(name, picked.highest)
    reason = sentences.no_induction(picked.highest, cross=cross, tokens=tokens)
    return sentences.concentrated(name, picked.normalized_entropy, reason)


def run_before(queries: Sequence[str], keys: Sequence[str], i: int, j: int, least: int = 1) -> str:
    """Return the longest run of tokens that ends both at query i and before key j.

    Empty if it has fewer than `least` tokens.

    >>> run_before("abcabc", "abcabc", 5, 3), run_before("abcabc", "abcabc", 5, 3, 4)
    ('abc', '')
    """
    length = 0
    while length < LONGEST_RUN and length < min(i + 1, j) and queries[i - length] == keys[j - 1 - length]:
        length += 1
    return "".join(queries[i - length + 1 : i + 1]) if length >= least else ""


def name_of(labels: Sequence[str], index: int) -> str:
    """Return a token's index, with its text if there is one."""
    return f"{index:,} {sentences.quoted(labels[index])}" if labels else f"{index:,}"


@dataclass(frozen=True)
class RowSentence:
    """The key with the largest weight of a query, and a sentence about it.

    key is −1 and weight 0 if the query sees no key.
    """

    key: int
    weight: float
    text: str


def row_sentence(
    row: NDArray[np.floating], i: int, n_q: int, queries: Sequence[str], keys: Sequence[str], prefix: int = 1
) -> RowSentence:
    """Return where query i looks most, as a sentence.

    row: its weights (n_k,), NaN where a key is hidden. prefix: tokens from which a repeated run is named.
    """
    query = name_of(queries, i)
    seen = np.nan_to_num(row)
    if not seen.any():
        return RowSentence(-1, 0.0, sentences.unseen(query))
    j = int(seen.argmax())
    after = run_before(queries, keys, i, j, prefix) if queries and keys else ""
    text = sentences.looks(query, name_of(keys, j), float(seen[j]), last=i == n_q - 1, after=after)
    return RowSentence(j, float(seen[j]), text)
