"""A part of a call that an engine, or an adapter, does not know is refused by name, and never ignored."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import jax
import regard
import regard.jax
import regard.torch
from regard.core import problem
from regard.core.problem import FUNCTIONS, KNOWS, Outputs, Problem
from regard.core.problem import Differential as D
from regard.engines import choose, engines
from regard.ops.normalization import problem_from

X = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
O = Outputs(X, X[..., 0].copy(), None)
NONE = Outputs(None, None, None)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "forward": (),
    "weights": (O.lse, range(5), range(5)),
    "maps": (O.lse, 2, 2),
    "backward": (O, O),
    "jvp": (D(query=X),),
    "backward_jvp": (O, O, D(query=X), O, NONE),
    "jvp_jvp": (O, D(query=X), D(query=X), O, O),
}


@pytest.fixture
def novel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every problem an optional field that no engine knows."""
    monkeypatch.setitem(problem.OPTIONAL, "novel", None)
    monkeypatch.setattr(Problem, "novel", 1, raising=False)


@pytest.mark.usefixtures("novel")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", engines())
def test_every_function_of_every_engine_refuses_it(name: str, function: str) -> None:
    p = problem_from(X, X, X)
    with pytest.raises(ValueError, match=f"engine '{name}' refuses this call: its {function} does not know 'novel'"):
        getattr(engines()[name], function)(p, *ARGUMENTS[function])
    with pytest.raises(
        ValueError, match=f"no engine supports this call: cpu: its {function} does not know 'novel'; ti"
    ):
        choose(p, None, function)


def of_tensors(**options: Any) -> Any:
    x = torch.tensor(X, requires_grad=True)
    return regard.attention(x, x, x, **options)


def in_a_graph() -> Any:
    x = torch.tensor(X)
    return torch.compile(lambda x: regard.attention(x, x, x), backend="eager")(x)


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: regard.attention(X, X, X),
    "weights": lambda: regard.weights(X, X),
    "plan": lambda: regard.plan(X, X, X),
    "attention_vjp": lambda: regard.attention_vjp(X, X, X, X),
    "attention_jvp": lambda: regard.attention_jvp(X, X, X, X),
    "attention_vjp_jvp": lambda: regard.attention_vjp_jvp(X, X, X, X, D(query=X)),
    "torch": of_tensors,
    "torch, weights": lambda: of_tensors(return_weights=True),
    "torch, compiled": in_a_graph,
    "torch, drop-in": lambda: regard.torch.scaled_dot_product_attention(*[torch.tensor(X)] * 3),
    "jax": lambda: regard.attention(*[jax.numpy.asarray(X)] * 3),
    "jax, xla": lambda: regard.attention(*[jax.numpy.asarray(X)] * 3, engine="xla"),
    "jax, drop-in": lambda: regard.jax.dot_product_attention(*[jax.numpy.asarray(X)] * 3),
}


@pytest.mark.usefixtures("novel")
@pytest.mark.parametrize("call", CALLS)
def test_every_call_refuses_it(call: str) -> None:
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match="does not know 'novel'"):
        CALLS[call]()


@pytest.mark.usefixtures("novel")
def test_a_call_goes_to_the_engine_that_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = engines()["tiled"]
    monkeypatch.setattr(tiled.engine, "KNOWS", KNOWS | {"forward": KNOWS["forward"] | {"novel"}})
    p = problem_from(X, X, X)
    monkeypatch.setattr("regard.engines._warned", set())  # another test may have had this warning
    with pytest.warns(
        regard.RegardWarning, match="the engine 'cpu' refuses this call: its forward does not know 'novel'"
    ):
        assert choose(p, None) is tiled
    with pytest.raises(ValueError, match="its backward does not know 'novel'"):
        choose(p, None, "backward")
    plan = regard.plan(X, X, X)
    assert plan.engine == "tiled"
    assert plan.engines["cpu"] == "its forward does not know 'novel'"
    states = {x.name: x for x in regard.available_engines()}
    assert states["cpu"].lacks == dict.fromkeys(FUNCTIONS, ("novel",))
    assert states["tiled"].lacks == {name: ("novel",) for name in FUNCTIONS if name != "forward"}
    assert "ready; forward does not know novel; weights does not know novel" in repr(states["cpu"])
