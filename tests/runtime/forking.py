"""Fork while other threads work, and have each child do the same work: `python forking.py WORK FORKS`."""

import importlib
import os
import signal
import sys
import threading
import time
from importlib.machinery import ModuleSpec

import numpy as np

import regard
from regard.runtime.forks import held

SECONDS = 60.0  # after which a child is taken to hang
x = np.random.default_rng(0).standard_normal((2, 40, 8)).astype(np.float32)


def rules() -> None:
    for _ in range(20):
        regard.mask(lambda b, h, i, j: (i - j) % 3 < 2) & regard.window(5) | regard.causal()


def compute(engine: str) -> None:
    regard.attention(x, x, x, mask=regard.window(5) | regard.strided(3), score=regard.softcap(2.0), engine=engine)


def compile_again() -> None:
    from regard.engines.cpu.target import cache

    cache.forget()
    compute("cpu")


class Modules:
    """Finds modules that take a while to import, one after the other."""

    last = 0

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith("regard.made_") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: object) -> None:
        time.sleep(0.002)

    def import_next(self) -> None:
        name = f"regard.made_{self.last}"
        importlib.import_module(name)
        self.last += 1
        with LOCK:  # which `fork` waits for, while the other thread imports
            time.sleep(0.004)


MODULES, LOCK = Modules(), threading.RLock()
held(LOCK)
sys.meta_path.append(MODULES)  # type: ignore[arg-type]
WORK = {
    "imports": MODULES.import_next,
    "rules": rules,
    "tiled": lambda: compute("tiled"),
    "cpu": lambda: compute("cpu"),
    "compile": compile_again,
}


def ends(pid: int) -> bool:
    """Whether a child ends well; it is killed if it does not."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main() -> None:
    work, forks = WORK[sys.argv[1]], int(sys.argv[2])

    def always() -> None:
        while True:
            work()

    for _ in range(2):
        threading.Thread(target=always, daemon=True).start()  # the first child is made while modules are imported
    for n in range(forks):
        time.sleep(0.005 * (n % 5))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        if not ends(pid):
            print(f"child {n} of {forks} did not end", flush=True)
            os._exit(1)
    os._exit(0)  # without waiting for the threads


if __name__ == "__main__":
    main()
