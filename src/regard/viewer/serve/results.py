"""Cached results about heads of scenes, computed in the background where they take long."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from regard.core.parts import part_of
from regard.engines import choose
from regard.interpret.heads import HeadStatistics
from regard.runtime.forks import renewed
from regard.viewer.data import pyramid
from regard.viewer.data.questions import Question, Refused
from regard.viewer.data.scores import layer_scores
from regard.viewer.scene.running import Expected, HeadLosses, Heads, Replacement
from regard.viewer.scene.scenes import SMALL, Array, Head
from regard.viewer.serve.registry import Registry
from regard.viewer.serve.store import Grower, Store, Worker

T = TypeVar("T")

LIMIT = 512 * 2**20
"""Bytes of maps, tiles and profiles that are cached."""

AT_ONCE = 2**29
"""Maximum query-key pairs of an lse pass that a request waits for.

Half a second of work. Larger passes run in the background.
"""


class Results:
    """Cached results about the scenes of a registry. Thread-safe.

    patience: seconds that a request waits for long work before `Unfinished` is raised; None waits for the end. limit:
    bytes of results.
    """

    def __init__(self, registry: Registry, patience: float | None, limit: int):
        self.registry, self.store = registry, Store(limit)
        self._heads: dict[tuple[str, int, int, int], Head] = {}
        self._lock = renewed(self, "_lock", threading.Lock)
        self.workers = {name: Worker(patience) for name in ("maps", "scores")}
        self._grower, self._measurer = Grower(patience), Grower(patience)

    def close(self) -> None:
        """End the work in the background."""
        growers = (self._grower, self._measurer)
        closing: list[Worker | Grower | Registry] = [*self.workers.values(), *growers, self.registry]
        for worker in closing:
            worker.close()

    def rest(self) -> None:
        """Drop cached results and stop growing levels, while no one looks."""
        self._grower.close()
        self._measurer.close()
        self.store.clear()

    def forget(self, name: str) -> None:
        """Drop everything that is cached for a scene."""
        self.store.forget(name)
        with self._lock:
            self._heads = {key: head for key, head in self._heads.items() if key[0] != name}

    def head(self, at: Question) -> Head:
        """Return the cached head of a scene."""
        with self._lock:
            if at.key not in self._heads:
                self._heads[at.key] = at.of.head(at.head, at.b)
            return self._heads[at.key]

    def ready(self, at: Question, rows: range) -> Head:
        """Return a head; a long pass for the lse of these queries runs in the background.

        Raises `Unfinished` while it runs.
        """
        head = self.head(at)
        if len(rows) * head.n_k > AT_ONCE and not head.knows(rows):
            key = (*at.key, "lse", rows.start, rows.stop)
            self.workers["maps"].result(key, lambda progress: head.lse_of(rows, progress))
        return head

    def weights(self, at: Question, rows: range, cols: range) -> Array:
        """Return the weights (heads, rows, cols) of all heads of a layer, 0 where a pair is hidden.

        Raises `Unfinished` while a long pass for their lse runs.
        """
        of = at.of
        if of.lse is None:
            heads = [self.ready(replace(at, head=head), rows) for head in range(of.heads)]
            return np.stack([head.weights(rows, cols) for head in heads])
        part = part_of(of.problem, at.b, None)
        engine = choose(part, "tiled" if part.pairs <= SMALL else None)
        weights: Array = engine.weights(part, np.ascontiguousarray(of.lse[at.b]), rows, cols)
        return weights

    def cached(
        self,
        worker: str,
        key: tuple[Any, ...],
        compute: Callable[[Callable[[float], object]], T],
        size: Callable[[T], int],
    ) -> T:
        """Return the cached result, or compute `compute(progress)` in the background."""
        result: T | None = self.store.get(key)
        if result is None:
            result = self.workers[worker].result(key, compute)
            self.store.put(key, result, size(result))
        return result

    def coarse(self, at: Question, wait: bool = True) -> pyramid.Coarse:
        """Return the cached levels of a head so far; each request lets them grow."""
        head, key = self.head(at), (*at.key, "coarse")
        with self._lock:
            coarse: pyramid.Coarse | None = self.store.get(key)
            if coarse is None:
                coarse = pyramid.Coarse(head)
                self.store.put(key, coarse, coarse.nbytes + 4096)
        self._grower.ask(coarse, wait)
        return coarse

    def scores(self, at: Question, layer: int) -> tuple[HeadStatistics, ...]:
        """Return the scores of a layer's heads."""
        compute = partial(layer_scores, at.scene, layer, at.b)
        return self.cached("scores", (at.name, layer, at.b, "scores"), compute, lambda x: 1024 * len(x))

    def expected(self, at: Question, without: Heads = {}) -> Expected:  # noqa: B006  never written
        """Return what the scene's model expects of its text, without some heads."""
        runner = at.scene.runner
        assert runner is not None

        def compute(progress: Callable[[float], object]) -> Expected:
            try:
                return runner.expected(at.scene, without)
            except ValueError as error:
                raise Refused(422, str(error)) from None

        return self.cached("scores", (at.name, "expected", *without.items()), compute, lambda x: x.nbytes)

    def losses(self, at: Question, how: Replacement) -> HeadLosses:
        """Return the losses of a text without each head so far; each request lets them grow."""
        key = (at.name, "losses", how)
        runner = at.scene.runner
        assert runner is not None
        with self._lock:
            losses: HeadLosses | None = self.store.get(key)
            if losses is None:
                try:
                    losses = runner.losses(at.scene, how, lambda: not self.registry.running)
                except ValueError as error:
                    raise Refused(422, str(error)) from None
                self.store.put(key, losses, 64 * losses.total)
        self._measurer.ask(losses)
        return losses

    def thumbnails(self, at: Question, size: int) -> tuple[Array, bool]:
        """Return the maps of a layer's heads (heads, size, size), and True if none is an estimate."""
        coarse = [(*replace(at, head=head).key, "coarse") for head in range(at.of.heads)]
        whole = sum(x is not None and x.whole for x in map(self.store.get, coarse))
        key = (at.name, at.layer, at.b, "thumbs", size, at.kind, whole)
        return self.cached("maps", key, partial(self._thumbnails, at, size), lambda x: x[0].nbytes)

    def _thumbnails(self, at: Question, size: int, progress: Callable[[float], object]) -> tuple[Array, bool]:
        maps, exact = [], True
        for number in range(at.of.heads):
            progress(number / at.of.heads)
            of = replace(at, head=number)
            one, whole = pyramid.thumbnail(self.head(of), size, at.kind, self.store.get((*of.key, "coarse")))
            maps.append(one)
            exact = exact and whole
        return np.stack(maps), exact
