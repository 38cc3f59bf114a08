"""Scores and weights of a tile of prefill, vertically.

S ← score(S) + bias, −∞ where the mask hides the pair        P = exp(S − m)
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, product

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.products import ForwardTerms
from regard.engines.cpu.kernels.rules import Dropout, Rules
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.kernels.transposes import Transposes
from regard.engines.cpu.language.rules import TileContext
from regard.engines.cpu.language.types import I32
from regard.engines.cpu.language.values import Pointer, Value, Variable


class Scores:
    """Rules, biases and masks."""

    def __init__(
        self, lanes: Lanes, rules: Rules, softmax: RunningSoftmax, terms: ForwardTerms, transposes: Transposes
    ):
        self.k, self.spec, self.W, self.B = lanes.k, lanes.spec, lanes.W, lanes.B
        self.lanes, self.rules, self.softmax, self.terms, self.transposes = lanes, rules, softmax, terms, transposes
        # True if a bias is all that changes scores, and P is the only tile of weights.
        self.biased = bool(self.spec.bias) and self.spec.score is None and self.spec.weights == ("P",)

    def __call__(self, tile: KeyTile) -> None:
        """Change the scores of a tile, and the maximum with them."""
        k, spec = self.k, self.spec
        for name in spec.masks:
            self.transposes.fetch(name, tile.scratch[name], tile, *tile.mixed)
        if spec.mask:
            self._change(tile, *tile.mixed, True)
        work = self._add_bias if self.biased else partial(self._change, masked=False)
        if spec.ruled and spec.mask:
            with k.loop(2) as part:
                before = part == 0
                start = k.where(before, tile.first, tile.mixed[1])
                work(tile, start, k.where(before, tile.mixed[0], tile.stop))
        elif spec.ruled:
            work(tile, tile.first, tile.stop)

    def _change(self, tile: KeyTile, start: Value, stop: Value, masked: bool) -> None:
        k, load, scratch, block = self.k, self.lanes.load, tile.scratch, tile.block
        with k.loop(self.B, step=self.W) as c:
            rows = self.rules.rows(block, c, self.W)
            top = k.variable(load(scratch.top, c))
            with self._biased_keys(tile, start, stop, c) as (*ends, biases), k.loop(ends[1], start=ends[0]) as p:
                at = p * self.B + c
                s = self.softmax.natural(k.frozen(load(scratch.P, at)))
                context = TileContext(
                    {**rows.leaves, "j": tile.start + k.integer("j") + p, "s": s},
                    lambda n, at=at: load(scratch[f"dense{n}"], at) != 0.0,  # type: ignore[misc]
                )
                s = self.terms.score(tile, context, rows, at, biases)
                visible = self.rules.visible(context, rows) if masked else None
                if visible is not None:
                    s = k.where(visible, s, k.constant(self.lanes.real, -math.inf))
                scratch.P[at] = s
                top.value = k.maximum(s, top.value)
            scratch.top[c] = top.value

    @contextmanager
    def _biased_keys(
        self, tile: KeyTile, start: Value, stop: Value, c: Value
    ) -> Iterator[tuple[Value, Value, Mapping[str, Pointer]]]:
        """Loop over ranges of keys, with the biases of a vector of lanes; yield both.

        Ranges are of W keys where there are biases: those are a row of lanes for each key.
        """
        if not self.spec.biases:
            yield start, stop, {}
            return
        k, W, block, scratch = self.k, self.W, tile.block, tile.scratch
        sources, biases = [], {}
        for name in self.spec.biases:
            base, strides = block.dense_at(name, tile.start)
            sources.append((name, base, strides, self.transposes.rows(block, base, strides, c)))
        with k.loop(stop, start=start, step=W) as first:
            for name, base, strides, rows in sources:
                transposed = scratch[name] + first * -self.B
                with k.choice((strides[2] == base.type.size) & (first + W <= stop)) as (whole, single):
                    with whole:
                        self.transposes.store(rows, first, scratch[name] + c, 1.0)
                    with single:
                        last = k.minimum(first + W, stop)
                        self.transposes.singly(block, base, strides, c, first, last, transposed, 1.0)
                biases[name] = transposed
            yield first, k.minimum(first + W, stop), biases

    def _add_bias(self, tile: KeyTile, start: Value, stop: Value) -> None:
        """Do the work of `_change` where a bias is all that changes scores.

        The bias is transposed in registers, a square of keys and lanes at a time.
        """
        k, W, load, scratch, block = self.k, self.W, self.lanes.load, tile.scratch, tile.block
        type = self.spec.type_of("bias")
        base, strides = block.dense_at("bias", tile.start)
        with k.loop(self.B, step=W) as c:
            rows = self.transposes.rows(block, base, strides, c)
            tops = [k.variable(load(scratch.top, c)) for _ in range(2)]  # two chains, to hide latency

            def add(p: Value, bias: Value, top: Variable) -> None:
                at = p * self.B + c
                s = self.softmax.natural(load(scratch.P, at)) + bias
                scratch.P[at] = s
                top.value = k.maximum(s, top.value)

            with (
                k.loop(stop, start=start, step=W) as first,
                k.choice((strides[2] == type.size) & (first + W <= stop)) as (whole, single),
            ):
                with whole:
                    for n, bias in enumerate(self.transposes.square(rows, first, 1.0)):
                        add(first + n, bias, tops[n % 2])
                with single:
                    last = k.minimum(first + W, stop)
                    self.transposes.singly(block, base, strides, c, first, last, scratch.bias, 1.0)
                    with k.loop(last, start=first) as p:
                        add(p, load(scratch.bias, p * self.B + c), tops[0])
            scratch.top[c] = k.maximum(*(top.value for top in tops))


class Weights:
    """The weights of pairs of keys.

    Sums are first over keys that are W apart, then over those: as in decode, where these share a lane. Packed pairs are
    summed as pairs.
    """

    def __init__(self, lanes: Lanes, softmax: RunningSoftmax, terms: ForwardTerms):
        self.k, self.spec, self.W, self.B = lanes.k, lanes.spec, lanes.W, lanes.B
        self.lanes, self.softmax, self.terms, self.dropout = lanes, softmax, terms, Dropout(lanes)
        self.sums = [name for both in self.spec.sums for name in both[: 1 + self.spec.entropy]]
        # Chains of sums, by name and place: one for each of two keys, or one for their pair.
        self.chains = [*product(self.sums, range(2)), *product(self.spec.rounded_sums, range(1))]

    def __call__(self, tile: KeyTile) -> None:
        """Compute the weights of a tile and their sums."""
        k, columns, low = self.k, self.lanes.vectors(), tile.first - tile.first % 2
        shifts = [self.lanes.load(tile.scratch.shift, c) for c in columns]
        totals = {name: [k.variable(self.lanes.zero()) for _ in columns] for name in dict(self.chains)}
        parts = {place: [k.variable(self.lanes.zero()) for _ in columns] for place in self.chains}
        with k.loop(self.W, step=2) as r:
            for x in chain.from_iterable(parts.values()):
                x.value = self.lanes.zero()
            with k.loop(tile.stop, start=low + ((r - low) & (self.W - 1)), step=self.W) as p:
                for number, c in enumerate(columns):
                    for place, term in self._pair(tile, p, c, shifts[number]).items():
                        part = parts[place][number]
                        part.value = self._added(place[0], part.value, term)
            for (name, _), some in parts.items():
                for x, y in zip(totals[name], some, strict=True):
                    x.value += y.value
        for name, total in totals.items():
            for c, x in zip(columns, total, strict=True):
                tile.scratch[name][c] = x.value

    def _added(self, name: str, total: Value, term: Value) -> Value:
        """Return a sum with another term of `_pair`."""
        return self.lanes.add_packed(total, term) if name in self.spec.rounded_sums else total + term

    def _pair(self, tile: KeyTile, p: Value, c: Value | int, shift: Value) -> dict[tuple[str, int], Value]:
        """Compute weights of keys p, p + 1 in the lanes from c on; return terms of `chains`."""
        k, spec = self.k, self.spec
        terms, pair = {}, []
        for n in range(2):
            at = (p + n) * self.B + c
            weights, difference = self.terms.weights(tile, at, shift)
            for w, (name_l, name_e) in zip(weights, spec.sums, strict=True):
                terms[name_l, n] = w
                if spec.entropy:
                    terms[name_e, n] = self.softmax.entropy_term(w, difference)
            pair.append(weights)
            if not spec.paired:
                if spec.dropout:
                    keys, j = self.dropout.keys(tile.block, c), tile.start + k.integer("j") + p + n
                    weights = [self.dropout.applied(w, keys, j) for w in weights]
                for name, w in zip(spec.weights, weights, strict=True):
                    tile.scratch[name][at] = w
        return terms | self._store_packed(tile, p, c, pair) if spec.paired else terms

    def _store_packed(
        self, tile: KeyTile, p: Value, c: Value | int, pair: list[list[Value]]
    ) -> dict[tuple[str, int], Value]:
        """Store the weights of two keys in packed pairs; return these as before dropout."""
        k, spec, flags = self.k, self.spec, []
        if spec.dropout:
            keys, j = self.dropout.keys(tile.block, c), tile.start + k.integer("j") + p
            flags = [self.dropout.remaining(keys, j + n) for n in range(2)]
        terms = {}
        for name, total, low, high in zip(spec.weights, spec.rounded_sums, *pair, strict=True):
            terms[total, 0] = packed = k.pack_bf16(low, high)
            tile.scratch[name].of(I32)[p * self.B + c] = k.mask_bf16(packed, flags) if flags else packed
        return terms

    # Partial sums in memory

    def into_partials(self, tile: KeyTile, p: Value, c: Value | int) -> None:
        """Compute the weights of two keys, and add to partial sums."""
        terms = self._pair(tile, p, c, self.lanes.load(tile.scratch.shift, c))
        for n in range(2):
            at = ((p + n) & (self.W - 1)) * self.B + c
            for name in self.sums:
                self._add_partial(tile, name, at, terms[name, n])
        for name in self.spec.rounded_sums:
            self._add_partial(tile, name, ((p >> 1) & (self.W // 2 - 1)) * self.B + c, terms[name, 0])

    def _add_partial(self, tile: KeyTile, name: str, at: Value, term: Value) -> None:
        part = tile.scratch[f"{name}_partial"]
        part[at] = self._added(name, self.lanes.load(part, at), term)

    def _partials(self, name: str) -> int:
        """Return the number of partial sums."""
        return self.W // 2 if name in self.spec.rounded_sums else self.W

    def empty_partials(self, tile: KeyTile) -> None:
        for name in dict(self.chains):
            self.lanes.fill(tile.scratch[f"{name}_partial"], 0.0, self._partials(name))

    def add_partials(self, tile: KeyTile) -> None:
        """Store the sums of a tile."""
        for name in dict(self.chains):
            part = tile.scratch[f"{name}_partial"]
            with self.k.loop(self.B, step=self.W) as c:
                total = self.lanes.zero()
                for r in range(self._partials(name)):
                    total = total + self.lanes.load(part, c + r * self.B)
                tile.scratch[name][c] = total
