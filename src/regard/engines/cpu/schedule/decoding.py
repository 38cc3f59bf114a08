"""Decode steps: one query of each head, against one more key in every step.

Only the number of keys and the strides of a cache between batch elements and heads change. So one schedule serves all
steps with the same number of tiles. A new one takes many times as long as a short step.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.core.problem import Problem
from regard.engines.cpu.schedule.arguments import arrays_of, field_values
from regard.engines.cpu.schedule.fields import address_of, base_of, pack_fields
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.launches import LaunchStage, RepeatedStage, launch
from regard.engines.cpu.schedule.repeated_calls import without_options
from regard.engines.cpu.schedule.stages import LaunchStages
from regard.engines.cpu.schedule.work import KernelResults, source, threads_for
from regard.engines.cpu.spec.operands import BASES, BLOCKS, FIELDS, PLAIN, TILE_LIST
from regard.engines.cpu.spec.tiles import KEYS, tile_word
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import Target
from regard.runtime.threads import team_for

Array = np.ndarray[Any, np.dtype[Any]]
N_K, KEY_END = FIELDS.index("n_k"), FIELDS.index("keys")


class DecodeStep:
    """A schedule for (..., h, 1, d) queries against any number of keys.

    Not reentrant across threads.
    """

    def __init__(self, p: Problem, target: Target):
        p, self.target = _form_of(p, p.n_k), target
        self.p = p
        self.results = KernelResults(p.new_output(), np.empty(p.shape(p.n_q), p.compute), None, None)
        spec = self.spec = spec_of(p, target, 1, *self.results.options)
        self.kernel = cache.kernel(spec.key, "forward", target, lambda: source(spec, target))
        arrays = arrays_of(p, self.results.own(p))
        self.fields = pack_fields(spec.fields, field_values(p, spec, arrays))
        self.heads = [spec.fields.index(f"{name}_head") for name in "kv"]
        self.field = spec.block_fields.index
        self.bases = array("Q", [0] * len(spec.block_fields))
        self.fields[BASES] = self.bases.buffer_info()[0]
        self.tile_list: Array = np.empty(0, np.int64)
        self.stages: tuple[LaunchStage, ...] = ()
        self.repeated: tuple[RepeatedStage, ...] = ()
        self.members, self.busy = 0, False
        self.split_state: Array | None = None
        self.tiles = self.threads = 0
        self.strides: tuple[tuple[int, ...], ...] = ()

    def __call__(self, addresses: Sequence[int], n_k: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """Run a step.

        addresses: of query, key, value, out and lse. key, value: their strides in numbers, not bytes.
        """
        if self.busy:  # in a signal's handler
            DecodeStep(self.p, self.target)(addresses, n_k, key, value)
            return
        self.busy = True
        try:
            tiles = -(-n_k // KEYS)
            if tiles != self.tiles:
                self._schedule(tiles)
            if (key, value) != self.strides:
                self._set_strides(key, value)
            self.bases[: len(PLAIN)] = array("Q", addresses)
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
        """Run the stages, and store them for the number of members of a team."""
        self.fields[N_K] = self.fields[KEY_END] = n_k
        for stage in self.stages:
            self.fields[BLOCKS] = address_of(stage.blocks)
            launch(self.kernel.call, self.fields, stage, self.threads)
        if members == self.threads and all(len(stage.portions) == 1 for stage in self.stages):
            self.repeated = tuple(RepeatedStage(self.kernel.call, self.fields, x, members) for x in self.stages)
            self.members = members

    def _schedule(self, tiles: int) -> None:
        """Distribute `tiles` tiles of keys among threads."""
        p, before = _form_of(self.p, tiles * KEYS), self.threads
        threads = threads_for(p, p.batch * p.heads)
        self.tiles = self.threads = 0  # invalid until all is done: Ctrl-C may come in between
        if tiles > len(self.tile_list):
            self.tile_list = tile_word(np.arange(2 * tiles, dtype=np.int64))
            self.fields[TILE_LIST] = address_of(self.tile_list)
        if before == threads == 1:
            self.stages[0].blocks[:, self.field("count")] = tiles
        else:
            self.strides = ()
            self.stages = tuple(LaunchStages(self.spec, p, arrays_of(p, self.results.own(p)), range(1), threads))
            split_state = self.stages[0].split_state  # all stages have one, or none
            self.split_state = np.empty(split_state, np.uint8) if split_state else None
            self.bases[self.field("split_state")] = base_of(self.split_state)
        self.members = 0
        self.tiles, self.threads = tiles, threads

    def _set_strides(self, key: tuple[int, ...], value: tuple[int, ...]) -> None:
        """Set the strides of keys and values."""
        self.strides, size = (), self.p.dtype.itemsize
        for name, field, strides in zip("kv", self.heads, (key, value), strict=True):
            for fields in (self.fields, *(mine for x in self.repeated for mine in x.fields)):
                fields[field] = strides[-3] * size
            for blocks in (stage.blocks for stage in self.stages):
                b, h = blocks[:, self.field("b")], blocks[:, self.field("head")] // self.p.group
                blocks[:, self.field(name)] = (b * strides[0] + h * strides[-3]) * size
        self.strides = key, value


def _form_of(p: Problem, n_k: int) -> Problem:
    """Return the problem with n_k keys.

    Its arrays have no memory, and must not be read.
    """

    def form(x: Array, rows: int) -> Array:
        return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), (*x.shape[:-2], rows, x.shape[-1]), x.strides)

    return replace(p, query=form(p.query, p.n_q), key=form(p.key, n_k), value=form(p.value, n_k))


def step(p: Problem, target: Target) -> DecodeStep | None:
    """Return the schedule for calls like this one with any number of keys.

    None for a call with options.
    """
    lead = p.query.shape[:-3]
    plain = p.mask is None and p.score is None and p.bias is None and without_options(p)
    simple = p.n_q == 1 and p.n_k > 0 and plain and len(lead) < 2
    if not simple or not p.batch * p.heads or p.key.shape[:-3] != lead or p.value.shape[:-3] != lead:
        return None
    return DecodeStep(p, target)
