"""A finding to begin with: the head and the query to open on, and where a query looks."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.interpret.heads import CLEAR, NOTABLE
from regard.viewer.data import sentences
from regard.viewer.data.outlines import Outline, Pair
from regard.viewer.scene.scenes import Scene

LONGEST_RUN = 24
"""The longest repeated run to search for and name, in tokens."""

EVERY = 2**20
"""Pairs of a scene, over all heads, above which queries are sampled."""

SAMPLED = 2**21
"""Approximate number of pairs in a sample."""

WORTH = 0.05
"""The weight from which a second key, or a learned sink, is worth a sentence."""

FEWEST, MOST = 12, 64
"""Minimum and maximum number of queries of each head in a sample."""


class Candidate(NamedTuple):
    """A head, and its scores that a finding depends on."""

    layer: int
    head: int
    induction: float
    sink: float
    normalized_entropy: float


class Pick(NamedTuple):
    """The head to open on, and the query; −1 for the last."""

    layer: int
    head: int
    query: int = -1


def pick(candidates: Sequence[Candidate], outlines: Mapping[tuple[int, int], Outline] | None = None) -> Pick:
    """Choose the head and the query to open on.

    In a text of words: where the heaviest weight is between words far apart, and few other heads look there. Otherwise
    the strongest induction head, else the most concentrated head. Heads that rest on the first token count as
    concentrated only if there are no others.

    >>> pick([Candidate(0, 0, 0.1, 0.9, 0.1), Candidate(0, 1, 0.2, 0.0, 0.5)])
    Pick(layer=0, head=1, query=-1)
    """
    outlined = outlines or {}
    far = _farthest({(x.layer, x.head): outlined[x.layer, x.head] for x in candidates if (x.layer, x.head) in outlined})
    if far is not None:
        return far
    scored = [x for x in candidates if not np.isnan(x.induction)]
    best = max(scored, key=lambda x: x.induction, default=None)
    if best is not None and best.induction >= NOTABLE:
        return Pick(best.layer, best.head)
    free = [x for x in candidates if not x.sink >= CLEAR] or candidates  # NaN is no sink
    least = min(free, key=lambda x: np.inf if np.isnan(x.normalized_entropy) else x.normalized_entropy)
    return Pick(least.layer, least.head)


def _farthest(outlines: Mapping[tuple[int, int], Outline]) -> Pick | None:
    """Return the pair of words with the largest weight × log₂(1 + distance) × log(heads / heads that look there).

    Without a notable weight the result is None. The last factor leaves aside words that most heads look at, such as
    articles.
    """
    looking = Counter(key for one in outlines.values() for key in one.heavy)

    def merit(pair: Pair) -> float:
        rare = math.log((len(outlines) + 1) / (looking[pair.key] + 1))
        return pair.weight * math.log2(1 + abs(pair.query - pair.key)) * rare

    pairs = [(merit(pair), *at, pair) for at, one in outlines.items() for pair in one.far if pair.weight >= NOTABLE]
    if not pairs:
        return None
    _, layer, head, pair = max(pairs, key=lambda x: (x[0], -x[1], -x[2]))
    return Pick(layer, head, pair.query)


def sample_rows(scene: Scene) -> int:
    """Return the number of queries to sample from each head for a finding."""
    if scene.pairs <= EVERY:
        return scene.layers[0].problem.n_q
    keys = sum(layer.heads * layer.problem.n_k for layer in scene.layers)
    return int(np.clip(SAMPLED // keys, FEWEST, MOST))


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
    row: NDArray[np.floating],
    i: int,
    n_q: int,
    queries: Sequence[str],
    keys: Sequence[str],
    prefix: int = 1,
    same: bool = True,
) -> RowSentence:
    """Return where query i looks most, as a sentence or two.

    row: its weights (n_k,), NaN where a key is hidden. prefix: tokens from which a repeated run is named. same: query i
    and key i are the same token.
    """
    query = name_of(queries, i)
    seen = np.nan_to_num(row)
    if not seen.any():
        return RowSentence(-1, 0.0, sentences.unseen(query))

    def looks(pattern: str, j: int) -> str:
        after = run_before(queries, keys, i, j, prefix) if queries and keys else ""
        return sentences.looks(pattern, query, name_of(keys, j), float(seen[j]), after)

    j = int(seen.argmax())
    said = [looks("last" if i == n_q - 1 else "other", j)]
    left = np.r_[0, max(0, i - 1) : min(len(seen), i + 2)]
    other = np.array(seen)
    other[left] = 0
    if same and j in left and other.max() >= WORTH:
        said.append(looks("aside", int(other.argmax())))
    rest = 1 - float(seen.sum())
    if rest > max(WORTH, float(seen[j])):
        said.append(sentences.resting(rest))
    return RowSentence(j, float(seen[j]), " ".join(said))
