"""Fixtures of every test: fresh arrays hold NaN, so that an engine which leaves one unwritten is seen."""

import gc
import os
import shutil
import threading
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import settings

from in_browser import FLAGS
from parts import COLLECTED, parts
from regard.core.problem import Problem
from regard.engines import Engines
from regard.reference import specification
from regard.runtime import memory

# Read by type checkers; run by hand and by tests/test_nightly.py; by hand.
collect_ignore_glob = ["typing/*", "foreign/*", "torch/parallel_*.py", "*_figures.py"]

# Workers inherit these: threads of BLAS and OpenMP that wait sleep at once, and leave the processor to other workers.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile("ci", max_examples=500, deadline=None, derandomize=True)
if count := os.environ.get("REGARD_FUZZ"):  # so many examples of every property, other ones each time
    settings.register_profile("fuzz", max_examples=int(count), deadline=None)
settings.load_profile("fuzz" if count else "ci")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser of this process, in which Playwright does not start a second time."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        yield made
        made.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N shares of the tests")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave frameworks and tests out of garbage collections: a fifth of the time here, and a second each later."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test with its part, before `-m` selects, and leave out those of other shards."""
    part = config.stash[COLLECTED] = parts(item.nodeid for item in items)
    for item in items:
        if part[item.nodeid] != "fast":
            item.add_marker(part[item.nodeid])
    k, n = map(int, config.getoption("--shard").split("/"))
    others = [item for item in items if crc32(item.nodeid.encode()) % n != k - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % n == k - 1]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test makes its calls for the first time: one may change what engines support, which no program does."""
    monkeypatch.setattr("regard.ops.callcache._thread", threading.local())


@pytest.fixture(autouse=True)
def first_engine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls that name no engine try the one of the nearest mark `engine` first.

    Tests of adapters have "tiled", which compiles nothing, and for each door a call on "cpu".
    """
    with pytest.MonkeyPatch.context() as patch:
        if mark := request.node.get_closest_marker("engine"):
            (name,) = mark.args
            patch.setattr(Engines, "modules", {name: Engines.modules[name]} | Engines.modules)
        yield


@pytest.fixture(autouse=True)
def terms_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the specification computes first, of the problem that a test asks about again and again: in the precision of
    the judge, in the naive one and in float64. No test writes to the arrays of a problem that it has asked about.
    """
    terms = specification.terms
    last: Problem | None = None
    known: dict[Any, specification.Terms] = {}

    def once(p: Problem, real: Any = np.float64, short: Any = None) -> specification.Terms:
        nonlocal last
        if last is not p:
            last = p
            known.clear()
        which = real, None if short is None else np.dtype(short)
        if which not in known:
            known[which] = terms(p, real, short)
        return known[which]

    monkeypatch.setattr(specification, "terms", once)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            x = make(*args, **kwargs)
            if x.dtype.kind in "fV" and x.dtype.name != "object":
                x[...] = np.nan
            elif x.dtype.kind in "iu":
                x[...] = np.iinfo(x.dtype).max
            return x

        return made

    monkeypatch.setattr(np, "empty", poisoned(np.empty))
    monkeypatch.setattr(np, "empty_like", lambda x, **kwargs: np.empty(x.shape, kwargs.pop("dtype", x.dtype)))
    monkeypatch.setattr(memory, "empty", poisoned(memory.empty))
