"""Processes made by fork: they compute, whatever other threads of their parent were doing, and find no lock locked."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.engines.cpu.target import cache  # noqa: F401  which have locks
from regard.engines.cpu.target import instructions as target
from regard.rules import expression  # noqa: F401
from regard.runtime import forks, threads
from regard.viewer.serve.store import Grower, Store, Worker
from sources import parsed

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork"),
]
SOURCES = sorted(Path(regard.__file__).parent.rglob("*.py"))
# Those of one call, or of one job, which no other thread of a child waits for.
OF_A_CALL = {
    "runtime/threads.py": 2,
    "engines/cpu/schedule/backward_work.py": 1,
    "engines/cpu/target/cache.py": 1,
    "viewer/serve/store.py": 1,
}


@pytest.mark.parametrize(
    ("work", "count"), [("imports", 25), ("rules", 25), ("tiled", 25), ("cpu", 25), ("compile", 10)]
)
def test_a_child_of_a_process_whose_threads_work(work: str, count: int) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("forking.py"))]
    environment = os.environ | {"REGARD_CACHE": "off", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([*command, work, str(count)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def locks() -> dict[str, Any]:
    """Everything of the package that is made anew in a child and can be locked."""
    found = {}
    for owner, names in forks._renewed.values():
        for name in names:
            lock = getattr(owner(), name, None)
            if hasattr(lock, "acquire"):
                found[f"{getattr(owner(), '__name__', id(owner()))}.{name}"] = lock
    return found


def exit_code(child: Any) -> int:
    """Of a process made by fork that runs `child`, which has so many seconds."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        code = child()
    finally:
        os._exit(code)


def test_no_lock_is_found_locked() -> None:
    viewers = Store(1), Worker(None), Grower(None)
    assert {"regard.runtime.threads._lock", "regard.rules.expression._nodes_lock"} <= set(locks())
    assert len(locks()) >= 3 + len(viewers)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks().values():
            assert lock.acquire(timeout=10)
        held.set()
        done.wait()
        for lock in locks().values():
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    try:
        code = exit_code(lambda: sum(not lock.acquire(timeout=1) for lock in locks().values()))
    finally:
        done.set()
        holder.join()
    assert code == 0


def test_every_lock_is_made_anew_in_a_child() -> None:
    for path in SOURCES:
        made = [
            node.func.attr
            for node in parsed(path.read_text(encoding="utf-8"))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if node.func.attr in ("Lock", "RLock", "Condition", "Semaphore", "Event") and "threading" in ast.dump(node)
        ]
        name = path.relative_to(Path(regard.__file__).parent).as_posix()
        assert len(made) == OF_A_CALL.get(name, 0), f"{path}: {made}: see forks.renewed"


def test_no_property_has_a_lock() -> None:
    for path in SOURCES:
        if path.name != "forks.py":
            text = path.read_text(encoding="utf-8")
            assert "cached_property" not in text or "from regard.runtime.forks import cached_property" in text, path


def test_a_cached_property_is_computed_once() -> None:
    calls = []

    class Some:
        @forks.cached_property
        def number(self) -> int:
            """A number."""
            calls.append(self)
            return len(calls)

    some = Some()
    assert (some.number, some.number, Some().number, len(calls)) == (1, 1, 2, 2)
    assert Some.number.__doc__ == "A number."


def test_of_two_threads_the_first_decides_what_is_kept() -> None:
    begun, both = threading.Barrier(2), []

    class Some:
        @forks.cached_property
        def thing(self) -> object:
            begun.wait(10)
            return object()

    some = Some()
    running = [threading.Thread(target=lambda: both.append(some.thing)) for _ in range(2)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert both[0] is both[1] is some.thing


def test_a_child_lifts_the_limit_that_a_thread_of_its_parent_had_set() -> None:
    def blas() -> list[int]:
        return [pool["num_threads"] for pool in threads._blas().info()]

    before = blas()
    inside, done = threading.Event(), threading.Event()

    def limit() -> None:
        with threads.one_blas_thread():
            inside.set()
            done.wait()

    other = threading.Thread(target=limit)
    other.start()
    assert inside.wait(10)

    def child() -> int:
        with threads.one_blas_thread():
            within = blas()
        return int(any(n != 1 for n in within)) + 2 * int(blas() != before)

    try:
        code = exit_code(child)
    finally:
        done.set()
        other.join()
    assert code == 0
    assert blas() == before


def test_a_lock_that_is_held_over_a_fork_keeps_others_out() -> None:
    """While LLVM works for another thread, no process is made."""
    inside, done, order = threading.Event(), threading.Event(), []

    def work() -> None:
        with target._one_at_a_time:
            inside.set()
            done.wait(0.2)
            order.append("work")

    other = threading.Thread(target=work)
    other.start()
    assert inside.wait(10)
    x = np.ones((1, 4, 4), np.float32)
    code = exit_code(lambda: int(order != ["work"] or not np.allclose(regard.attention(x, x, x), 1)))
    other.join()
    assert code == 0
