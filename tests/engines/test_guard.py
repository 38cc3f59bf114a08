"""A field that a function of an engine does not know is seen by no code of it, whoever calls it.

Each problem gets a field of some role and kind that some functions of one engine know. Then every public call runs, and
each function of an engine that is entered with such a problem must be below a guarded call of a function that knows it.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import jax
import regard
import regard.jax
import regard.torch
from regard.core import problem
from regard.core.parts import part_of, scores_alone
from regard.core.problem import FUNCTIONS, Outputs, Problem
from regard.core.problem import Differential as D
from regard.engines import Guarded, choose, engines
from regard.engines.cpu.schedule.work import identified, signature
from regard.jax import ffi
from regard.jax import parts as jax_parts
from regard.jax.task import PrimitiveTask, StaticCall
from regard.jax.xla import scan
from regard.ops import callcache
from regard.ops.normalization import problem_from
from regard.parallel import together
from regard.parallel.dealing import Deal
from regard.parallel.gradients import RankGradients
from regard.parallel.pipeline import pipeline_of
from regard.parallel.programs import Rank
from regard.parallel.sight import sight_of
from regard.runtime.threads import num_threads
from regard.torch.call import fused
from regard.torch.call.record import DEFAULTS, TensorCall
from regard.torch.composed import rows

Array = np.ndarray[Any, np.dtype[Any]]

VALUES: dict[str, Any] = {"value": 0.7, "heads": np.ones(1, np.float32), "pairs": np.ones((1, 1), np.float32)}
DECLARED = [
    ("scores", "value"), ("scores", "pairs"), ("denominators", "value"), ("denominators", "heads"),
    ("weights", "value"),
]  # fmt: skip


def declare(patch: pytest.MonkeyPatch, role: str, kind: str) -> None:
    """Give every problem an optional field "novel" with a value."""
    known, before = Problem.__dataclass_fields__, Problem.__init__
    novel = copy.copy(known["sink"])
    novel.name, novel.metadata = "novel", MappingProxyType({"role": role, "kind": kind})

    def begin(p: Problem, *given: Any, novel: Any = VALUES[kind], **named: Any) -> None:
        before(p, *given, **named)
        p.__dict__["novel"] = novel

    patch.setattr(Problem, "__init__", begin)
    patch.setitem(known, "novel", novel)
    for table, x in ((problem.ROLE, role), (problem.KIND, kind), (problem.OPTIONAL, None)):
        patch.setitem(table, "novel", x)
    forget_fields()


def forget_fields() -> None:
    for function in (identified, problem.of_role, problem.of_kind):
        function.cache_clear()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Cached calls and tables of fields do not know other tests' fields, nor these ours."""
    callcache.entries().clear()
    yield
    callcache.entries().clear()
    forget_fields()


# Calls

X = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
LONG = np.random.default_rng(0).standard_normal((2, 800, 8)).astype(np.float32)
STATISTICS: list[Any] = [
    "lse", "entropy", "visible", "received", "profile", "max", "argmax", "group_received", "normalized_entropy",
    "effective_states", regard.top(3), regard.top(40), regard.mass(regard.window(2)), regard.renyi(2.0),
    regard.pooled(2, 2), regard.pooled(2, 2, "max"), regard.weights_of([0, 3]),
]  # fmt: skip


def on_numpy(engine: str | None) -> dict[str, Callable[[], Any]]:
    e = engine
    outside = problem_from(X, X, X).outside
    lse = np.log(np.exp(X @ X.swapaxes(-1, -2) / 2).sum(-1) + (0 if outside is None else np.exp(outside)[:, None]))
    return {
        "attention": lambda: regard.attention(X, X, X, engine=e),
        "attention, twice": lambda: [regard.attention(X, X, X, engine=e) for _ in range(2)],
        **{
            f"observe {s}": lambda s=s: regard.attention(X, X, X, observe=[s], engine=e)  # type: ignore[misc]
            for s in STATISTICS
        },
        "return_weights": lambda: regard.attention(X, X, X, return_weights=True, engine=e),
        "weights": lambda: regard.weights(X, X, engine=e),
        "weights, of an lse": lambda: regard.weights(X, X, lse=lse, engine=e),
        "weights, long": lambda: regard.weights(LONG, LONG, rows=slice(0, 4), engine=e),
        "vjp": lambda: regard.attention_vjp(X, X, X, X, engine=e),
        "vjp, entropy": lambda: regard.attention_vjp(X, X, X, X, dentropy=X[..., 0], engine=e),
        "vjp, large scores": lambda: regard.attention_vjp(X * 1e18, X * 1e18, X, X, engine=e),
        "jvp": lambda: regard.attention_jvp(X, X, X, X, engine=e),
        "vjp_jvp": lambda: regard.attention_vjp_jvp(X, X, X, X, D(query=X), engine=e),
        "steps": lambda: regard.steps(X, X, X, dout=X),
        "plan": lambda: regard.plan(X, X, X, engine=e),
        **({"two ranks": of_ranks} if engine is None else {}),  # the others compute no parts of calls
    }


