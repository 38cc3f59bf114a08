"""Joining the calls of one sequence, such as decode steps, into a layer.

The first call has the prompt. Each later one has one query or a few. Its keys are in a cache that grows, slides or has
its full size from the start. Every call has a rule of its own; together they become one rule.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.core.layout import Layout
from regard.interpret.capture.layers import OPTIONS, RULES, Layer
from regard.ops.normalization import causally
from regard.rules import At, Mask, Table, Traced, evaluate, mask, reads, rule_text
from regard.rules.expression import make, number, rebuild, substitute
from regard.runtime.arrayfile import Parts

Array = np.ndarray[Any, np.dtype[Any]]

SAMPLED = 16
"""Rows and keys of a call that are compared with those of earlier calls."""

RULES_AT_MOST = 64
"""Maximum number of different masks along the rows of a layer."""

SPILLED = 2**20
"""Bytes from which on an array is stored on disk, if the store has a folder."""


EVERYONE = mask(lambda b, h, i, j: j >= 0)


class UnjoinableCalls(Exception):
    """Raised for consecutive calls that do not form a single one, with the reason."""


class ArrayStore:
    """Copies of arrays, in memory or in mapped files of a folder."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self._made: dict[Any, tuple[Any, Any]] = {}

    def copy(self, x: Array) -> Array:
        """Copy an array, so that no one else writes to it."""
        made = self.empty(x.shape, x.dtype)
        made[...] = x
        return made

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

        given = {name: x for name, x in options.items() if name in OPTIONS and x is not None and x is not False}
        given |= {name: rule(given[name]) for name, (_, rule) in RULES.items() if name in given}
        if "bias" in given and len(lead) > 1:
            given["bias"] = flat(given["bias"])
        if "mask" in given and given["mask"].dense and len(lead) > 1:
            given["mask"] = with_dense(given["mask"], {id(x): flat(x) for x in given["mask"].dense})
        offset = given.get("offset", n_k - n_q)
        if isinstance(offset, np.ndarray):
            offset = np.broadcast_to(offset, lead).reshape(-1).astype(np.int64)
            given["offset"] = offset
            offset = int(offset[0]) if (offset == offset[0]).all() else offset
        else:
            offset = int(offset)
        begin = given.get("origin", (0, 0, 0))[2]
        made = CapturedCall(q, k, frame.rows_to_bhn(lse).reshape(q.shape[:3]), given, offset, begin, cross)
        return made if cross else made.without_unwritten_keys()

    @property
    def n_q(self) -> int:
        return int(self.query.shape[2])

    @property
    def end(self) -> int:
        """Position after the last key."""
        return self.begin + int(self.key.shape[2])

    @property
    def mask(self) -> Mask | None:
        given = self.options.get("mask")
        return causally(given) if self.options.get("causal") else given

    def without_unwritten_keys(self) -> "CapturedCall":
        """Drop the keys after the last query, if no query sees them.

        They are the unused part of a cache that has its full size from the start.
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

    def rule(self) -> Mask:
        """Return the mask of its queries as a rule that later keys do not change.

        The rule holds tables instead of dense arrays.
        """
        found = self.mask
        if found is not None and found.dense:
            b, h, i, j = (Traced(make(name, "int")) for name in "bhij")
            new = {}
            for x in found.dense:  # along an axis of size 1, any index is clamped to 0
                table = Table(x.reshape((1,) * (4 - x.ndim) + x.shape))
                new[make("dense", "bool", (), x)] = table[b, h, i - self.first, j - self.begin].node
            found = Mask(substitute(found.node, new), found.text)
        if found is not None:
            keys = {make("keys", "int"): number(self.end)}
            found = Mask(substitute(found.node, keys), found.text, binds=found.binds)
        if self.cross:
            return EVERYONE if found is None else found
        if self.n_q == 1 and self.first == self.end - 1:
            return causally(found)
        if found is not None:
            later = [self.end + n for n in (*range(SAMPLED), *(2**n for n in range(5, 24)))]
            if not visible(found, self, later).any():
                return found
        end = self.end
        existing = mask(lambda b, h, i, j: j < end)
        return existing if found is None else found & existing


def visible(rule: Mask, call: CapturedCall, keys: Sequence[int], rows: Array | None = None) -> Array:
    """Evaluate a rule on sampled rows and given keys of a call: (b, h, rows, keys).

    rows, keys: positions.
    """
    positions = call.first + sampled(call.n_q) if rows is None else rows
    b, h = (np.arange(size, dtype=np.int64) for size in call.query.shape[:2])
    j = np.asarray(keys, np.int64)
    at = At(b[:, None, None, None], h[:, None, None], positions[:, None], j, keys=call.end)
    (found,) = evaluate([rule.node], at)
    return np.asarray(found)


def sampled(n: int) -> Array:
    """Sample evenly from range(n), the first and the last included."""
    return np.unique(np.linspace(0, n - 1, min(n, SAMPLED)).astype(np.int64))


def with_dense(rule: Mask, arrays: Mapping[int, Array]) -> Mask:
    """Replace the dense arrays of a rule.

    arrays: the new ones, by the id of the old.
    """
    return Mask(rebuild(rule.node, arrays), rule.text, rule.requires, rule.binds)


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

    found = dict(options)
    if "bias" in found:
        found["bias"] = copied(found["bias"], -3)
    if "sink" in found:
        found["sink"] = copied(found["sink"], -1)
    if "mask" in found and found["mask"].dense:
        rule = found["mask"]
        found["mask"] = with_dense(rule, {id(x): copied(x, -3) for x in rule.dense})
    return found


class CallSequence:
    """The position that the calls of a layer have reached, without their arrays."""

    nbytes = 0

    def __init__(self, call: CapturedCall):
        self.shape = call.query.shape[:2], call.key.shape[1]
        self.next = call.first + call.n_q

    def precedes(self, call: CapturedCall) -> bool:
        """Return True if the first query of a call follows the last one so far."""
        same = self.shape == (call.query.shape[:2], call.key.shape[1])
        return same and type(call.first) is int and call.first == self.next


class JoinedCalls(CallSequence):
    """The calls so far as one, for some heads or all."""

    def __init__(self, call: CapturedCall, store: ArrayStore, heads: Sequence[int] | None = None):
        super().__init__(call)
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
        self._take(call, self.options)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        biases = {id(bias): bias.nbytes for bias, _ in self.biases if bias is not None}
        return sum(x.nbytes for part in (self.queries, self.keys, self.lses) for x in part) + sum(biases.values())

    def add(self, call: CapturedCall) -> bool:
        """Append the next call; return False if its keys begin a new sequence.

        Raises UnjoinableCalls if the calls do not form a single one.
        """
        if not self._same_keys(call):
            return False
        options = options_of(call.options, self.heads, self.store)
        for name in ("score", "sink", "scale"):
            if not alike(self.options.get(name), options.get(name)):
                raise UnjoinableCalls(f"its {name} changes from call to call")
        if call.begin > self.end:
            raise UnjoinableCalls("keys are missing between its calls")
        if not self.masks:
            self.masks.append((self._position(self.first), self.first.rule()))
        self._see(call)
        self._take(call, options)
        return True

    def _position(self, call: CapturedCall) -> int:
        """Return the position of the first query; in cross-attention, its row.

        Rules of cross-attention read positions of keys alone.
        """
        return self.rows if self.cross and call is not self.first else 0 if self.cross else int(call.first)

    def _take(self, call: CapturedCall, options: Mapping[str, Any]) -> None:
        self.queries.append(self.store.copy(_some(call.query, self.heads)))
        self.lses.append(self.store.copy(_some(call.lse, self.heads)))
        if call.end > self.end:
            self.keys.append(self.store.copy(_some(call.key, self.kv_heads)[:, :, self.end - call.begin :]))
            self.end = call.end
        self.biases.append((options.get("bias"), call.begin))
        self.rows += call.n_q
        self.next = self.rows if self.cross else call.first + call.n_q

    def _same_keys(self, call: CapturedCall) -> bool:
        """Compare sampled keys of a call with those recorded, bit by bit."""
        begin, end = max(self.begin, call.begin), min(self.end, call.end)
        if self.cross and (call.begin, call.end) != (self.begin, self.end):
            return False
        starts = np.cumsum([self.begin, *(part.shape[2] for part in self.keys)])
        for position in (begin + sampled(end - begin)).tolist() if end > begin else ():
            part = int(np.searchsorted(starts, position, "right")) - 1
            recorded = self.keys[part][:, :, position - starts[part]]
            if recorded.tobytes() != call.key[:, list(self.kv_heads), position - call.begin].tobytes():
                return False
        return True

    def _see(self, call: CapturedCall) -> None:
        """Record the mask of a call: reuse the last rule if it agrees, else add one."""
        rule = call.rule()
        start, last = self.masks[-1]
        if self.cross and "i" in reads(rule.node, last.node):
            raise UnjoinableCalls("its masks look at the positions of queries in another sequence")
        keys = range(call.begin, call.end)
        if _equal(visible(rule, call, keys), visible(last, call, keys)):
            return
        before, all_keys = start + sampled(self._position(call) - start), range(self.begin, call.end)
        dense = call.mask is not None and bool(call.mask.dense)  # it has no earlier rows
        if not dense and _equal(visible(rule, call, all_keys, before), visible(last, call, all_keys, before)):
            self.masks[-1] = start, rule  # the same for the earlier rows: a table that has grown
            return
        self.masks.append((self._position(call), rule))
        if len(self.masks) > RULES_AT_MOST:
            raise UnjoinableCalls(f"more than {RULES_AT_MOST} different masks follow each other")

    def layer(self, name: str, sizes: Mapping[str, int], texts: tuple[str | None, str | None], number: int) -> Layer:
        """Make the layer of all calls.

        texts: the names of the sequences of queries and keys; sizes: their lengths.
        """
        options, n_k = dict(self.options), self.end - self.begin
        if self.masks:
            options = {x: options[x] for x in ("score", "sink", "scale") if x in options}
            options["offset"] = self._position(self.first)
            if [rule for _, rule in self.masks] != [EVERYONE]:
                options["mask"] = _one_after_another(self.masks)
            options |= {} if self.begin == 0 else {"origin": (0, 0, self.begin)}
            bias = self._bias()
            options |= {} if bias is None else {"bias": bias}
        if type(options.get("offset")) is int and options["offset"] == n_k - self.rows:
            del options["offset"]
        if options.get("origin") == (0, 0, 0):
            del options["origin"]
        whole = self.cross or (self.begin == 0 and n_k == self.rows)
        q, k = (x if sizes.get(x or "") == n and whole else None for x, n in zip(texts, (self.rows, n_k), strict=True))
        query, key = (parts[0] if len(parts) == 1 else self._whole(parts) for parts in (self.queries, self.keys))
        lse = self.lses[0] if len(self.lses) == 1 else np.concatenate(self.lses, axis=-1)
        return Layer(name, query, key, lse, options, self.cross, q, k, self.heads, self.kv_heads, self.group, number)

    def _whole(self, parts: list[Array]) -> Any:
        return Parts(parts) if self.store.folder is not None else np.concatenate(parts, axis=-2)

    def _bias(self) -> Array | None:
        """Join the biases of all calls, with 0 for keys of later calls."""
        given = [x for x, _ in self.biases if x is not None]
        if not given:
            return None
        last = given[-1]
        grown = all(x.shape[-2] == 1 and alike(x, last[..., : x.shape[-1]]) for x in given)
        if grown and len(given) == len(self.biases):
            return last
        lead = np.broadcast_shapes(*(x.shape[:-2] for x in given))

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
        found: Array = self.store.once(key, [x for x, _ in self.biases], make)
        return found


def _some(x: Array, heads: tuple[int, ...]) -> Array:
    """Select heads of (b, h, ...), as a view if all are selected."""
    return x if heads == tuple(range(x.shape[1])) else x[:, list(heads)]


def _equal(a: Array, b: Array) -> bool:
    return bool((a == b).all())


def _one_after_another(masks: Sequence[tuple[int, Mask]]) -> Mask:
    """Return a rule that applies each mask from its first row on."""
    _, found = masks[0]
    for start, rule in masks[1:]:
        before = mask(lambda b, h, i, j, start=start: i < start)
        found = before & found | ~before & rule
    return found
