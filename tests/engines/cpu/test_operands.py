"""A kernel addresses no operand but those that its spec takes, and a call that lacks one of them raises."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import regard
from regard.core.problem import Differential, Outputs, Problem
from regard.engines import cpu
from regard.engines.cpu.schedule import backward_arrays, backward_work, second_work, weights_work, work
from regard.engines.cpu.schedule.arguments import Arrays, arrays_of
from regard.engines.cpu.spec.specs import BackwardSpec, KernelSpec, TangentSpec
from regard.engines.cpu.target.instructions import chosen
from regard.ops.normalization import problem_from

X = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
ROWS = X[..., 0].copy()
OPTIONS: dict[str, Any] = {"bias": np.ones((9, 9), np.float32), "sink": np.ones(2, np.float32), "mask": np.tri(9) > 0}
OUTPUTS, TANGENTS = Outputs(X, ROWS, ROWS), Differential(X, X, X, OPTIONS["bias"], OPTIONS["sink"])

CALLS: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "forward": (
        work,
        lambda: regard.attention(X, X, X, observe=["entropy", regard.top(3)], engine="cpu", **OPTIONS),
        "q k v out lse entropy values indices bias sink dense0",
    ),
    "jvp": (
        work,
        lambda: cpu.jvp(problem_from(X, X, X, **OPTIONS), TANGENTS),
        "q k v out lse entropy bias sink dense0 out_dot lse_dot entropy_dot q_dot k_dot v_dot bias_dot sink_dot",
    ),
    "backward": (
        backward_work,
        lambda: cpu.backward(problem_from(X, X, X, **OPTIONS), OUTPUTS, OUTPUTS),
        "q k v out lse dout d_entropy c dq dk dv dbias bias dense0",
    ),
    "second": (
        second_work,
        lambda: regard.attention(X, X, X, observe=["received"], engine="cpu", **OPTIONS),
        "q k v lse bias dense0",
    ),
    "weights": (
        weights_work,
        lambda: weights_work.weights(problem_from(X, X, X, **OPTIONS), chosen(), ROWS, range(9), range(9)),
        "q k v lse bias sink dense0 weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "name"), [(call, name) for call, x in CALLS.items() for name in x[2].split()])
def test_a_call_that_lacks_an_array_raises(call: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, run, _ = CALLS[call]

    def without(p: Problem, own: Arrays) -> Arrays:
        return {**arrays_of(p, own), name: None}

    monkeypatch.setattr(module, "arrays_of", without)
    with pytest.raises(ValueError, match=rf"^{name} must be an array with the axes .*, got none$"):
        run()


def test_a_spec_that_wants_the_array_of_a_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = backward_arrays.prefill_spec
    monkeypatch.setattr(backward_arrays, "prefill_spec", lambda *given: replace(plain(*given), sink=True))
    with pytest.raises(ValueError, match=r"^c must be an array with the axes head, row, got none$"):
        regard.attention_vjp(X, X, X, X, engine="cpu")


ADDRESSED: list[tuple[type[KernelSpec], str, Callable[[], Any]]] = [
    *((KernelSpec, name, CALLS["forward"][1]) for name in ("out", "lse", "entropy", "values", "indices", "sink")),
    *((TangentSpec, name, CALLS["jvp"][1]) for name in ("lse", "out_dot", "lse_dot", "entropy_dot", "sink_dot")),
    *((BackwardSpec, name, CALLS["backward"][1]) for name in ("lse", "given", "d_entropy", "dq", "dk", "dv", "dbias")),
]


@pytest.mark.parametrize(("kind", "name", "run"), ADDRESSED, ids=[f"{x.__name__}-{name}" for x, name, _ in ADDRESSED])
def test_a_kernel_that_addresses_what_its_spec_does_not_take(
    kind: type[KernelSpec], name: str, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises while it is written."""
    takes = kind.takes
    monkeypatch.setattr(kind, "takes", lambda self, x: x.name != name and takes(self, x))
    monkeypatch.setattr(cpu.schedule.work.cache, "kernel", lambda key, name, target, source: source())
    with pytest.raises(ValueError, match=f"^a kernel cannot address '{name}', which its spec does not take$"):
        run()