def of_ranks() -> None:
    """Run forward and backward of two ranks."""
    p, deal = problem_from(X, X, X), Deal.contiguous(5, 2)
    shards = [[x[..., deal.positions(rank), :] for x in (X, X, X)] for rank in range(2)]
    tiles, forward = sight_of(p, deal, deal), choose(p, None)
    found = together.run([Rank(p, forward, tiles, rank, *own).forward() for rank, own in enumerate(shards)])
    backward, plan = choose(p, None, "backward"), pipeline_of(p, deal, deal)
    together.run([
        RankGradients.of(p, backward, plan, rank, own, y, Outputs(y.out, None, None)).run(deal)
        for rank, (own, y) in enumerate(zip(shards, found, strict=True))
    ])  # fmt: skip


def leaf() -> Any:
    return torch.tensor(X, requires_grad=True)


def derived(times: int, engine: str | None) -> None:
    """Differentiate a call on tensors some times."""
    x = leaf()
    y = regard.attention(x, x, x, engine=engine).square().sum()
    for _ in range(times):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        y = y.square().sum()


def on_tensors(engine: str | None) -> dict[str, Callable[[], Any]]:
    e, x = engine, torch.tensor(X)

    def call(x: Any, **options: Any) -> Any:
        return regard.attention(x, x, x, engine=e, **options)

    def compiled(x: Any) -> Any:
        torch.compiler.reset()
        found = torch.compile(call, backend="eager", fullgraph=True)(x)
        return found.sum().backward() if x.requires_grad else found

    return {
        "tensors": lambda: [call(x) for _ in range(3)],
        "gradients": lambda: [call(leaf()).sum().backward() for _ in range(3)],
        "second derivatives": lambda: derived(2, e),
        "third derivatives": lambda: derived(3, e),
        "tangents": lambda: torch.func.jvp(call, (x,), (x,)),
        "tangents of tangents": lambda: torch.func.jvp(
            lambda y: torch.func.jvp(call, (y,), (x,))[1], (x,), (x,)
        ),
        "vmap": lambda: torch.func.vmap(call)(x[:, None]),
        "vmap of gradients": lambda: torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(x[:, None]),
        "tensors' weights": lambda: call(leaf(), return_weights=True)[1].sum().backward(),
        "tensors' statistics": lambda: call(leaf(), observe=["entropy", "received", regard.top(3)]),
        "compiled": lambda: compiled(torch.tensor(X)),
        "compiled, gradients": lambda: compiled(leaf()),
        "drop-in": lambda: regard.torch.scaled_dot_product_attention(leaf(), leaf(), leaf()).sum().backward(),
    }  # fmt: skip


def on_jax(engine: str | None) -> dict[str, Callable[[], Any]]:
    x = jax.numpy.asarray(X)

    def call(x: Any, **options: Any) -> Any:
        return regard.attention(x, x, x, engine=engine, **options)

    def loss(x: Any) -> Any:
        return (call(x) ** 2).sum()

    return {
        "jax": lambda: jax.block_until_ready(call(x)),
        "jax, jit": lambda: jax.block_until_ready(jax.jit(lambda x: call(x))(x)),
        "jax, gradients": lambda: jax.block_until_ready(jax.grad(loss)(x)),
        "jax, tangents": lambda: jax.block_until_ready(jax.jvp(call, (x,), (x,))),
        "jax, second derivatives": lambda: jax.block_until_ready(jax.jvp(jax.grad(loss), (x,), (x,))),
        "jax, tangents of tangents": lambda: jax.block_until_ready(
            jax.jvp(lambda y: jax.jvp(call, (y,), (x,))[1], (x,), (x,))
        ),
        "jax, vmap": lambda: jax.block_until_ready(jax.vmap(call)(x[:, None])),
        "jax, weights": lambda: jax.block_until_ready(call(x, return_weights=True, observe=["entropy", "received"])),
        "jax, drop-in": lambda: jax.block_until_ready(regard.jax.dot_product_attention(x, x, x)),
        "jax, xla": lambda: jax.block_until_ready(regard.attention(x, x, x, engine="xla")),
    }  # fmt: skip


