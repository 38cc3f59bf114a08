"""Steps of decoding: one query of each head, against keys that are one more from step to step.

Of such a call nothing changes but the number of keys and how far batch elements and heads of a cache lie apart: one
plan serves all of its steps. To make one for each takes many times as long as a short step.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.engines.cpu import cache
from regard.engines.cpu.layout import BASES, FIELDS, ITEMS, KEYS, TILE_LIST, tile_word
from regard.engines.cpu.target import Target
from regard.engines.cpu.work import (
    SMALL,
    Results,
    Stages,
    address_of,
    bare,
    kind_of,
    launch_again,
    packed,
    source,
)
from regard.problem import Problem
from regard.threads import num_threads

N_K, KEY_END = FIELDS.index("n_k"), FIELDS.index("keys")


class Step:
    """A plan for (..., h, 1, d) queries against any number of keys; one thread at a time may call it."""

    def __init__(self, p: Problem, target: Target):
        results = Results(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
        kind = kind_of(p, target, 1, *results.wishes)
        self.kernel = cache.kernel(kind.key, "forward", target, lambda: source(kind, target))
        self.fields = packed(kind.fields, results.words(p))
        self.threads, rows = num_threads(), range(1)
        stages = Stages(kind, p, results, rows, self.threads)
        ((tiles, self.items),) = stages.waves()
        self.alone = Stages(kind, p, results, rows, 1).stage(tiles, self.items)
        # Fewer items than that are parted by spans of keys, of which there are more from step to step.
        self.together = stages.stage(tiles, self.items) if len(self.items) >= 2 * self.threads else None
        self.products = p.batch * p.heads * (p.d + p.d_v + 16)  # for each key
        column = {name: self.items[:, n] for n, name in enumerate(kind.item)}
        self.batch, self.head, self.count = column["b"].copy(), column["head"] // p.group, column["count"]
        self.size = p.dtype.itemsize
        self.bases = array("Q", [0] * len(kind.item))
        self.fields[ITEMS], self.fields[BASES] = address_of(self.items), self.bases.buffer_info()[0]
        self.tiles = tiles[:0]
        self.strides: Any = None

    def __call__(self, addresses: Sequence[int], n_k: int, key: tuple[int, ...], value: tuple[int, ...]) -> bool:
        """addresses: of query, key, value, out and lse. key, value: their strides in numbers, not bytes. False if this
        many keys are better shared out by a plan of their own.
        """
        stage = self.alone if self.threads == 1 or self.products * n_k < SMALL else self.together
        if stage is None:
            return False
        if (key, value) != self.strides:
            self.strides = key, value
            for n, strides in ((1, key), (2, value)):
                steps = self.batch * strides[0] + self.head * strides[-3]
                self.items[:, n] = steps * self.size
        self.bases[:5] = array("Q", addresses)
        tiles = -(-n_k // KEYS)
        if tiles > len(self.tiles):
            self.tiles = tile_word(np.arange(2 * tiles, dtype=np.int64))
            self.fields[TILE_LIST] = address_of(self.tiles)
        self.count[:] = tiles
        self.fields[N_K] = self.fields[KEY_END] = n_k
        launch_again(self.kernel.call, self.fields, stage, 1 if stage is self.alone else self.threads)
        return True


def step(p: Problem, target: Target) -> Step | None:
    """The plan for a call like this one with any number of keys; None for a call that has wishes."""
    lead = p.query.shape[:-3]
    simple = p.n_q == 1 and p.n_k > 0 and p.mask is None and p.score is None and bare(p) and len(lead) < 2
    if not simple or not p.batch * p.heads or p.key.shape[:-3] != lead or p.value.shape[:-3] != lead:
        return None
    return Step(p, target)
