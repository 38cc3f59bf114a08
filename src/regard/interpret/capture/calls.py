"""The calls of a layer: one call, and whether another goes on with it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from regard.core.layout import Layout
from regard.interpret.capture.layers import OPTIONS, RULES, with_dense
from regard.ops.normalization import causally
from regard.rules import At, Mask, Table, Traced, evaluate, mask, table
from regard.rules.expression import make, number, substitute

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLED = 16
"""Rows and keys of a call that are compared with those of earlier calls."""

EVERYONE = mask(lambda b, h, i, j: j >= 0)


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """One call: its arrays and the options of `regard.attention`.

    query (b, h, n_q, d), key (b, h_kv, n_k, d), lse (b, h, n_q). first: the absolute position of the first query, or an
    array over the batch. begin: that of the first key.
    """

    query: Array
    key: Array
    lse: Array
    options: Mapping[str, Any]
    first: Any
    begin: int
    cross: bool

    @staticmethod
    def of(query: Array, key: Array, lse: Array, options: Mapping[str, Any], cross: bool) -> "CapturedCall":
        """Make a call of the arguments and options that `regard.attention` was given."""
        frame = Layout.of(query, options.get("layout", "bhnd"))
        q, k = frame.to_bhnd(query), frame.to_bhnd(key)
        lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3])
        batch = int(np.prod(lead, dtype=np.int64))
        q, k = (np.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(batch, *x.shape[-3:]) for x in (q, k))
        n_q, n_k = q.shape[-2], k.shape[-2]

        def flat(x: Array) -> Array:
            """Merge the leading axes of an array that aligns right to (..., h, n_q, n_k)."""
            x = x.reshape((1,) * (len(lead) + 3 - x.ndim) + x.shape)
            return x if len(lead) < 2 else np.broadcast_to(x, (*lead, *x.shape[-3:])).reshape(batch, *x.shape[-3:])

        fields = {name: x for name, x in options.items() if name in OPTIONS and x is not None and x is not False}
        fields |= {name: rule(fields[name]) for name, (_, rule) in RULES.items() if name in fields}
        if "bias" in fields and len(lead) > 1:
            fields["bias"] = flat(fields["bias"])
        if "mask" in fields and fields["mask"].dense and len(lead) > 1:
            fields["mask"] = with_dense(fields["mask"], flat)
        offset = fields.get("offset", n_k - n_q)
        if isinstance(offset, np.ndarray):
            offset = np.broadcast_to(offset, lead).reshape(-1).astype(np.int64)
            fields["offset"] = offset
            offset = int(offset[0]) if (offset == offset[0]).all() else offset
        else:
            offset = int(offset)
        begin = fields.get("origin", (0, 0, 0))[2]
        call = CapturedCall(q, k, frame.rows_to_bhn(lse).reshape(q.shape[:3]), fields, offset, begin, cross)
        return call if cross else call.without_unwritten_keys()

    def hashes(self, position: int) -> tuple[int, ...]:
        """Return the hash of a key of each batch element."""
        return tuple(hash(x.tobytes()) for x in self.key[:, :, position - self.begin])

    @property
    def n_q(self) -> int:
        return int(self.query.shape[2])

    @property
    def end(self) -> int:
        """Position after the last key."""
        return self.begin + int(self.key.shape[2])

    @property
    def mask(self) -> Mask | None:
        rule = self.options.get("mask")
        return causally(rule) if self.options.get("causal") else rule

    def without_unwritten_keys(self) -> "CapturedCall":
        """Drop the keys after the last query, if no query sees them.

        Such keys are the unused part of a cache that has its full size from the start.
        """
        if isinstance(self.first, np.ndarray) or self.mask is None or self.mask.dense:
            return self
        stop = self.first + self.n_q
        if not self.begin < stop < self.end or visible(self.mask, self, range(stop, self.end)).any():
            return self
        options = dict(self.options) | {"offset": self.first}
        if "bias" in options and options["bias"].shape[-1] > 1:
            options["bias"] = options["bias"][..., : stop - self.begin]
        return replace(self, key=self.key[:, :, : stop - self.begin], options=options)

    def of_rows(self, rows: Array) -> "CapturedCall":
        """Return the call with some of its queries, by ascending row, and all of its keys.

        Rules see the positions that the queries have: where these are not adjacent, by a table.
        """
        options, keeps = dict(self.options), rows[-1] - rows[0] + 1 == len(rows)

        def part(x: Array) -> Array:
            return x[..., rows, :] if x.shape[-2] > 1 else x

        if "bias" in options:
            options["bias"] = part(options["bias"])
        if not keeps and self.mask is not None:
            options["mask"] = self.mask
            options.pop("causal", None)
        if "mask" in options and options["mask"].dense:
            options["mask"] = with_dense(options["mask"], part)
        first = self.first + int(rows[0]) if keeps else 0
        if not keeps and not self.cross:
            options |= _at_positions(options, np.add.outer(self.first, rows))
        options["offset"] = first
        return replace(
            self, query=self.query[:, :, rows], lse=self.lse[:, :, rows], options=options, first=first
        )  # fmt: skip

    def rule(self) -> Mask:
        """Return the mask of its queries as a rule that later keys do not change.

        The rule holds tables instead of dense arrays.
        """
        rule = self.mask
        if rule is not None and rule.dense:
            b, h, i, j = (Traced(make(name, "int")) for name in "bhij")
            new = {}
            for x in rule.dense:  # along an axis of size 1, any index is clamped to 0
                table = Table(x.reshape((1,) * (4 - x.ndim) + x.shape))
                new[make("dense", "bool", (), x)] = table[b, h, i - self.first, j - self.begin].node
            rule = Mask(substitute(rule.node, new), rule.text)
        if rule is not None:
            keys = {make("keys", "int"): number(self.end)}
            rule = Mask(substitute(rule.node, keys), rule.text, binds=rule.binds)
        if self.cross:
            return EVERYONE if rule is None else rule
        if self.n_q == 1 and self.first == self.end - 1:
            return causally(rule)
        if rule is not None:
            later = [self.end + n for n in (*range(SAMPLED), *(2**n for n in range(5, 24)))]
            if not visible(rule, self, later).any():
                return rule
        end = self.end
        existing = mask(lambda b, h, i, j: j < end)
        return existing if rule is None else rule & existing


def _at_positions(options: Mapping[str, Any], positions: Array) -> dict[str, Any]:
    """Return the rules of options for queries at these positions, (n_q,) or (b, n_q)."""
    i, b = Traced(make("i", "int")), Traced(make("b", "int"))
    at = table(positions)[i] if positions.ndim == 1 else table(positions)[b, i]
    return {
        name: kind(substitute(options[name].node, {i.node: at.node}), options[name].text)
        for name, (kind, _) in RULES.items()
        if name in options and not getattr(options[name], "dense", ())
    }


@dataclass(frozen=True)
class Continuation:
    """The continuation of a layer's earlier calls by another.

    rows: the number of earlier queries that stay. A call that goes back in its cache takes the place of the others.
    places: for each batch element the earlier ones that it may go on with, its own place first. Beam search gives them
    other places, and those with equal keys cannot be told apart.
    """

    rows: int
    places: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> list[int]:
        """The batch elements that these go on with."""
        return [places[0] for places in self.places]


class CallSequence:
    """The positions that the calls of a layer have reached, without their arrays.

    hashes: of sampled keys, by position. rows: the number of queries; last: of the last call. open: False for pieces of
    one forward, as no call goes on with them.
    """

    def __init__(self, call: CapturedCall):
        self.kind = call.cross, call.query.shape[1], call.key.shape[1]
        self.first = 0 if call.cross else call.first
        self.begin = self.end = call.begin
        self.rows = self.last = 0
        self.hashes: list[tuple[int, tuple[int, ...]]] = []
        self.open = True
        self._take(call)

    def continuation(self, call: CapturedCall, other: Continuation | None = None) -> Continuation | None:
        """Return how a call goes on with these, or None.

        other: how the last call of self-attention did; in cross-attention no position tells.
        """
        cross, *_ = self.kind
        if not self.open or self.kind != (call.cross, call.query.shape[1], call.key.shape[1]):
            return None
        if cross:
            if other is None or (call.begin, call.end) != (self.begin, self.end) or len(call.key) != len(other.places):
                return None
            stop = self.end
        else:
            if not type(call.first) is type(self.first) is int or not 0 < call.first - self.first <= self.rows:
                return None
            back = call.first - self.first < self.rows
            stop = call.first if back else min(self.end, call.end)
        start, end = (bisect_left(self.hashes, (x,)) for x in (call.begin, stop))
        hashed = self.hashes[start:end]
        chosen = [hashed[n] for n in sampled(len(hashed))]
        ours: list[tuple[int, ...]] = list(zip(*(x for _, x in chosen), strict=True)) or [()] * self.batch
        for position, hashes in hashed if len(set(ours)) < self.batch else ():
            more = [(*x, y) for x, y in zip(ours, hashes, strict=True)]
            if len(set(more)) > len(set(ours)):  # it tells batch elements apart that the others do not
                ours = more
                chosen.append((position, hashes))
        theirs = list(zip(*(call.hashes(position) for position, _ in chosen), strict=True)) or [()] * len(call.key)
        if cross and other is not None:
            rows, places = other.rows, other.places
        else:
            rows, all_of = call.first - self.first, range(self.batch)
            places = tuple((*all_of[b : b + 1], *all_of[:b], *all_of[b + 1 :]) for b in range(len(theirs)))
        places = tuple(
            tuple(n for n in of if n < self.batch and ours[n] == x) for of, x in zip(places, theirs, strict=True)
        )
        return Continuation(rows, places) if all(places) else None

    def add(self, call: CapturedCall, how: Continuation) -> None:
        """Append the next call."""
        if how.rows < self.rows and not call.cross:
            self.end = min(self.end, call.first)
            del self.hashes[bisect_left(self.hashes, (self.end,)) :]
        order = how.order
        if order != list(range(self.batch)):
            self.hashes = [(position, tuple(x[b] for b in order)) for position, x in self.hashes]
        self.rows = how.rows
        self._take(call)

    def _take(self, call: CapturedCall) -> None:
        start = max(self.end, call.begin)
        self.hashes += [(n, call.hashes(n)) for n in (start + sampled(call.end - start)).tolist() if n < call.end]
        self.end = max(self.end, call.end)
        self.batch, self.last = len(call.key), call.n_q
        self.rows += call.n_q


def visible(rule: Mask, call: CapturedCall, keys: Sequence[int], rows: Array | None = None) -> Array:
    """Evaluate a rule on sampled rows and given keys of a call: (b, h, rows, keys).

    rows, keys: positions.
    """
    positions = call.first + sampled(call.n_q) if rows is None else rows
    b, h = (np.arange(size, dtype=np.int64) for size in call.query.shape[:2])
    j = np.asarray(keys, np.int64)
    at = At(b[:, None, None, None], h[:, None, None], positions[:, None], j, keys=call.end)
    (flags,) = evaluate([rule.node], at)
    return np.asarray(flags)


def sampled(n: int) -> Array:
    """Sample evenly from range(n), the first and the last included."""
    return np.unique(np.linspace(0, n - 1, min(n, SAMPLED)).astype(np.int64))