KINDS_OF_CALLS = {"numpy": on_numpy, "tensors": on_tensors, "jax": on_jax}

# Leaks

ROOMS = {f"regard.engines.{name}": name for name in ("cpu", "tiled", "device")} | {"regard.reference": "spec"}
ANSWERS = {"supports", "state", "working_memory", "carried", "require"}
"""Functions that compute nothing of a problem."""
SHARED = {
    "regard.engines.cpu.schedule.second_work.second_pass": "maps",
    "regard.engines.tiled.forward_pass.second_pass": "maps",
}
"""Code of several functions, and one of them, which must know what is given to it."""


def room(module: str) -> str | None:
    return next((name for x, name in ROOMS.items() if module == x or module.startswith(f"{x}.")), None)


def entry(frame: FrameType | None) -> tuple[str, str] | None:
    """The engine and the function of the innermost guarded call around a frame; ("", "") for one that answers."""
    while frame is not None:
        own = frame.f_locals.get("self")
        if frame.f_code is Guarded._call.__code__ and isinstance(own, Guarded):
            return own.engine.NAME, frame.f_locals["function"]
        if frame.f_code is Guarded.prepare.__code__ and isinstance(own, Guarded):
            return own.engine.NAME, "forward"
        if frame.f_code.co_name in ANSWERS and room(frame.f_globals.get("__name__", "")):
            return "", ""
        frame = frame.f_back
    return None


