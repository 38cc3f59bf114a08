"""Scores of pairs of queries and keys, for pages that show every step.

T[i,j] = score(scale · q[i] · k[j]) + bias[i,j]        S[i,j] = T[i,j], or −∞ where the mask hides the pair
"""

import math

from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.rules import Lowering, TileContext
from regard.engines.cpu.language.types import I8, Type
from regard.engines.cpu.language.values import Value
from regard.engines.cpu.language.writing import written
from regard.engines.cpu.spec.specs import KernelSpec
from regard.engines.cpu.target.instructions import Target

FIELDS = ("q", "k", "d", "scale", "b", "h", "i", "j", "rows", "cols", "keys", "unmasked", "masked")


class PairScoresKernel:
    """A kernel that fills `unmasked` and `masked` (rows, cols) with T and S.

    q, k, and dense arrays begin with the first query and key, whose positions are i and j. q and k have no gaps
    between their rows.
    """

    def __init__(self, k: Kernel, spec: KernelSpec):
        self.k, self.spec = k, spec
        self.mask, self.score = (
            Lowering(k, x, spec.real, spec.integer) if x else None for x in (spec.mask, spec.score)
        )

    def run(self) -> None:
        k, real, integer = self.k, self.spec.real, self.spec.integer
        q, keys, unmasked, masked = (k.pointer(name, real) for name in ("q", "k", "unmasked", "masked"))
        d, scale = k.integer("d"), k.real("scale", real)
        fixed = {name: k.integer(name) for name in ("b", "h", "keys")}
        with k.loop(k.integer("rows")) as row, k.loop(k.integer("cols")) as col:
            s = k.variable(k.constant(real, 0.0))
            with k.loop(d) as a:
                s.value = k.fma(q[row * d + a] * scale, keys[col * d + a], s.value)
            i, j = ((k.integer(name) + x).to(integer) for name, x in (("i", row), ("j", col)))

            def dense(name: str, type: Type) -> Value:
                at = row * k.integer(f"{name}_row") + col * k.integer(f"{name}_key")
                return k.pointer(name, type).bytes(at)[0]

            context = TileContext(fixed | {"i": i, "j": j, "s": s.value}, lambda n: dense(f"dense{n}", I8) != 0)
            score = self.score.at(context)[0] if self.score else s.value
            if self.spec.bias:
                score = score + dense("bias", self.spec.bias)
            at = row * k.integer("cols") + col
            unmasked[at] = masked[at] = score
            if self.mask:
                masked[at] = k.where(self.mask.at(context)[0], score, k.constant(real, -math.inf))


def fields_of(spec: KernelSpec) -> tuple[str, ...]:
    """Return the kernel's fields."""
    dense = [*(f"dense{n}" for n in range(spec.dense)), *(["bias"] if spec.bias else [])]
    rules = [field for x in (spec.mask, spec.score) if x for field in x.fields]
    return (*FIELDS, *(f"{name}{part}" for name in dense for part in ("", "_row", "_key")), *rules)


def source(spec: KernelSpec, target: Target, name: str) -> str:
    """Return the kernel's IR."""
    return written(name, fields_of(spec), target, lambda k: PairScoresKernel(k, spec).run())
