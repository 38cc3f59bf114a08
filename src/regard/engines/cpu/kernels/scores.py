"""Scores and weights of a tile of prefill, vertically.

S ← score(S) + bias, −∞ where the mask hides the pair        P = exp(S − m)
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

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
        sources, found = [], {}
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
                found[name] = transposed
            yield first, k.minimum(first + W, stop), found

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

    Sums are first over keys that are W apart, then over those: as in decode, where these share a lane.
    """

    def __init__(self, lanes: Lanes, softmax: RunningSoftmax, terms: ForwardTerms):
        self.k, self.spec, self.W, self.B = lanes.k, lanes.spec, lanes.W, lanes.B
        self.lanes, self.softmax, self.terms, self.dropout = lanes, softmax, terms, Dropout(lanes)
        self.sums = [name for both in self.spec.sums for name in both[: 1 + self.spec.entropy]]

    def __call__(self, tile: KeyTile) -> None:
        """Compute the weights of a tile and their sums."""
        k, columns, low = self.k, self.lanes.vectors(), tile.first - tile.first % 2
        shifts = [self.lanes.load(tile.scratch.shift, c) for c in columns]
        totals = [[k.variable(self.lanes.zero()) for _ in columns] for _ in self.sums]
        parts = [[[k.variable(self.lanes.zero()) for _ in columns] for _ in range(2)] for _ in totals]
        with k.loop(self.W, step=2) as r:
            for part in parts:
                for n in range(2):
                    for x in part[n]:
                        x.value = self.lanes.zero()
            with k.loop(tile.stop, start=low + ((r - low) & (self.W - 1)), step=self.W) as p:
                for number, c in enumerate(columns):
                    for n, terms in enumerate(self._pair(tile, p, c, shifts[number])):
                        for part, term in zip(parts, terms, strict=True):
                            part[n][number].value += term
            for total, part in zip(totals, parts, strict=True):
                for n in range(2):
                    for x, y in zip(total, part[n], strict=True):
                        x.value += y.value
        for name, total in zip(self.sums, totals, strict=True):
            for c, x in zip(columns, total, strict=True):
                tile.scratch[name][c] = x.value

    def _pair(self, tile: KeyTile, p: Value, c: Value | int, shift: Value) -> list[list[Value]]:
        """Compute weights of keys p, p + 1 in the lanes from c on; return terms of sums."""
        k, spec = self.k, self.spec
        summed, pair = [], []
        for n in range(2):
            at = (p + n) * self.B + c
            weights, difference = self.terms.weights(tile, at, shift)
            terms = []
            for w in weights:
                terms += [w, self.softmax.entropy_term(w, difference)] if spec.entropy else [w]
            summed.append(terms)
            if spec.dropout:
                keys, j = self.dropout.keys(tile.block, c), tile.start + k.integer("j") + p + n
                weights = [self.dropout.applied(w, keys, j) for w in weights]
            pair.append(weights)
            if not spec.paired:
                for name, w in zip(spec.weights, weights, strict=True):
                    tile.scratch[name][at] = w
        if spec.paired:
            for name, low, high in zip(spec.weights, *pair, strict=True):
                tile.scratch[name].of(I32)[p * self.B + c] = k.pack_bf16(low, high)
        return summed

    # Partial sums in memory

    def into_partials(self, tile: KeyTile, p: Value, c: Value | int) -> None:
        """Compute the weights of two keys, and add to partial sums."""
        for n, terms in enumerate(self._pair(tile, p, c, self.lanes.load(tile.scratch.shift, c))):
            at = ((p + n) & (self.W - 1)) * self.B + c
            for part, term in zip(self._partials(tile), terms, strict=True):
                part[at] = self.lanes.load(part, at) + term

    def _partials(self, tile: KeyTile) -> list[Pointer]:
        return [tile.scratch[f"{name}_partial"] for name in self.sums]

    def empty_partials(self, tile: KeyTile) -> None:
        for part in self._partials(tile):
            self.lanes.fill(part, 0.0, self.W)

    def add_partials(self, tile: KeyTile) -> None:
        """Store the sums of a tile."""
        for name, part in zip(self.sums, self._partials(tile), strict=True):
            with self.k.loop(self.B, step=self.W) as c:
                total = self.lanes.zero()
                for r in range(self.W):
                    total = total + self.lanes.load(part, c + r * self.B)
                tile.scratch[name][c] = total