class Watch:
    """What engines' code is entered with while a call runs."""

    def __init__(self) -> None:
        self.leaks: set[str] = set()
        self.of_engine = {
            getattr(engines()[name].engine, function).__code__: (name, function)
            for name in engines() for function in FUNCTIONS
        }  # fmt: skip

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or (name := room(module)) is None or frame.f_code.co_name in ANSWERS:
            return
        code, seen = frame.f_code, f"{module}.{frame.f_code.co_name}"
        given = (frame.f_locals.get(x) for x in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        if not any(isinstance(x, Problem) and getattr(x, "novel", None) is not None for x in given):
            return
        found = entry(frame.f_back)
        if found == ("", ""):
            return
        if found is None and name == "spec":  # `regard.steps` requires what it takes from the specification
            found = name, "backward" if code.co_name == "adjoint" else "forward"
        own = self.of_engine.get(code)
        if own is not None and found != own:
            self.leaks.add(f"{seen} is entered past its guard, in {found}")
        elif found is None or found[0] != name:
            self.leaks.add(f"{seen} in {found}")
        else:
            shared = SHARED.get(seen, found[1])
            if not all("novel" in engines()[name].engine.KNOWS[function] for function in (found[1], shared)):
                self.leaks.add(f"{seen} in {found}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is watched in whatever thread it runs."""

        def run(*args: Any) -> Any:
            with self.watching():
                return function(*args)

        return run


def outcome(call: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (ValueError, NotImplementedError, RuntimeError) as error:
        if "'novel'" not in str(error):
            raise
        return "refused"
    return "ran"


def sets_of_functions() -> dict[str, frozenset[str]]:
    every = frozenset(FUNCTIONS)
    sets = {"all": every} | {name: frozenset({name}) for name in FUNCTIONS}
    return sets | {f"all but {name}": every - {name} for name in FUNCTIONS}


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("calls", KINDS_OF_CALLS)
@pytest.mark.parametrize(("role", "kind"), DECLARED)
@pytest.mark.parametrize("name", ["cpu", "tiled", "device", "spec"])
def test_no_code_sees_a_field_that_it_does_not_know(
    name: str, role: str, kind: str, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = num_threads()
    regard.set_num_threads(1)
    declare(monkeypatch, role, kind)
    watch, outcomes, engine = Watch(), set(), engines()[name].engine
    knows = engine.KNOWS
    for module, function in ((ffi, "run"), (jax_parts, "run")):
        monkeypatch.setattr(module, function, watch.watched(getattr(module, function)))
    try:
        for known, functions in sets_of_functions().items():
            monkeypatch.setattr(engine, "KNOWS", knows | {x: knows[x] | {"novel"} for x in functions})
            for label, call in KINDS_OF_CALLS[calls](name if name in ("device", "spec") else None).items():
                before = len(watch.leaks)
                with watch.watching():
                    outcomes.add(outcome(call))
                assert len(watch.leaks) == before, f"{known} known, {label}: {watch.leaks}"
    finally:
        regard.set_num_threads(threads)
    carried = calls != "jax" or kind == "value"  # its programs carry arrays that are options of the caller alone
    assert outcomes == ({"ran", "refused"} if carried else {"refused"})


def test_an_engine_has_the_members_of_the_protocol_alone() -> None:
    assert not hasattr(engines()["tiled"], "forward_pass")
    assert not hasattr(engines()["cpu"], "WIDEST")


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("role", "kind"), DECLARED)
def test_a_schedule_depends_on_a_new_field(role: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the schedule of the first call would serve those with other values."""
    declare(monkeypatch, role, kind)
    p = problem_from(X, X, X)
    assert signature(p) == signature(replace(p))
    other = {"value": 0.8, "heads": None, "pairs": np.ones((5, 5), np.float32)}[kind]
    assert signature(p) != signature(replace(p, novel=other))


@pytest.mark.usefixtures("forgotten")
def test_a_call_with_a_new_field_is_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be run with the first call's array."""
    declare(monkeypatch, "scores", "pairs")
    cpu = engines()["cpu"]
    knows = {x: cpu.KNOWS[x] | {"novel"} for x in ("forward", "backward")}
    monkeypatch.setattr(cpu.engine, "KNOWS", cpu.KNOWS | knows)
    p = problem_from(X, X, X)
    for function in knows:
        assert cpu.prepare(p, function) is None
        assert cpu.prepare(replace(p, novel=None), function) is not None


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("role", "kind"), DECLARED)
def test_scores_alone_and_parts_follow_from_role_and_kind(
    role: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, role, kind)
    p = problem_from(X, X, X)
    assert (scores_alone(p).novel is None) == (role != "scores")
    part = part_of(p, 0, 1, rows=slice(1, 3), cols=slice(0, 4)).novel
    if role == "weights":
        assert part is None
    else:
        assert np.shape(part) == {"value": (), "heads": (1,), "pairs": (1, 2, 4)}[kind]


def test_each_field_has_a_role_and_a_kind() -> None:
    assert problem.ROLE.keys() == problem.KIND.keys() == {x.name for x in fields(Problem)}
    with pytest.raises(AssertionError):
        problem.declared("something", "value")
    with pytest.raises(AssertionError):
        problem.declared("denominators", "pairs")


def test_a_new_option_stays_ours_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's fused functions do not know it."""
    x = torch.zeros(2, 4, 3)
    monkeypatch.setitem(fused.DEFAULTS, "novel", None)
    assert fused.fits(x, x, x, {"novel": None})
    assert not fused.fits(x, x, x, {"novel": 0.7})


def test_derivatives_beyond_the_second_refuse_a_new_option() -> None:
    call = TensorCall(DEFAULTS | {"novel": 0.7, "observe": ()}, ("query", "key", "value"))
    x = torch.zeros(2, 4, 3)
    with pytest.raises(NotImplementedError, match="beyond the second do not know 'novel'"):
        rows.outputs(call, True, range(4), (x, x, x), ())


def test_xla_refuses_a_new_number(monkeypatch: pytest.MonkeyPatch) -> None:
    call = StaticCall(("query",), 1, None, None, 1.0, (("novel", 0.7),), 0, (0,), (0, 0, 0), "bhnd", (), "xla")
    with pytest.raises(NotImplementedError, match="XLA does not know 'novel'"):
        scan.run(PrimitiveTask("forward", call, ("query",), ((),)), [jax.numpy.asarray(X)])
