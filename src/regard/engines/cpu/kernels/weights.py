"""Weights of a tile of prefill, P = exp(S − m), and their sums over keys."""

from regard.engines.cpu.kernels.lanes import Lanes
from regard.engines.cpu.kernels.rules import Dropout
from regard.engines.cpu.kernels.softmax import RunningSoftmax
from regard.engines.cpu.kernels.terms import ForwardTerms
from regard.engines.cpu.kernels.tiles import KeyTile
from regard.engines.cpu.language.types import I32
from regard.engines.cpu.language.values import Pointer, Value


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
        """Compute the weights of keys p and p + 1 in the lanes from c on.

        Return the terms of sums.
        """
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
