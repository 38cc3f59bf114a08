"""Engines, their order, and the protocol that each implements.

| Module | Contents |
|---|---|
| `cpu/` | kernels compiled by LLVM; tried first |
| `tiled/` | tiles on NumPy; supports every call |
| `device/` | PyTorch's operations, on any device |
| `normalized`, `observed` | corrections and statistics that follow from an engine's results |

The specification is the engine "spec", which runs only when it is named.

An engine is a module with the members of `Engine`; of one without `prepare` no call is prepared. One that knows the
field "part" has `carried`, the shapes and dtypes of the sums of forward, or of `jvp` along t. They depend on `low` too.
DEVICES: it reads arrays of a device, and runs on those of the host only when named. NAMED_ONLY: it runs only when
named. SKIPS_TILES: it does not visit tiles that rules hide. KNOWS says, for each function, which optional fields of a
`Problem` it knows. A problem that uses another one is refused, never computed without it. So engines call each other's
functions, and each its own, by `engines()[name]`. `require` refuses alike where only code is shared. `state` and
`supports` return None, or the reason why the engine cannot run here, or cannot run a problem. `weights` take the
problem's own lse: rows with every key are divided by their sums. `maps` (`regard.pooled`, mass and max) take an lse
that may be that of more keys than the problem has. The derivatives:

- `backward`: the gradients of ⟨ct, outputs⟩ in the inputs.
- `jvp`: the outputs and their tangents along tangents t of the inputs. Given outputs are not computed again; if their
  entropy is None, so is its tangent.
- `backward_jvp`: the tangents of `backward`'s gradients along t and along tangents d_ct of the cotangents. d_outputs
  are the tangents of the outputs along t.
- `jvp_jvp`: the tangents along u of `jvp`'s tangents along a constant t. d_t and d_u are the tangents of the outputs
  along each.

The last two make double backward. The gradient of ⟨u, gradients⟩ in the inputs is `backward_jvp` along u with constant
cotangents; that in ct is the tangent of `jvp` along u. Derivatives take the outputs of `forward`, with entropy if it
has a cotangent. None in cotangents or tangents is 0.

`into` holds arrays of the right shapes and dtypes that nothing else reads. An engine may write results there (of `jvp`,
the tangents) and return those arrays; any other array that it returns is new. If it has `low`, forward stores there
what rounding takes from the output; None in the result says that it does not.
"""

import functools
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np

from regard.arguments.values import shown
from regard.core.problem import FUNCTIONS, INTERNAL, OPTIONAL, Differential, Outputs, Problem, SumShapes
from regard.core.statistics import Statistic
from regard.rules import Table
from regard.warning import RegardWarning, level_of_caller

Array = np.ndarray[Any, np.dtype[Any]]


class PreparedCall(Protocol):
    """A function of one problem, for one thread, on arrays at the given addresses.

    The call returns False, and has written no result, for numbers that only the function itself computes.
    """

    def __call__(
        self, addresses: Sequence[int], /, *keys: Any, seed: int | None = None, tables: tuple[Table, ...] | None = None
    ) -> bool: ...


class Engine(Protocol):
    """Members of an engine's module."""

    NAME: str
    ABOUT: str
    DEVICES: bool
    NAMED_ONLY: bool
    SKIPS_TILES: bool
    KNOWS: Mapping[str, frozenset[str]]

    def state(self) -> str | None: ...
    def require(self, function: str, p: Problem, /) -> None: ...
    def supports(self, p: Problem, /) -> str | None: ...
    def working_memory(self, p: Problem, /) -> int: ...
    def carried(self, p: Problem, low: bool, t: Differential | None = None, /) -> SumShapes: ...
    def prepare(self, p: Problem, function: str = ..., vary: Collection[str] = ..., /) -> PreparedCall | None: ...
    def forward(
        self, p: Problem, rows: range | None = None, into: Outputs | None = None, /
    ) -> tuple[Outputs, dict[Statistic, Any]]: ...
    def weights(self, p: Problem, lse: Array, rows: range, cols: range, /) -> Array: ...
    def maps(self, p: Problem, lse: Array, rows: int, cols: int, /) -> tuple[Array, Array]: ...
    def backward(
        self, p: Problem, outputs: Outputs, ct: Outputs, into: Differential | None = None, /
    ) -> Differential: ...
    def jvp(
        self, p: Problem, t: Differential, outputs: Outputs | None = None, into: Outputs | None = None, /
    ) -> tuple[Outputs, Outputs]: ...
    def backward_jvp(
        self, p: Problem, outputs: Outputs, ct: Outputs, t: Differential, d_outputs: Outputs, d_ct: Outputs, /
    ) -> Differential: ...
    def jvp_jvp(
        self, p: Problem, outputs: Outputs, t: Differential, u: Differential, d_t: Outputs, d_u: Outputs, /
    ) -> Outputs: ...


