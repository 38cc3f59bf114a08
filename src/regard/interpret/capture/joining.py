"""Joining calls into a layer: decode steps, or the pieces of one forward.

The first call of a generation has the prompt. Each later one has one query or a few. Its keys are in a cache that
grows, slides, has its full size from the start, or is cut back to the tokens that were accepted. Every call has a rule
of its own; together they become one rule.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from regard.interpret.capture.calls import EVERYONE, CapturedCall, Continuation, sampled, visible
from regard.interpret.capture.layers import RULES, Layer, with_dense
from regard.rules import Mask, Traced, documents, mask, reads, rule_text, table
from regard.rules.expression import make, substitute
from regard.runtime.arrayfile import Parts

Array = np.ndarray[Any, np.dtype[Any]]

RULES_AT_MOST = 64
"""Maximum number of different masks along the rows of a layer."""

SPILLED = 2**20
"""Bytes from which on an array is stored on disk, if the store has a folder."""


class UnjoinableCalls(Exception):
    """Raised for consecutive calls that do not form a single one, with the reason."""


class ArrayStore:
    """Copies of arrays, in memory or in mapped files of a folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self._made: dict[Any, tuple[Any, Any]] = {}

    def copy(self, x: Array) -> Array:
        """Copy an array, so that no one else writes to it."""
        copied = self.empty(x.shape, x.dtype)
        copied[...] = x
        return copied

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        if self.folder is None or np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize < SPILLED:
            return np.empty(shape, dtype)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            return np.asarray(np.memmap(file, dtype, "w+", shape=shape))

    def once(self, key: Any, alive: Any, make: Callable[[], Any], stale: Callable[[Any], bool] | None = None) -> Any:
        """Cache the result of `make` by a key, until it is stale.

        alive: an object to keep alive, since the key holds its id.
        """
        if key not in self._made or (stale is not None and stale(self._made[key][0])):
            self._made[key] = make(), alive
        return self._made[key][0]

    def forget(self) -> None:
        self._made.clear()


def alike(a: Any, b: Any) -> bool:
    """Return True if two options are equal."""
    if a is b:
        return True
    if a is None or b is None or type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool((a == b).all())
    if not hasattr(a, "node"):
        return bool(a == b)
    (text, *arrays), (other, *others) = rule_text(a.node), rule_text(b.node)
    pairs = zip(arrays[0], others[0], strict=False)
    return text == other and not arrays[1] and all(x is y or alike(x.array, y.array) for x, y in pairs)


def options_of(options: Mapping[str, Any], heads: Sequence[int], store: ArrayStore) -> dict[str, Any]:
    """Copy the arrays of options, for some heads if they have a head axis."""

    def copied(x: Array, axis: int) -> Array:
        some = x.ndim >= -axis and x.shape[axis] > 1 and list(heads) != list(range(x.shape[axis]))
        part = np.take(x, heads, axis) if some else x
        key = x.__array_interface__["data"][0], x.dtype, x.shape, x.strides, tuple(heads)
        # The model may have written the memory since, or freed it for another array.
        at: Array = store.once(key, None, lambda: store.copy(part), stale=lambda old: not alike(old, part))
        return at

    copies = dict(options)
    if "bias" in copies:
        copies["bias"] = copied(copies["bias"], -3)
    if "sink" in copies:
        copies["sink"] = copied(copies["sink"], -1)
    if "mask" in copies and copies["mask"].dense:
        rule = copies["mask"]
        copies["mask"] = with_dense(rule, partial(copied, axis=-3))
    return copies


