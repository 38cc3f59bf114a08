"""A finding to begin with: the head to open on, the key its last query looks at most, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.interpret.heads import CLEAR, NOTABLE
from regard.viewer.data import sentences
from regard.viewer.scene.scenes import Scene

LONGEST_RUN = 24
"""Tokens of a repeated run that are looked for, and named."""

EVERY = 2**20
"""Pairs of a scene, over all heads, up to which every row is looked at; of more, some are sampled."""

SAMPLED = 2**21
"""Pairs that a sample looks at, about."""

FEWEST, MOST = 4, 64
"""Rows of a sample."""


class Candidate(NamedTuple):
    """A head's place, and the scores that a finding is chosen by."""

    layer: int
    head: int
    induction: float
    sink: float
    normalized_entropy: float


class Pick(NamedTuple):
    """The chosen head; `by` says whether it was chosen by induction, `highest` is the best induction score."""

    layer: int
    head: int
    by_induction: bool
    highest: float
    normalized_entropy: float


def pick(candidates: Iterable[Candidate]) -> Pick:
    """Choose the strongest induction head; without one, the head with the most concentrated weights.

    Heads that rest on the first token count as concentrated only where there are no others.

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
    """Return how many queries of each head are looked at for a finding."""
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
    """Return the longest run of tokens that ends both at query i and before key j; empty if shorter than `least`.

    >>> run_before("abcabc", "abcabc", 5, 3), run_before("abcabc", "abcabc", 5, 3, 4)
    ('abc', '')
    """
    length = 0
    while length < LONGEST_RUN and length < min(i + 1, j) and queries[i - length] == keys[j - 1 - length]:
        length += 1
    return "".join(queries[i - length + 1 : i + 1]) if length >= least else ""


def name_of(labels: Sequence[str], index: int) -> str:
    """Return a token as it is spoken of: its number, and itself where there is one."""
    return f"{index:,} {sentences.quoted(labels[index])}" if labels else f"{index:,}"


@dataclass(frozen=True)
class RowSentence:
    """The key that one query looks at most, its weight, and the sentence; −1 and 0 without one."""

    key: int
    weight: float
    text: str


def row_sentence(
    row: NDArray[np.floating], i: int, n_q: int, queries: Sequence[str], keys: Sequence[str], prefix: int = 1
) -> RowSentence:
    """Say where query i looks most; `row` (n_k,) are its weights, NaN where a key is hidden.

    A repeated run is named from `prefix` tokens on.
    """
    query = name_of(queries, i)
    seen = np.nan_to_num(row)
    if not seen.any():
        return RowSentence(-1, 0.0, sentences.unseen(query))
    j = int(seen.argmax())
    after = run_before(queries, keys, i, j, prefix) if queries and keys else ""
    text = sentences.looks(query, name_of(keys, j), float(seen[j]), last=i == n_q - 1, after=after)
    return RowSentence(j, float(seen[j]), text)
