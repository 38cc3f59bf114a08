"""Layers of heads with their tokens, stored as queries, keys and rules.

Weights are not stored, except where they alone are known (`weights.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.core import rowsums
from regard.core.parts import part_of
from regard.core.problem import Problem
from regard.engines import Engine, choose
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.heads import by_chance
from regard.interpret.table import caution
from regard.ops.normalization import causally
from regard.rules import EVERYTHING, NOTHING, Ranges, classify, reads
from regard.runtime.forks import cached_property

if TYPE_CHECKING:
    from regard.viewer.scene.running import Predicts, Runner

Array = np.ndarray[Any, np.dtype[Any]]
Kind = Literal["example", "cross", "model", "capture", "arrays", "weights", "words", "hand"]

SMALL = 2**22
"""Query-key pairs up to which NumPy's tiles take less time than a compiler."""

TINY = 2**12
"""Query-key pairs of a head up to which its weights are computed once, all of them."""

BAND = 2**28
"""Pairs between two reports of progress."""

BLOCK = 64
"""Queries in a block: lse is computed for whole blocks."""


class Unknown(ValueError):
    """Raised where a head has weights alone, and more was asked for."""


@dataclass(frozen=True, eq=False)
class Projections:
    """A layer's inputs, its projection weights, and the outputs of its heads.

    q = rope(x @ w_q + b_q), k = rope(source @ w_k + b_k), v = source @ w_v, written = concat(out) @ w_o. x (batch, n_q,
    c); source (batch, n_k, c), None for x itself; w_q, w_k, w_v (c, h·d); b_q, b_k (h·d); out (batch, h, n_q, d_v); w_o
    (h·d_v, c). rotary: rotated features of each head, a with a + rotary / 2.
    """

    x: Array
    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    out: Array
    source: Array | None = None
    b_q: Array | None = None
    b_k: Array | None = None
    rotary: int = 0