class JoinedCalls:
    """The calls so far as one, for some heads or all.

    order: the row of each position, if the model sorts its rows, as that of windows in a picture. chosen: the rows
    whose queries are kept, None for all.
    """

    order: Array | None = None

    def __init__(
        self,
        call: CapturedCall,
        store: ArrayStore,
        heads: Sequence[int] | None = None,
        chosen: Array | None = None,
    ):
        self.chosen, self.whole = chosen, call.n_q
        if chosen is not None:
            call = call.of_rows(chosen)
        h, h_kv = call.query.shape[1], call.key.shape[1]
        self.heads = tuple(range(h)) if heads is None else tuple(heads)
        if not all(0 <= head < h for head in self.heads):
            raise ValueError(f"heads must be from 0 to {h - 1}, got {list(self.heads)}")
        self.group = h // h_kv
        self.kv_heads = tuple(sorted({head // self.group for head in self.heads}))
        self.store, self.cross = store, call.cross
        self.options = options_of(call.options, self.heads, store)
        # Shapes and options for a following call, without its arrays, which belong to the model.
        query, key, lse = (np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in (call.query, call.key, call.lse))
        self.first = replace(call, query=query, key=key, lse=lse, options=self.options)
        self.begin = self.end = call.begin
        self.rows = 0
        self.queries: list[Array] = []
        self.keys: list[Array] = []
        self.lses: list[Array] = []
        self.biases: list[tuple[Array | None, int]] = []
        self.masks: list[tuple[int, Mask]] = []
        self.pieces: list[tuple[Any, int, int, int]] = []  # first position and number, of queries and of keys
        self._take_piece(call, own_keys=True)
        self._take(call, self.options)

    @property
    def nbytes(self) -> int:
        biases = {id(bias): bias.nbytes for bias, _ in self.biases if bias is not None}
        return sum(x.nbytes for part in (self.queries, self.keys, self.lses) for x in part) + sum(biases.values())

    def add(self, call: CapturedCall, how: Continuation) -> None:
        """Append the next call.

        Raises UnjoinableCalls if the calls do not form a single one.
        """
        if self.chosen is not None:
            raise UnjoinableCalls("some of its queries were chosen, which is for one forward: run the whole text once")
        options = options_of(call.options, self.heads, self.store)
        for name in ("score", "sink", "scale"):
            if not alike(self.options.get(name), options.get(name)):
                raise UnjoinableCalls(f"its {name} changes from call to call")
        self._begin_masks()
        if how.rows < self.rows:
            self.cut(how.rows)
        if how.order != list(range(len(self.queries[0]))):
            self._reorder(call, how.order)
        if call.begin > self.end:
            raise UnjoinableCalls("keys are missing between its calls")
        self._see(call)
        self._take(call, options)

    def add_piece(self, call: CapturedCall, own_keys: bool) -> bool:
        """Append the next piece of the same forward; return False if it does not fit.

        A piece has the options of the first, and no arrays of n_q × n_k. own_keys: its queries see keys of their own,
        which come after those so far; else the keys of the last piece.
        """
        of_first, of_call = self.first.options, call.options
        same = all(
            alike(of_first.get(name), of_call.get(name)) for name in ("mask", "causal", "score", "sink", "scale")
        )
        rules = [of_call[name].node for name in RULES if name in of_call]
        fixed = type(self.first.first) is type(call.first) is int and "keys" not in reads(*rules)
        whole = own_keys or call.key.shape == self.first.key.shape
        if self.masks or "bias" in of_first or "bias" in of_call or not (same and fixed and whole):
            return False
        self._take_piece(call, own_keys)
        self._take(replace(call, begin=self.end if own_keys else self.begin), {})
        return True

    def _take_piece(self, call: CapturedCall, own_keys: bool) -> None:
        self.pieces.append((call.first, call.n_q, call.begin, call.key.shape[2] if own_keys else 0))

    def _position(self, row: int) -> int:
        """Return the position of a query; in cross-attention, its row.

        Rules of cross-attention read positions of keys alone.
        """
        return row if self.cross else int(self.first.first) + row

    def _begin_masks(self) -> None:
        if not self.masks:
            self.masks.append((self._position(0), self.first.rule()))

    def _take(self, call: CapturedCall, options: Mapping[str, Any]) -> None:
        self.queries.append(self.store.copy(_some(call.query, self.heads)))
        self.lses.append(self.store.copy(_some(call.lse, self.heads)))
        if call.end > self.end:
            self.keys.append(self.store.copy(_some(call.key, self.kv_heads)[:, :, self.end - call.begin :]))
            self.end = call.end
        self.biases.append((options.get("bias"), call.begin))
        self.rows += call.n_q

    def cut(self, rows: int) -> None:
        """Drop the queries from a row on, and in self-attention the keys from there on."""
        self._begin_masks()
        position, end = self._position(rows), self.end
        while len(self.masks) > 1 and self.masks[-1][0] >= position:
            self.masks.pop()
        if not self.cross:
            self.end = min(end, position)
            self.keys = _until(self.keys, self.end - self.begin)
            stops = [*(start for start, _ in self.masks[1:]), position]
            for (start, rule), stop in zip(self.masks, stops, strict=True):
                if visible(rule, self.first, range(self.end, end), start + sampled(stop - start)).any():
                    raise UnjoinableCalls("a later call replaces keys that its queries have seen")
        self.rows = rows
        self.queries, self.lses = _until(self.queries, rows), _until(self.lses, rows)
        self.biases = [
            (x if x is None else x[..., : q.shape[2], : max(1, self.end - begin)], begin)
            for (x, begin), q in zip(self.biases, self.queries, strict=False)
        ]

    def _reorder(self, call: CapturedCall, order: list[int]) -> None:
        """Give the batch elements other places."""
        for parts in (self.queries, self.keys, self.lses):
            for n, x in enumerate(parts):
                if len(x) == len(order):
                    x[...] = x[order]
                else:
                    parts[n] = self.store.copy(x[order])
        self.biases = [
            (x if x is None or x.ndim < 4 or len(x) == 1 else x[order], begin) for x, begin in self.biases
        ]  # fmt: skip
        b, keys = Traced(make("b", "int")), range(self.begin, self.end)
        for n, (start, rule) in enumerate(self.masks):
            moved = Mask(substitute(rule.node, {b.node: table(np.array(order))[b].node}), rule.text, binds=rule.binds)
            rows = start + sampled(self._position(self.rows) - start)
            if not _equal(visible(moved, call, keys, rows), visible(rule, call, keys, rows)):
                self.masks[n] = start, moved

    def _see(self, call: CapturedCall) -> None:
        """Record the mask of a call: reuse the last rule if it agrees, else add one."""
        rule = call.rule()
        start, last = self.masks[-1]
        if self.cross and "i" in reads(rule.node, last.node):
            raise UnjoinableCalls("its masks look at the positions of queries in another sequence")
        keys = range(call.begin, call.end)
        if _equal(visible(rule, call, keys), visible(last, call, keys)):
            return
        before, all_keys = start + sampled(self._position(self.rows) - start), range(self.begin, call.end)
        dense = call.mask is not None and bool(call.mask.dense)  # it has no earlier rows
        if not dense and _equal(visible(rule, call, all_keys, before), visible(last, call, all_keys, before)):
            self.masks[-1] = start, rule  # the same for the earlier rows: a table that has grown
            return
        self.masks.append((self._position(self.rows), rule))
        if len(self.masks) > RULES_AT_MOST:
            raise UnjoinableCalls(f"more than {RULES_AT_MOST} different masks follow each other")

    def layer(self, name: str, sizes: Mapping[str, int], texts: tuple[str | None, str | None], number: int) -> Layer:
        """Make the layer of all calls.

        texts: the names of the sequences of queries and keys; sizes: their lengths.
        """
        options, n_k = dict(self.options), self.end - self.begin
        dense = "bias" in options or ("mask" in options and options["mask"].dense)
        sorts = self.order is not None and len(self.order) == self.rows == n_k and not (self.masks or dense)
        if sorts or len(self.pieces) > 1:
            options = self._of_one_forward(self.order if sorts else slice(None))
        elif self.masks:
            options = {x: options[x] for x in ("score", "sink", "scale") if x in options}
            options["offset"] = self._position(0)
            if [rule for _, rule in self.masks] != [EVERYONE]:
                options["mask"] = _one_after_another(self.masks)
            if self.begin or "origin" in self.options:
                options["origin"] = (0, 0, self.begin)
            bias = self._bias()
            options |= {} if bias is None else {"bias": bias}
        if type(options.get("offset")) is int and options["offset"] == n_k - self.rows:
            del options["offset"]
        rows = self.rows if self.chosen is None else self.whole
        whole = self.cross or (self.begin == 0 and n_k == rows)
        q, k = (x if sizes.get(x or "") == n and whole else None for x, n in zip(texts, (rows, n_k), strict=True))
        query, key = (parts[0] if len(parts) == 1 else self._whole(parts) for parts in (self.queries, self.keys))
        lse = self.lses[0] if len(self.lses) == 1 else np.concatenate(self.lses, axis=-1)
        if sorts:
            arrays = self.queries, self.keys, self.lses
            query, key, lse = (np.concatenate(parts, axis=2)[:, :, self.order] for parts in arrays)
        return Layer(
            name, query, key, lse, options, self.cross, q, k, self.heads, self.kv_heads, self.group, number,
            rows=() if self.chosen is None else tuple(self.chosen.tolist()),
        )  # fmt: skip

    def _of_one_forward(self, order: Any) -> dict[str, Any]:
        """Return the options of pieces: documents with positions of their own."""
        firsts, counts, begins, key_counts = zip(*self.pieces, strict=True)
        numbers = np.cumsum([count > 0 for count in key_counts]) - 1  # of the keys that each piece sees
        i, j = (
            np.concatenate([x + np.arange(n) for x, n in zip(*of, strict=True)])[order]
            for of in ((firsts, counts), (begins, key_counts))
        )
        ids, key_ids = (np.repeat(numbers, n)[order] for n in (counts, key_counts))
        options: dict[str, Any] = {x: self.options[x] for x in ("score", "sink", "scale") if x in self.options}
        options["offset"] = 0
        if "origin" in self.options:
            options["origin"] = (0, 0, 0)
        if self.first.mask is not None:
            options["mask"] = self.first.mask
        nodes = make("i", "int"), make("j", "int")
        own = {x: table(at)[Traced(x)].node for x, at in zip(nodes, (i, j), strict=True)}
        for name, (kind, _) in RULES.items():
            if name in options:
                rule: Any = options[name]
                options[name] = kind(substitute(rule.node, own), rule.text)
        if numbers[-1]:
            apart = documents(ids, None if np.array_equal(ids, key_ids) else key_ids)
            options["mask"] = apart & options["mask"] if "mask" in options else apart
        return options

    def _whole(self, parts: list[Array]) -> Any:
        return Parts(parts) if self.store.folder is not None else np.concatenate(parts, axis=-2)

    def _bias(self) -> Array | None:
        """Join the biases of all calls, with 0 for keys of later calls."""
        biases = [x for x, _ in self.biases if x is not None]
        if not biases:
            return None
        last = biases[-1]
        grown = all(x.shape[-2] == 1 and alike(x, last[..., : x.shape[-1]]) for x in biases)
        if grown and len(biases) == len(self.biases):
            return last
        lead = np.broadcast_shapes(*(x.shape[:-2] for x in biases))

        def make() -> Array:
            whole = self.store.empty((*lead, self.rows, self.end - self.begin), last.dtype)
            whole[...] = 0
            row = 0
            for (x, begin), query in zip(self.biases, self.queries, strict=True):
                rows = slice(row, row := row + query.shape[2])
                if x is not None:
                    at = begin - self.begin
                    whole[..., rows, at : at + x.shape[-1] if x.shape[-1] > 1 else None] = x
            return whole

        key = ("bias", *(id(x) for x, _ in self.biases))
        joined: Array = self.store.once(key, [x for x, _ in self.biases], make)
        return joined


def _until(parts: Sequence[Array], n: int) -> list[Array]:
    """Return the first n rows (axis 2) of arrays that follow each other."""
    starts = np.cumsum([0, *(x.shape[2] for x in parts)])
    return [x[:, :, : n - start] for x, start in zip(parts, starts.tolist(), strict=False) if start < n]


def _some(x: Array, heads: tuple[int, ...]) -> Array:
    """Select heads of (b, h, ...), as a view if all are selected."""
    return x if heads == tuple(range(x.shape[1])) else x[:, list(heads)]


def _equal(a: Array, b: Array) -> bool:
    return bool((a == b).all())


def _one_after_another(masks: Sequence[tuple[int, Mask]]) -> Mask:
    """Return a rule that applies each mask from its first row on."""
    _, combined = masks[0]
    for start, rule in masks[1:]:
        before = mask(lambda b, h, i, j, start=start: i < start)
        combined = before & combined | ~before & rule
    return combined
