"""Steps of decoding: one query of each head, against keys that are one more from step to step.

Of such a call nothing changes but the number of keys and how far batch elements and heads of a cache lie apart: one
plan serves all steps with as many tiles of keys. To make one for each takes many times as long as a short step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.fields import address_of, base_of, packed
from regard.engines.cpu.schedule.work import (
    Repeated,
    Results,
    Stage,
    Stages,
    bare,
    kind_of,
    launch,
    source,
    threads_for,
)
from regard.engines.cpu.spec.forward import BASES, FIELDS, ITEMS, KEYS, TILE_LIST, tile_word
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.threads import team_for

Array = np.ndarray[Any, np.dtype[Any]]
N_K, KEY_END = FIELDS.index("n_k"), FIELDS.index("keys")
HEADS = (FIELDS.index("k_head"), FIELDS.index("v_head"))


class Step:
    """Plans for (..., h, 1, d) queries against any number of keys; one thread at a time may call it."""

    def __init__(self, p: Problem, target: Target):
        p, self.target = _form_of(p, p.n_k), target
        self.p = p
        self.results = Results(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
        kind = self.kind = kind_of(p, target, 1, *self.results.wishes)
        self.kernel = cache.kernel(kind.key, "forward", target, lambda: source(kind, target))
        self.fields = packed(kind.fields, self.results.words(p))
        self.word = kind.item.index
        self.bases = array("Q", [0] * len(kind.item))
        self.fields[BASES] = self.bases.buffer_info()[0]
        self.tile_list: Array = np.empty(0, np.int64)
        self.stages: tuple[Stage, ...] = ()
        self.repeated: tuple[Repeated, ...] = ()
        self.members, self.busy = 0, False
        self.partial: Array | None = None
        self.tiles = self.threads = 0
        self.strides: tuple[tuple[int, ...], ...] = ()

    def __call__(self, addresses: Sequence[int], n_k: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """addresses: of query, key, value, out and lse. key, value: their strides in numbers, not bytes."""
        if self.busy:  # in a signal's handler
            Step(self.p, self.target)(addresses, n_k, key, value)
            return
        self.busy = True
        try:
            tiles = -(-n_k // KEYS)
            if tiles != self.tiles:
                self._plan(tiles)
            if (key, value) != self.strides:
                self._place(key, value)
            self.bases[:5] = array("Q", addresses)
            team, members = team_for(self.threads) if self.threads > 1 else (None, 1)
            if members == self.members:
                for stage in self.repeated:
                    for fields in stage.fields:
                        fields[N_K] = fields[KEY_END] = n_k
                    stage(team)
            else:
                self._launch(n_k, members)
        finally:
            self.busy = False

    def _launch(self, n_k: int, members: int) -> None:
        """Run the stages, and keep them as they are for as many members of a team."""
        self.fields[N_K] = self.fields[KEY_END] = n_k
        for stage in self.stages:
            self.fields[ITEMS] = address_of(stage.items)
            launch(self.kernel.call, self.fields, stage, self.threads)
        if members == self.threads and all(len(stage.portions) == 1 for stage in self.stages):
            self.repeated = tuple(Repeated(self.kernel.call, self.fields, x, members) for x in self.stages)
            self.members = members

    def _plan(self, tiles: int) -> None:
        """Share out so many tiles of keys."""
        p, before = _form_of(self.p, tiles * KEYS), self.threads
        threads = threads_for(p, p.batch * p.heads)
        self.tiles = self.threads = 0  # until all is made: Ctrl-C may come in between
        if tiles > len(self.tile_list):
            self.tile_list = tile_word(np.arange(2 * tiles, dtype=np.int64))
            self.fields[TILE_LIST] = address_of(self.tile_list)
        if before == threads == 1:
            self.stages[0].items[:, self.word("count")] = tiles
        else:
            self.strides = ()
            self.stages = tuple(Stages(self.kind, p, self.results, range(1), threads))
            partial = self.stages[0].partial  # of all stages, if of any
            self.partial = np.empty(partial, np.uint8) if partial else None
            self.bases[self.word("partial")] = base_of(self.partial)
        self.members = 0
        self.tiles, self.threads = tiles, threads

    def _place(self, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """Keys and values lie elsewhere, with such strides."""
        self.strides, size = (), self.p.dtype.itemsize
        for name, field, strides in zip("kv", HEADS, (key, value), strict=True):
            for fields in (self.fields, *(mine for x in self.repeated for mine in x.fields)):
                fields[field] = strides[-3] * size
            for items in (stage.items for stage in self.stages):
                b, h = items[:, self.word("b")], items[:, self.word("head")] // self.p.group
                items[:, self.word(name)] = (b * strides[0] + h * strides[-3]) * size
        self.strides = key, value


def _form_of(p: Problem, n_k: int) -> Problem:
    """The same with so many keys, of arrays that hold no memory, and must not be read."""

    def form(x: Array, rows: int) -> Array:
        return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), (*x.shape[:-2], rows, x.shape[-1]), x.strides)

    return replace(p, query=form(p.query, p.n_q), key=form(p.key, n_k), value=form(p.value, n_k))


def step(p: Problem, target: Target) -> Step | None:
    """The plan for a call like this one with any number of keys; None for a call that has wishes."""
    lead = p.query.shape[:-3]
    simple = p.n_q == 1 and p.n_k > 0 and p.mask is None and p.score is None and bare(p) and len(lead) < 2
    if not simple or not p.batch * p.heads or p.key.shape[:-3] != lead or p.value.shape[:-3] != lead:
        return None
    return Step(p, target)