@dataclass(frozen=True, eq=False)
class SceneLayer:
    """One call of attention: queries, keys, values, rules, and lse if known.

    lse: (batch, h, n_q). no_values: the reason why values are missing, if they are. number: the layer's number in the
    model. numbers: those of its heads, kv_numbers: of the key-value heads that they read; by default in order.
    projections: known for some models only. lacks: of a layer of weights alone, the sentence that says so.
    single_heads: the heads whose queries and keys are known, each as a layer of one head.
    """

    name: str
    problem: Problem
    lse: Array | None = None
    no_values: str = ""
    cross: bool = False
    number: int = 0
    numbers: tuple[int, ...] = ()
    kv_numbers: tuple[int, ...] = ()
    projections: Projections | None = None
    lacks: str = ""
    single_heads: Mapping[int, "SceneLayer"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        heads, group = range(self.problem.heads), self.problem.group
        object.__setattr__(self, "numbers", self.numbers or tuple(heads))
        object.__setattr__(self, "kv_numbers", self.kv_numbers or tuple(head // group for head in heads))

    @cached_property
    def _triangle(self) -> tuple[bool, bool]:
        return triangle(self.problem)

    @property
    def causal(self) -> bool:
        """True if certainly no query sees a later key."""
        return self._triangle[0]

    @property
    def plain(self) -> bool:
        """True for scores scale · q · k, unmasked or causal, as a page can compute them."""
        p = self.problem
        bare = p.score is None and p.bias is None and p.origin[2] == 0 and bool((p.offset == p.offset[0]).all())
        return bare and (p.mask is None or all(self._triangle))

    @property
    def nbytes(self) -> int:
        """The memory of its arrays, without weights of the model."""
        p, projections = self.problem, self.projections
        own = () if projections is None else (projections.x, projections.source, projections.out)
        return sum(x.nbytes for x in (p.query, p.key, p.value, self.lse, *own) if x is not None)

    def computed(self, head: int) -> tuple["SceneLayer", int]:
        """Return a layer that has the queries and keys of this head, and the head's number there.

        Raises `Unknown` for a head with weights alone.
        """
        if not self.lacks:
            return self, head
        if head not in self.single_heads:
            raise Unknown(self.lacks)
        return self.single_heads[head], 0

    def values_of(self, head: int, b: int = 0) -> Array | None:
        """Return the values (n_k, d_v) of a head, None where they are not known."""
        of, at = self.computed(head) if head in self.single_heads else (self, head)
        return of.head(at, b).problem.value[0] if of.has_values else None

    @property
    def has_values(self) -> bool:
        """True if the values are known."""
        return not self.no_values

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.problem.heads

    def head(self, head: int, b: int = 0) -> "Head":
        """Return one head of one batch element."""
        lse = None if self.lse is None else np.ascontiguousarray(self.lse[b, head])
        return Head(part_of(self.problem, b, head), lse)

    def described(self) -> dict[str, Any]:
        """Return the layer's entry in the page's list of scenes."""
        p = self.problem
        scored = next(iter(self.single_heads.values()), self)  # what the page says of scores is of these
        more: dict[str, Any] = {}
        if p.sink is not None and not self.lacks:
            more["sinks"] = [float(x) if np.isfinite(x) else None for x in p.sink]
        if not self.cross and p.offset.any():
            more["offset"] = int(p.offset[0])
        return {
            "name": self.name, "heads": p.heads, "kv_heads": p.kv_heads, "n_q": p.n_q, "n_k": p.n_k,
            "d": scored.problem.d, "causal": self.causal, "cross": self.cross,
            "rules": "" if self.lacks else rules_of(p), "plain": scored.plain, "scale": float(scored.problem.scale),
            "number": self.number, "numbers": list(self.numbers), "sink": p.sink is not None, "lacks": self.lacks,
            "known": sorted(self.single_heads), **more,
        }  # fmt: skip


class Opening(NamedTuple):
    """First view of a scene: a head by its place, a query and a key, and the text about them."""

    layer: int
    head: int
    i: int
    j: int
    text: str


@dataclass(frozen=True, eq=False)
class Scene:
    """Layers that read the same tokens.

    query_tokens, key_tokens: pieces of text that join without a separator; empty if there is no text. ids: (batch, n),
    token ids for scores of repetition. prefix: tokens that must agree for a place to count as a copy of another.
    runner, run, settings: the model that runs here, what it keeps of this run, and the run's settings; the text can
    then be edited. part: the scene's place among those of its run. predicts: what the model expects at each query.
    following: likely next tokens with their probabilities. opening: what to show first, by default what `finding`
    picks. grids: of pictures and sounds among the keys, and among the queries unless layers are cross-attention.
    """

    name: str
    kind: Kind
    layers: tuple[SceneLayer, ...]
    query_tokens: tuple[str, ...] = ()
    key_tokens: tuple[str, ...] = ()
    ids: NDArray[np.int64] | None = None
    prefix: int = 1
    note: str = ""
    runner: "Runner | None" = None
    run: Any = None
    settings: Mapping[str, Any] | None = None
    part: int = 0
    predicts: "Predicts" = ""
    following: tuple[tuple[str, float], ...] = ()
    opening: Opening | None = None
    grids: tuple[PatchGrid, ...] = ()

    def grids_of(self, batch: int = 0) -> tuple[PatchGrid, ...]:
        """Return the grids of a batch element; those of others are as many."""
        return tuple(grid for grid in self.grids if grid.of_batch(batch))

    def words(self, batch: int = 0) -> tuple[int, ...]:
        """Return the queries that are no patches: all of them where they are no keys."""
        p = self.layers[0].problem
        other = self.layers[0].cross or p.n_q != p.n_k
        patches = set() if other else {int(token) for grid in self.grids_of(batch) for token in grid.tokens}
        return tuple(i for i in range(p.n_q) if i not in patches)

    @property
    def pictured_text(self) -> bool:
        """True for a text whose tokens look at a picture, or at a sound."""
        return bool(self.query_tokens and self.grids)

    @property
    def batch(self) -> int:
        """The number of batch elements."""
        return self.layers[0].problem.batch

    @property
    def pairs(self) -> int:
        """The query-key pairs of all heads of one batch element."""
        return sum(layer.heads * layer.problem.n_q * layer.problem.n_k for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """The memory of its layers, and of what its runner keeps."""
        return sum(layer.nbytes for layer in self.layers) + getattr(self.run, "nbytes", 0)

    @cached_property
    def about(self) -> str:
        """Return the note, with a warning where chance repeats spoil induction scores."""
        chance = 0.0 if self.ids is None or self.layers[0].cross else by_chance(self.ids[0], prefix=self.prefix)
        return "; ".join(filter(None, (self.note, caution(chance))))

    def described(self, name: str) -> dict[str, Any]:
        """Return the scene's entry in the page's list, with the id `name`."""
        return {
            "id": name,
            "name": self.name,
            "kind": self.kind,
            "note": self.about,
            "batch": self.batch,
            "n_tokens": self.layers[0].problem.n_k,
            "has_tokens": bool(self.key_tokens),
            "prefix": self.prefix,
            "layers": [layer.described() for layer in self.layers],
            "editable": self.runner is not None,
            "predicts": self.predicts,
            "settings": self.settings,
            "following": [{"token": token, "probability": share} for token, share in self.following],
        } | self._pictured()

    def _pictured(self) -> dict[str, Any]:
        """Return what a scene with pictures has in its entry; nothing of others."""
        unlike = bool(self.query_tokens) and not self.key_tokens  # a text whose keys are patches or frames
        more = (("grids", self._described_grids()), ("has_query_tokens", unlike))
        return {name: x for name, x in more if x}

    def _described_grids(self) -> list[dict[str, Any]]:
        side = "keys" if self.layers[0].cross else "both"
        return [
            {
                "kind": grid.kind, "side": side, "rows": grid.rows, "columns": grid.columns,
                "tokens": grid.tokens.tolist(), "picture": None if grid.picture is None else f"picture/{number}",
                "width": 0 if grid.picture is None else grid.picture.shape[1],
                "height": 0 if grid.picture is None else grid.picture.shape[0], "seconds": grid.seconds,
                "name": grid.name,
            }
            for number, grid in enumerate(self.grids_of())
        ]  # fmt: skip


class Head:
    """One head, with any part of its weights on demand.

    P[i, j] = exp(S[i, j] − lse[i]).
    """

    def __init__(self, problem: Problem, lse: Array | None = None):
        self.problem = problem
        self._lse = np.zeros(problem.n_q, problem.compute) if lse is None else lse
        self._known = np.full(-(-problem.n_q // BLOCK), lse is not None)  # blocks with a known lse

    @property
    def n_q(self) -> int:
        """The number of queries."""
        return self.problem.n_q

    @property
    def n_k(self) -> int:
        """The number of keys."""
        return self.problem.n_k

    @cached_property
    def engine(self) -> Engine:
        """The engine: for few pairs one that compiles nothing."""
        return choose(self.problem, "tiled" if self.problem.pairs <= SMALL else None)

    def knows(self, rows: range) -> bool:
        """Return whether the lse of these queries is cached."""
        return bool(self._known[_blocks(rows)].all())

    @property
    def lse(self) -> Array:
        """lse (n_q,), computed on first use."""
        return self.lse_of(range(self.n_q))

    def lse_of(self, rows: range, progress: Callable[[float], object] = lambda done: None) -> Array:
        """Return the lse (rows,) of these queries.

        Missing blocks are computed by a pass over all keys, which reports the share done.
        """
        blocks = _blocks(rows)
        missing = blocks.start + np.flatnonzero(~self._known[blocks])
        if len(missing):
            first, last = int(missing[0]) * BLOCK, min(int(missing[-1] + 1) * BLOCK, self.n_q)
            band = max(1, BAND // (self.n_k * BLOCK)) * BLOCK
            for start in range(first, last, band):
                progress((start - first) / (last - first))
                part = part_of(self.problem, rows=slice(start, min(start + band, last)))
                outputs, _ = self.engine.forward(replace(part, value=part.value[..., :0]))
                assert outputs.lse is not None
                self.learn(start, outputs.lse[0])
        return self._lse[rows.start : rows.stop]

    def learn(self, start: int, lse: Array) -> None:
        """Cache the lse of whole blocks of queries, from query `start` on."""
        rows = range(start, start + len(lse))
        if not self.knows(rows):  # never writes to the caller's array
            self._lse[start : rows.stop] = lse
            self._known[_blocks(rows)] = True

    def weights(self, rows: range, cols: range) -> Array:
        """Return the exact weights (rows, cols) of these queries on these keys.

        Weights are computed from lse and these scores alone. Where pairs are few, whole rows are a softmax: their
        scores are NumPy's, and a given lse may be that of a kernel's scores.
        """
        if self.problem.pairs <= TINY:
            return self._every_weight[rows.start : rows.stop : rows.step, cols.start : cols.stop : cols.step].copy()
        self.lse_of(rows)
        few = self.problem.pairs <= SMALL
        tile = self.engine.weights(self.problem, self._lse[None], rows, range(self.n_k) if few else cols)[0]
        return np.asarray(tile[:, cols.start : cols.stop : cols.step] if few else tile)

    @cached_property
    def _every_weight(self) -> Array:
        """The weights (n_q, n_k) of a tiny head: a call of the engine takes longer than its pairs."""
        rows, cols = range(self.n_q), range(self.n_k)
        return np.asarray(self.engine.weights(self.problem, self.lse_of(rows)[None], rows, cols)[0])

    def sinks(self) -> NDArray[np.float32]:
        """Return the weight of each query on the learned sink, exp(sink − lse); none without a sink.

        Together with its weights on keys, that of a query makes 1.
        """
        sink = self.problem.sink
        weights = np.zeros(0) if sink is None else np.exp(sink[0].astype(self.lse.dtype) - self.lse)
        return weights.astype(np.float32)

    def seen(self, rows: range, cols: range) -> NDArray[np.float32]:
        """Return weights as float32, NaN where a pair is certainly hidden."""
        weights = np.ascontiguousarray(self.weights(rows, cols), np.float32)
        hidden = self.hidden(*(np.arange(part.start, part.stop + 1) for part in (rows, cols)))
        if hidden is not None:
            weights[np.broadcast_to(hidden, weights.shape)] = np.nan
        return weights

    def weights_of(self, rows: Array) -> Array:
        """Return the weights (rows, n_k) of some queries, without a pass for lse."""
        outside = self.problem.outside
        _, S = rowsums.scores(self.problem, rows)
        with np.errstate(all="ignore"):
            top = S.max(axis=1, keepdims=True, initial=-np.inf)
            top = top if outside is None else np.maximum(top, outside)
            top = np.where(top == -np.inf, 0, top)
            P = np.exp(S - top)
            total = P.sum(axis=1, keepdims=True) + (0 if outside is None else np.exp(outside - top))
            return np.asarray(P / np.where(total == 0, 1, total))

    def visible_of(self, rows: Array) -> NDArray[np.bool_]:
        """Return the flags (rows, n_k) of the keys that some queries see."""
        return np.asarray(rowsums.scores(self.problem, rows)[1] != -np.inf)

    @cached_property
    def counts_keys(self) -> bool:
        """True if its rules read the number of keys."""
        nodes = [node for node in (self.problem.mask_node, self.problem.score_node) if node is not None]
        return "keys" in reads(*nodes)

    def hidden(self, rows: Array, cols: Array) -> NDArray[np.bool_] | None:
        """Return the cells (rows, keys) that certainly hold no visible pair.

        rows, cols: edges; cell r holds the rows from rows[r] to before rows[r + 1]. None without rules that hide.
        """
        p = self.problem
        if not p.rules.hiding:
            return None
        seen = p.extents.ranges(0, (0, 0), rows[:-1, None], rows[1:, None] - 1)
        j = p.origin[2] + cols
        return np.asarray(classify(p.mask_node, p.rules.hiding_node, replace(seen, j=(j[:-1], j[1:] - 1))) == NOTHING)


def _blocks(rows: range) -> slice:
    """Return the blocks that contain these queries."""
    return slice(rows.start // BLOCK, -(-rows.stop // BLOCK))


def triangle(p: Problem) -> tuple[bool, bool]:
    """Return whether no query sees later keys, and whether each sees all others.

    Bounds of the mask prove both, or the answer is False. Squares cover both triangles, about n of them.
    """
    if p.mask is None:
        return False, True
    if p.mask is causally(None):
        return True, True
    first, last, end = int(p.offset.min()), int(p.offset.max()) + p.n_q, p.keys
    ranges = p.extents.ranges(0, (0, p.heads - 1), np.int64(0), np.int64(0))
    none, every = True, True
    for size in (2**k for k in range(max(last, end, 1).bit_length())):
        low = np.arange(0, max(last, end), 2 * size, dtype=np.int64)
        for i, j, wanted in ((low, low + size, NOTHING), (low + size, low, EVERYTHING)):
            none, every = _agree(p, ranges, i, j, size, wanted, none, every)
    diagonal = np.arange(max(first, 0), min(last, end), dtype=np.int64)
    return _agree(p, ranges, diagonal, diagonal, 1, EVERYTHING, none, every)


def _agree(
    p: Problem, ranges: Ranges, i: Array, j: Array, size: int, wanted: int, none: bool, every: bool
) -> tuple[bool, bool]:
    """Update both answers of `triangle` by squares of `size` at (i, j)."""
    i_ends = np.maximum(i, int(p.offset.min())), np.minimum(i + size, int(p.offset.max()) + p.n_q) - 1
    j_ends = np.maximum(j, p.origin[2]), np.minimum(j + size, p.keys) - 1
    there = (i_ends[0] <= i_ends[1]) & (j_ends[0] <= j_ends[1])
    i_ends, j_ends = (tuple(x[there] for x in ends) for ends in (i_ends, j_ends))
    whole = replace(ranges, b=(p.origin[0], p.origin[0] + p.batch - 1), i=i_ends, j=j_ends)
    same = bool((classify(p.mask_node, None, whole) == wanted).all())
    return (none and same, every) if wanted == NOTHING else (none, every and same)


def rules_of(p: Problem) -> str:
    """Return the rules of a call as text, empty without rules."""
    rules = [*(str(rule) for rule in (p.mask, p.score) if rule is not None)]
    return ", ".join(rules + ["bias"] * (p.bias is not None) + ["sink"] * (p.sink is not None))
