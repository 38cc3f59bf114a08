"""The contract of the tangent kernel, in addition to forward's."""

from dataclasses import dataclass

from regard.engines.cpu.language.types import Type
from regard.engines.cpu.spec.forward import KernelSpec

FIELDS = ("q_dot_head", "q_dot_row", "q_dot_feature", "k_dot_row", "k_dot_feature", "v_dot_row", "v_dot_feature",
          "bias_dot_head", "bias_dot_row", "bias_dot_key", "out_feature", "out_dot_head", "out_dot_row",
          "sink_dot")  # fmt: skip
ADDRESSES = ("q_dot", "k_dot", "v_dot", "bias_dot", "out_dot", "lse_dot", "entropy_dot")


@dataclass(frozen=True)
class TangentSpec(KernelSpec):
    """The spec of a tangent kernel.

    varies: those of "q", "k", "v" and "sink" that have a tangent. bias_dot: the type of the bias's tangent.
    nonlinear: the rule's tangent is the second result of the `score` program. given: the output is read instead of
    computed.
    """

    varies: frozenset[str]
    bias_dot: Type | None
    nonlinear: bool
    given: bool

    @property
    def moves(self) -> bool:
        """True if scores have a tangent."""
        return bool(self.varies & {"q", "k"}) or self.bias_dot is not None or self.nonlinear

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, *FIELDS)

    @property
    def addresses(self) -> tuple[str, ...]:
        return (*super().addresses, *ADDRESSES)

    @property
    def queries(self) -> tuple[str, ...]:
        return self._with_tangent(super().queries)

    @property
    def keys(self) -> tuple[str, ...]:
        return self._with_tangent(super().keys)

    @property
    def values(self) -> tuple[str, ...]:
        return self._with_tangent(super().values)

    def _with_tangent(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*names, *(f"{name}_dot" for name in names if name in self.varies))

    @property
    def weights(self) -> tuple[str, ...]:
        return (*super().weights, *(["S_dot"] if self.moves else []))

    @property
    def fetched(self) -> tuple[str, ...]:
        return (*super().fetched, *(["bias_dot"] if self.bias_dot else []))

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """In addition the same sums of w Ṡ."""
        return (*super().sums, *([("l_dot", "e_dot")] if self.moves else []))

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*(() if self.given else super().outputs), "O_dot")

    @property
    def key(self) -> str:
        varies = sorted(self.varies), self.bias_dot, self.nonlinear, self.given
        return repr(("tangent", super().key, varies))
