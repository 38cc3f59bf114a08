"""One layer of a capture: its queries, keys, lse and rules."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import numpy as np

from regard.core import rowsums
from regard.core.options import AFTER_WEIGHTS, CallOptions
from regard.core.statistics import Seen, Statistic, StatisticName
from regard.engines import choose
from regard.interpret.capture.grids import PatchGrid
from regard.ops.attention import attention
from regard.ops.normalization import problem_from
from regard.rules import Mask, Score, Traced, as_mask, as_score, reads, table
from regard.rules.expression import make, rebuild, substitute
from regard.runtime.forks import cached_property

Array = np.ndarray[Any, np.dtype[Any]]

OPTIONS = tuple(name for name in CallOptions._fields if name not in (*AFTER_WEIGHTS, "metric"))
RULES: dict[str, Any] = {"mask": (Mask, as_mask), "score": (Score, as_score)}


@dataclass(frozen=True, eq=False)
class Layer:
    """One call of attention, or many that form one sequence.

    query (b, h, n_q, d), key (b, h_kv, n_k, d), lse (b, h, n_q), float32 (float64 for float64). Arrays may be mapped
    from a file.

    Heads are named by the model's number everywhere, also where only some are recorded.

    options: those of `regard.attention` that change weights: mask, causal, score, bias, scale, sink, offset, origin.
    cross: True for keys of another sequence. query_tokens, key_tokens: names in `Capture.tokens` of the sequences of
    queries and keys. numbers: the model's number of each head in `query`. group: the number of query heads that share a
    key-value head. kv_numbers: the model's number of each key-value head, if some are missing. number: the model's
    number of the layer, in the order of first calls, missing layers included. None: its index in the capture. grids: of
    the pictures or sounds among its keys; unless it is cross-attention, its queries are the same tokens. rows: those of
    the model's queries that these are, if others were not kept.

    `regard.attention` takes the arguments that `arguments` returns, for any statistic:

    >>> rng = np.random.default_rng(0)
    >>> q, k = rng.standard_normal((2, 1, 4, 300, 8))
    >>> layer = Layer.of("first", q, k[:, :2], causal=True)
    >>> layer
    Layer 'first': 4 heads over 2, 300 queries, 300 keys, d = 8, causal
    >>> layer.weights(3, rows=slice(10, 12)).sum(-1).round(6)
    array([1., 1.])
    >>> layer.observe(["entropy"], head=3).entropy.shape
    (300,)
    """

    name: str
    query: Array
    key: Array
    lse: Array
    options: Mapping[str, Any] = field(default_factory=dict)
    cross: bool = False
    query_tokens: str | None = None
    key_tokens: str | None = None
    numbers: tuple[int, ...] = ()
    kv_numbers: tuple[int, ...] = ()
    group: int = 1
    number: int | None = None
    grids: tuple[PatchGrid, ...] = ()
    rows: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, query: Array, key: Array, *, lse: Array | None = None, **options: Any) -> Self:
        """Make a layer from arrays (n, d), (h, n, d) or (b, h, n, d).

        Without `lse` (..., h, n_q), one pass computes it. `options` are those of `regard.attention` and fields of the
        layer; a metric is replaced by its product with the query. Raises TypeError and ValueError as `regard.attention`
        does, and ValueError for the lse of another call.
        """
        metric = options.pop("metric", None)
        of_layer = ("cross", "query_tokens", "key_tokens", "number", "grids", "rows")
        fields = {field: options.pop(field) for field in of_layer if field in options}
        for option in options:
            if option not in OPTIONS:
                raise TypeError(f"{option} is not an option that a layer keeps; those are {', '.join(OPTIONS)}")
        effective = {option: x for option, x in options.items() if x is not None and x is not False}
        for option, (_, rule) in RULES.items():
            if option in effective:
                effective[option] = rule(effective[option])
        if max(query.ndim, key.ndim) > 4:
            raise ValueError(f"query and key of a layer have at most (b, h, n, d), got {query.shape} and {key.shape}")
        p = problem_from(query, key, key, metric=metric, **effective)
        q, k = (np.broadcast_to(x, (*p.lead, *x.shape[-3:])) for x in (p.query, p.key))
        if lse is None:
            lse = attention(q, k, k[..., :0], observe=["lse"], **effective)[1].lse
        if p.batch == 0 or 0 in q.shape:
            raise ValueError(f"a layer has at least one query, head and feature, got query {query.shape}")
        lse = rowsums.taken(p, lse)
        q, k = (x.reshape(p.batch, *x.shape[-3:]) for x in (q, k))
        h = q.shape[1]
        return cls(
            name, q, k, lse.reshape(q.shape[:3]), effective, **fields,
            numbers=tuple(range(h)), kv_numbers=tuple(range(k.shape[1])), group=h // k.shape[1],
        )  # fmt: skip

    @property
    def batch(self) -> int:
        return int(self.query.shape[0])

    @property
    def heads(self) -> int:
        """The number of recorded query heads; `numbers` has the model's numbers."""
        return int(self.query.shape[1])

    @property
    def kv_heads(self) -> int:
        return int(self.key.shape[1])

    @property
    def n_q(self) -> int:
        return int(self.query.shape[2])

    @property
    def n_k(self) -> int:
        return int(self.key.shape[2])

    @property
    def d(self) -> int:
        return int(self.query.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of query, key and lse."""
        return self.query.nbytes + self.key.nbytes + self.lse.nbytes

    @cached_property
    def all_heads(self) -> dict[str, Any]:
        """Arguments of `regard.attention` for all heads, without the value.

        If heads of the model are missing, each has its own keys, and rules that read h see its number.
        """
        if self.numbers == tuple(range(self.heads)) and self.heads == self.group * self.kv_heads:
            return {"query": self.query, "key": self.key, **self.options}
        numbers, options = table(np.array(self.numbers)), dict(self.options)
        h = Traced(make("h", "int"))
        for name, (kind, _) in RULES.items():
            if name in options and "h" in reads(options[name].node):
                rule = options[name]
                requires = tuple(need for need in rule.requires if need.axis != "h")
                options[name] = kind(substitute(rule.node, {h.node: numbers[h].node}), rule.text, requires)
        key = self.key[:, [self.kv_numbers.index(self.kv_head(head)) for head in self.numbers]]
        return {"query": self.query, "key": key, **options}

    def kv_head(self, head: int) -> int:
        """Return the model's number of the key-value head that a head reads."""
        return head // self.group

    def element(self, batch: int) -> Self:
        """Return one batch element as a layer.

        Rules see the batch index that they saw in the model.
        """
        if not -self.batch <= batch < self.batch:
            raise IndexError(f"batch {batch} does not exist: there are {self.batch}")
        batch %= self.batch
        options = dict(self.options)
        b, h, j = options.get("origin", (0, 0, 0))

        def part(x: Array) -> Array:
            """Select this element of an array that aligns right to (b, h, n_q, n_k)."""
            element: Array = x if x.ndim < 4 else x[batch if x.shape[0] > 1 else 0]
            return element

        if "bias" in options:
            options["bias"] = part(options["bias"])
        if "mask" in options:
            options["mask"] = with_dense(options["mask"], part)
        if isinstance(options.get("offset"), np.ndarray):
            options["offset"] = int(np.broadcast_to(options["offset"], (self.batch,))[batch])
        arrays = {name: getattr(self, name)[batch : batch + 1] for name in ("query", "key", "lse")}
        grids = tuple(replace(grid, batch=None) for grid in self.grids if grid.of_batch(batch))
        return replace(self, **arrays, options=options | {"origin": (b + batch, h, j)}, grids=grids)

    def arguments(self, head: int, batch: int = 0) -> dict[str, Any]:
        """Return the arguments of `regard.weights` for one head of the model.

        query (n_q, d), key (n_k, d), lse (n_q,) and the options, as views. Rules see the head's number and the batch
        index that they saw in the model.
        """
        row, layer = self._row(head), self.element(batch)
        number, options = self.numbers[row], dict(layer.options)
        b, _, j = options["origin"]

        def part(x: Array) -> Array:
            """Select this head of an array that aligns right to (h, n_q, n_k)."""
            x = x.reshape((1,) * (3 - x.ndim) + x.shape)
            of_head: Array = x[row if x.shape[0] > 1 else 0]
            return of_head

        if "bias" in options:
            options["bias"] = part(options["bias"])
        if "mask" in options:
            options["mask"] = with_dense(options["mask"], part)
        if "sink" in options and options["sink"].ndim:
            options["sink"] = options["sink"][row : row + 1]
        return {
            "query": layer.query[0, row],
            "key": layer.key[0, self.kv_numbers.index(self.kv_head(number))],
            "lse": layer.lse[0, row],
            **options,
            "origin": (b, number, j),
        }

    def _row(self, head: int) -> int:
        """Return the row of a head of the model; negative ones count from the end."""
        if head in self.numbers:
            return self.numbers.index(head)
        if -self.heads <= head < 0:
            return head % self.heads
        numbered = "" if self.numbers == tuple(range(self.heads)) else f", {', '.join(map(str, self.numbers))}"
        raise IndexError(f"head {head} does not exist: there are {self.heads}{numbered}")

    def weights(self, head: int, rows: slice = slice(None), cols: slice = slice(None), batch: int = 0) -> Array:
        """Compute a tile (rows, cols) of the weights of one head of the model, in the dtype of lse."""
        arguments = self.arguments(head, batch)
        lse = arguments.pop("lse")
        p = problem_from(value=arguments["key"], **arguments)
        tile = choose(p, None).weights(p, lse[None], range(self.n_q)[rows], range(self.n_k)[cols])
        return np.asarray(tile[0])

    def observe(
        self, observe: Sequence[StatisticName | Statistic], *, head: int | None = None, batch: int | None = None
    ) -> Seen:  # fmt: skip
        """Compute statistics in O(n) memory, as `observe=` of `regard.attention`.

        For all heads they are (b, h, ...), and (h, ...) of one batch element, heads in the order of `numbers`. For one
        head, by its number in the model, they have no leading axes; its batch element is by default the first.
        """
        if head is not None:
            arguments = self.arguments(head, batch or 0)
            arguments.pop("lse")
        elif batch is not None:
            arguments = self.element(batch).all_heads
            arguments |= {"query": arguments["query"][0], "key": arguments["key"][0]}
        else:
            arguments = self.all_heads
        return cast(Seen, attention(value=arguments["key"][..., :0], observe=observe, **arguments)[1])

    def deviation(self, rows: int = 3) -> float:
        """Return how far sampled rows of weights are from their sum, in roundings.

        With every key, Σ_j exp(S[i, j] − lse[i]) is 1 less the sink's weight, and 0 for a row that sees nothing. The
        unit is the error from rounding lse and scores (`regard.core.rowsums`). More than some 8 means that the rules,
        the keys or lse do not belong together.
        """
        farthest = self.farthest(rows)
        return 0.0 if farthest is None else farthest.roundings

    def farthest(self, rows: int = 3, pairs: int | None = None) -> rowsums.RowSum | None:
        """Return the sampled row with the largest deviation (`rowsums.deviation`)."""
        arguments = self.all_heads
        p = problem_from(value=arguments["key"], **arguments)
        return rowsums.deviation(p, self.lse, range(self.n_q), rows, pairs)

    def __repr__(self) -> str:
        over = f" over {self.kv_heads}" if self.kv_heads != self.heads else ""
        rules = [repr(self.options[name]) for name in ("mask", "score") if name in self.options]
        rules += [name for name in ("bias", "sink", "causal") if name in self.options]
        words = [
            f"{self.heads} head{'' if self.heads == 1 else 's'}{over}", f"{self.n_q} queries", f"{self.n_k} keys",
            f"d = {self.d}", *(["cross"] if self.cross else []), *(["of chosen rows"] if self.rows else []), *rules,
        ]  # fmt: skip
        return f"Layer {self.name!r}: {', '.join(words)}"


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sequence that a model read: ids (b, n), if known, and labels by batch element."""

    ids: Array | None = None
    labels: tuple[tuple[str, ...], ...] | None = None

    @property
    def n(self) -> int:
        if self.ids is not None:
            return int(self.ids.shape[-1])
        return len(self.labels[0]) if self.labels else 0


def with_dense(rule: Mask, part: Callable[[Array], Array]) -> Mask:
    """Return a mask with a part of each of its dense arrays."""
    return Mask(rebuild(rule.node, {id(x): part(x) for x in rule.dense}), rule.text, rule.requires, rule.binds)