class Guarded:
    """An engine whose functions raise for a problem with a field that they do not know.

    Engines enter each other by it, and each its own functions. It has the members of `Engine` alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.NAME, self.ABOUT = engine, engine.NAME, engine.ABOUT
        for name in FUNCTIONS:
            setattr(self, name, functools.partial(self._call, name))

    def require(self, function: str, p: Problem) -> None:
        """Raise ValueError for a problem with a field that a function does not know."""
        reason = unknown(self.engine, function, p)
        if reason:
            raise ValueError(f"engine {self.engine.NAME!r} refuses this call: {reason}")

    def _call(self, function: str, p: Problem, *args: Any) -> Any:
        self.require(function, p)
        return getattr(self.engine, function)(p, *args)

    def prepare(self, p: Problem, function: str = "forward", vary: Collection[str] = ()) -> PreparedCall | None:
        """Return forward or backward of a problem for other arrays, None if the engine has none.

        Forward is given the addresses of out, lse, query, key and value. Backward is given those, with the cotangent of
        out, as the only one, after lse, and of the gradients of query, key and value. Then follow low, the bias, the
        dense masks and the sink that there are, and in backward the gradient of the sink: both (h,) in the dtype of
        sums. seed, tables: of dropout, and `tables_of` rules of the problem's forms; by default the problem's. Inputs
        have the same shapes and strides as in the problem, outputs and their cotangents those of `Problem.new_output`,
        and gradients are (..., h, n, d) without gaps. vary: "low" says that there is one. With "keys" their number
        differs too. It follows, with the strides of key and value in numbers, not bytes.
        """
        prepare = None if unknown(self.engine, function, p) else getattr(self.engine, "prepare", None)
        return None if prepare is None else prepare(p, function, vary)

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AttributeError(f"an engine has no member {name!r}: it is entered by those of `regard.engines.Engine`")
        return getattr(self.engine, name)


MEMBERS = frozenset({*Engine.__annotations__, *(name for name in vars(Engine) if not name.startswith("_"))})


def unknown(engine: Engine, function: str, p: Problem) -> str | None:
    """Return the reason why a function of an engine does not know a field of a problem, or None."""
    known = engine.KNOWS[function]
    if OPTIONAL.keys() <= known:
        return None
    fields = p.used - known
    return f"its {function} does not know {', '.join(map(repr, sorted(fields)))}" if fields else None


class Engines(Mapping[str, Engine]):
    """Engines by name, each imported on first use.

    Most calls use the first engine alone.
    """

    modules: ClassVar = {name: f"regard.engines.{name}" for name in ("cpu", "tiled", "device")} | {
        "spec": "regard.reference.engine"
    }

    def __init__(self) -> None:
        self.loaded: dict[str, Engine] = {}

    def __getitem__(self, name: str) -> Engine:
        found = self.loaded.get(name)
        if found is None:
            guarded: Any = Guarded(import_module(self.modules[name]))
            found = self.loaded[name] = guarded
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)


_engines = Engines()
_warned: set[str] = set()  # reasons already given in a warning


def engines() -> Engines:
    """Return the engines in the order in which they are tried.

    "spec" runs only if it is named.
    """
    return _engines


def choose(p: Problem, name: str | None, function: str = "forward") -> Engine:
    """Return the named engine, or the first whose `function` supports the problem.

    Raises ValueError with the reason of every engine if there is none.
    """
    every = engines()
    if name is not None:
        if not isinstance(name, str) or name not in every:
            if isinstance(name, str) and name == "triton":
                raise ValueError("there is no engine 'triton': engine='device' computes on any device of PyTorch")
            raise ValueError(f"engine must be one of {', '.join(map(repr, every))}, got {shown(name)}")
        reason = every[name].state() or elsewhere(every[name], p) or unsupported(every[name], p, function)
        if reason:
            raise ValueError(f"engine {name!r} refuses this call: {reason}")
        return every[name]
    first = every[next(iter(every))]
    for engine in every.values():
        if refusal(engine, p, function) is None:
            if engine is not first and p.device is None:
                _warn_of_fallback(first, engine, p, function)
            return engine
    reasons = "; ".join(f"{n}: {why}" for n, why in refusals(p, function).items())
    raise ValueError(f"no engine supports this call: {reasons}")


def _warn_of_fallback(first: Engine, engine: Engine, p: Problem, function: str) -> None:
    """Warn once for each reason that the first engine refuses a call, or all calls.

    A browser has no compiled engine to be had, and no warning.
    """
    missing = first.state()
    reason = missing or unsupported(first, p, function)
    limit = (reason or "").partition(", got ")[0]
    if reason is None or limit in _warned or sys.platform == "emscripten":
        return
    _warned.add(limit)
    refuses, it = ("cannot run here", "all calls") if missing else ("refuses this call", "it")
    warnings.warn(
        f"the engine {first.NAME!r} {refuses}: {reason}; {engine.NAME!r} runs {it}, many times slower "
        f"(engine={engine.NAME!r} silences this warning, which is given once)",
        RegardWarning,
        stacklevel=level_of_caller(),
    )


def unsupported(engine: Engine, p: Problem, function: str) -> str | None:
    """Return the reason why a function of an engine does not run a problem, or None."""
    return unknown(engine, function, p) or engine.supports(p)


def refusal(engine: Engine, p: Problem, function: str = "forward") -> str | None:
    """Return the reason why an engine would not be chosen, or None."""
    named = "runs only when named"
    if engine.DEVICES and p.device is None:
        return named
    reason = engine.state() or elsewhere(engine, p)
    return reason or (named if engine.NAMED_ONLY else unsupported(engine, p, function))


def elsewhere(engine: Engine, p: Problem) -> str | None:
    """Return the reason why an engine cannot read arrays of a device, or None."""
    return None if p.device is None or engine.DEVICES else f"the arrays are on the device {p.device}"


def refusals(p: Problem, function: str = "forward") -> dict[str, str | None]:
    """Return `refusal` for every engine, by name."""
    return {name: refusal(engine, p, function) for name, engine in engines().items()}


@dataclass(frozen=True)
class EngineState:
    """An engine, and the reason why it cannot run here, None if it can.

    lacks: for each function, the optional parts of a call that only other engines know.
    """

    name: str
    about: str
    reason: str | None
    lacks: Mapping[str, tuple[str, ...]]

    def __repr__(self) -> str:
        ready = "ready" if self.reason is None else f"not available: {self.reason}"
        lacks = [f"{function} does not know {', '.join(names)}" for function, names in self.lacks.items()]
        return f"{self.name}: {'; '.join([ready, *lacks])} ({self.about})"


def available_engines() -> tuple[EngineState, ...]:
    """Return every engine with its state, in the order in which they are tried.

    >>> import regard
    >>> [engine.name for engine in regard.available_engines()]
    ['cpu', 'tiled', 'device', 'spec']
    """
    every = engines().values()
    known = frozenset().union(*(names for engine in every for names in engine.KNOWS.values())) - INTERNAL

    def lacks(engine: Engine) -> dict[str, tuple[str, ...]]:
        missing = {function: tuple(sorted(known - engine.KNOWS[function])) for function in FUNCTIONS}
        return {function: names for function, names in missing.items() if names}

    return tuple(EngineState(engine.NAME, engine.ABOUT, engine.state(), lacks(engine)) for engine in every)
