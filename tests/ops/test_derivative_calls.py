"""The ways in which callers give outputs and tangents to the derivatives of NumPy arrays."""

from typing import Any

import numpy as np
import pytest

import regard
from regard.engines import cpu

Q, K, V, DOUT, DQ = np.random.default_rng(0).standard_normal((5, 2, 6, 4))
OPTIONS: dict[str, Any] = {"causal": True, "sink": np.array([0.3, -0.2])}


def arrays(x: Any) -> list[bytes]:
    """The bits of a result, whatever it is made of."""
    if isinstance(x, regard.Differential):
        x = (x.query, x.key, x.value, x.bias, x.sink)
    if isinstance(x, tuple):
        return [y for part in x for y in arrays(part)]
    return [] if x is None else [np.asarray(x).tobytes()]


def test_outputs_are_taken_as_attention_returns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = regard.attention(Q, K, V, observe=["lse"], **OPTIONS)
    known = regard.Outputs(found[0], found[1].lse, None)
    weighed = regard.attention(Q, K, V, observe=["lse"], return_weights=True, **OPTIONS)
    derivatives = (
        lambda outputs: regard.attention_vjp(Q, K, V, DOUT, outputs=outputs, **OPTIONS),
        lambda outputs: regard.attention_jvp(Q, K, V, DQ, outputs=outputs, **OPTIONS),
        lambda outputs: regard.attention_vjp_jvp(Q, K, V, DOUT, dquery=DQ, outputs=outputs, **OPTIONS),
    )
    expected = [arrays(derivative(known)) for derivative in derivatives]

    def again(*args: Any) -> Any:
        raise AssertionError("forward ran again")

    monkeypatch.setattr(cpu, "forward", again)
    for derivative, bits in zip(derivatives, expected, strict=True):
        assert arrays(derivative(found)) == arrays(derivative(weighed)) == bits
    with pytest.raises(AssertionError, match="forward ran again"):
        derivatives[0](None)


def test_outputs_without_what_is_needed_are_refused() -> None:
    found = regard.attention(Q, K, V, observe=["entropy"])
    with pytest.raises(ValueError, match=r"outputs\.lse is None, but a derivative needs it"):
        regard.attention_vjp(Q, K, V, DOUT, outputs=found)
    known = regard.attention(Q, K, V, observe=["lse"])
    with pytest.raises(ValueError, match=r"outputs\.entropy is None, but dentropy needs it"):
        regard.attention_vjp(Q, K, V, DOUT, dentropy=np.ones((2, 6)), outputs=known)


@pytest.mark.engine("tiled")
def test_tangents_are_given_together_or_one_by_one() -> None:
    slopes = regard.table(np.array([0.5, 0.25]))
    options = {**OPTIONS, "score": regard.alibi(slopes), "bias": np.zeros((2, 1, 6))}
    single = {"dquery": DQ, "dvalue": V, "dbias": np.ones((2, 1, 6)), "dsink": np.ones(2)}
    moving = {**single, "dtables": {slopes: np.ones(2)}}
    tangents = regard.Differential(**{name[1:]: x for name, x in moving.items()})  # type: ignore[arg-type]
    one = regard.attention_jvp(Q, K, V, **options, **moving)  # type: ignore[arg-type]
    assert arrays(one) == arrays(regard.attention_jvp(Q, K, V, **options, tangents=tangents))
    both = regard.attention_vjp_jvp(Q, K, V, DOUT, **options, **moving)  # type: ignore[arg-type]
    assert arrays(both) == arrays(regard.attention_vjp_jvp(Q, K, V, DOUT, tangents, **options))
    assert arrays(both) != arrays(regard.attention_vjp_jvp(Q, K, V, DOUT, **options))
