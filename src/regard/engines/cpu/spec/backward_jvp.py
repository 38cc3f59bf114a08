"""The contract of the tangent-of-backward kernel, in addition to backward's."""

from dataclasses import dataclass

from regard.engines.cpu.language.types import Type
from regard.engines.cpu.spec.backward import BackwardSpec

FIELDS = (
    "q_dot_head", "q_dot_row", "q_dot_feature", "k_dot_row", "k_dot_feature", "v_dot_row", "v_dot_feature",
    "dout_dot_head", "dout_dot_row", "dout_dot_feature", "out_dot_head", "out_dot_row", "out_dot_feature",
    "bias_dot_head", "bias_dot_row", "bias_dot_key",
)  # fmt: skip
VARYING = ("q_dot", "k_dot", "v_dot", "dout_dot", "bias_dot")
ADDRESSES = (*VARYING, "out_dot", "lse_dot", "given_dot", "d_entropy_dot", "c_dot")


@dataclass(frozen=True)
class BackwardTangentSpec(BackwardSpec):
    """The spec of a tangent-of-backward kernel.

    Which inputs vary is known at run time.

    The second result of the `score` program is the rule's tangent. The tangents of the derivatives in the score and in
    table entries follow those derivatives. bias_dot: the type of the bias's tangent.
    """

    bias_dot: Type | None

    @property
    def fields(self) -> tuple[str, ...]:
        return (*super().fields, *FIELDS)

    @property
    def addresses(self) -> tuple[str, ...]:
        return (*super().addresses, *ADDRESSES)

    @property
    def queries(self) -> tuple[str, ...]:
        return _with_tangents(super().queries)

    @property
    def keys(self) -> tuple[str, ...]:
        return _with_tangents(super().keys)

    @property
    def values(self) -> tuple[str, ...]:
        return _with_tangents(super().values)

    @property
    def outputs(self) -> tuple[str, ...]:
        return _with_tangents(super().outputs)

    @property
    def weights(self) -> tuple[str, ...]:
        """In addition S˙, which becomes (P · D)˙, and dP˙, which becomes dT˙."""
        return _with_tangents(super().weights)

    @property
    def score_gradients(self) -> tuple[str, ...]:
        return _with_tangents(super().score_gradients)

    @property
    def cotangents(self) -> tuple[str, ...]:
        return _with_tangents(super().cotangents)

    @property
    def numbers(self) -> tuple[str, ...]:
        return (*super().numbers, "lse_dot", "d_entropy_dot")

    @property
    def rests(self) -> tuple[str, ...]:
        return _with_tangents(super().rests)

    @property
    def fetched(self) -> tuple[str, ...]:
        return (*super().fetched, *(["bias_dot"] if self.bias_dot else []))

    @property
    def varying(self) -> tuple[str, ...]:
        return VARYING

    @property
    def before(self) -> int:
        return 2 + 2 * self.nonlinear

    @property
    def derivatives(self) -> int:
        return 2

    @property
    def key(self) -> str:
        return repr(("tangent", super().key, self.bias_dot))


def _with_tangents(names: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(f"{name}_dot" for name in names))
