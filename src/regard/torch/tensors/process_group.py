"""The `ContextParallel` that is entered: those ask it who would else compute with the rows of one process alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from regard.torch.tensors.modes import outside_of_graphs

_entered: ContextVar[Any] = ContextVar("entered", default=None)
_holders = 0
active = False
"""True while any thread is inside. Compiled graphs are guarded by it: Dynamo does not read context variables."""
left = False
"""True once a thread has left: a backward after that may compute a forward again, which then is of one process."""
AGAIN = (
    "attention is computed again in a backward outside of context_parallel, with the positions of one process alone: "
    "call backward inside"
)


@contextmanager
def entered(parallel: Any) -> Iterator[None]:
    """Make a `ContextParallel` that of this thread inside of a `with`."""
    token = _entered.set(parallel)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _entered.reset(token)


def _count(more: int) -> None:
    global _holders, active, left
    _holders += more
    active, left = _holders > 0, left or more < 0


def spread() -> Any:
    """Return the `ContextParallel` of this thread, or None."""
    return _entered.get() if active else None


def whole(n: int) -> int:
    """Return the length of the sequence of which this process has `n` positions."""
    parallel = spread()
    return n if parallel is None else parallel.deal.n


@outside_of_graphs("the positions of a rank are no constants of a graph")
def positions(first: int, n: int) -> Any:
    """Return the positions of `n` rows of this process, as integers of NumPy; None for first, first + 1, ..."""
    parallel = spread()
    if parallel is None:
        return None
    own = parallel.deal.positions(parallel.rank)
    if first or n != len(own):
        raise ValueError(f"a rank of context_parallel has {len(own)} positions, got {n} from {first} on")
    return own


def refuse(what: str, instead: str) -> None:
    """Raise ValueError inside of `context_parallel`, where `what` would see the rows of one process alone."""
    if spread() is not None:
        raise ValueError(f"{what} inside of context_parallel would see the positions of one process alone: {instead}")
