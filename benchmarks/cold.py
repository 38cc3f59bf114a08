"""Rows of costs at the start of a process: importing, and the first call."""

import os
import tempfile
from dataclasses import dataclass

from benchmarks.measure import SUBJECT, Result, Setting, as_installed, fresh
from benchmarks.peers import reason


@dataclass(frozen=True)
class ImportRow:
    """Time of `import regard` over `import numpy`, each in a process of its own."""

    group: str = "cold"
    name: str = "import regard"
    goal: float | None = 1.3
    quick: bool = True

    def measure(self, s: Setting) -> Result:
        code = "import sys, time; t = time.process_time(); __import__(sys.argv[1]); print(time.process_time() - t)"
        found = Result(self.group, self.name, "× import numpy", False, self.goal, "numpy")
        found.samples = {SUBJECT: [], "numpy": []}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(s.rounds + 1):
                for name in ("numpy", SUBJECT):
                    seconds = fresh(code, name, **as_installed(folder))
                    if turn:
                        found.samples[name].append(seconds)
        return found


KINDS = {
    "plain": "",
    "causal": "causal=True",
    "window and softcap": "mask=regard.window(8), score=regard.softcap(30.0)",
}

FIRST = """
import json, time
import numpy as np
import llvmlite.binding, llvmlite.ir
import regard
q = np.ones((1, 64, 64), np.float32)
t = time.process_time()
regard.attention(q, q, q, engine={engine!r}, {options})
print(time.process_time() - t)
"""


@dataclass(frozen=True)
class FirstCallRow:
    """Time of the first call of a process, compiled or read from the disk cache.

    llvmlite is imported before.
    """

    kind: str
    cached: bool
    goal: float | None
    group: str = "cold"
    quick: bool = True

    @property
    def name(self) -> str:
        return f"first call, {self.kind}, {'from the disk cache' if self.cached else 'compiled'}"

    def measure(self, s: Setting) -> Result:
        found = Result(self.group, self.name, "s", False, self.goal)
        code = FIRST.format(engine=s.engine, options=KINDS[self.kind])
        with tempfile.TemporaryDirectory() as folder:
            try:
                caches = [os.path.join(folder, "0" if self.cached else str(n)) for n in range(s.rounds + 1)]
                times = [fresh(code, **as_installed(folder), REGARD_CACHE=cache) for cache in caches]
                found.samples[SUBJECT] = times[1:]
            except RuntimeError as error:
                found.failures[SUBJECT] = reason(error)
        return found
