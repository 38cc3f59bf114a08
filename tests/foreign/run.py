"""Other people's attention tests, as installed packages ship them, and random calls in pieces: nightly.

    python tests/foreign/run.py opinfo                       # PyTorch's samples of its function, against the drop-in
    python tests/foreign/run.py fuzz --count 10000           # so many random calls on each engine
    python tests/foreign/run.py fuzz --start 4000 --count 6000 --engine tiled    # the rest of a night that stopped
    python tests/foreign/run.py gym CHECKOUT                 # attention-gym's functions, or `flash`: flash-attention's
    python tests/foreign/run.py flex-time                    # `flex_attention` beside PyTorch's compiled one

`opinfo` needs `pip install expecttest`, which `torch.testing` imports. Both print a table and exit with 1 where a check
fails. A piece of `fuzz` is 100 calls from one seed: the calls 4000 to 4099 are the same ones every time. `.ci/run` runs
neither.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PIECE = 100
ENGINES = ("cpu", "tiled")


def fuzz(start: int, count: int, engines: list[str]) -> int:
    """Random calls [start, start + count) on each engine; the number of pieces that failed."""
    failed = 0
    for engine in engines:
        began, calls, bad = time.monotonic(), 0, 0
        for first in range(start - start % PIECE, start + count, PIECE):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
            command += [f"--hypothesis-seed={first}", str(HERE / "random_calls.py")]
            environment = os.environ | {"REGARD_FUZZ": str(PIECE), "REGARD_FUZZ_ENGINE": engine}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            found = re.search(r"calls made: (\d+)", done.stdout)
            made = int(found[1]) if found else 0
            calls += made
            if done.returncode or not made:
                bad += 1
                print(f"--- {engine}, calls from {first}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")
        failed += bad
        seconds = time.monotonic() - began
        print(f"{engine:>8}: {calls:,} random calls from {start:,}, {bad} failed pieces, {seconds:,.0f} s", flush=True)
    return failed


def opinfo(only: str) -> int:
    """PyTorch's samples; the number of checks that failed."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    try:
        import opinfo as samples
    except ImportError as error:
        print(f"opinfo: not run, as a package is missing: {error}")
        return 1
    found: int = samples.run(only)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("opinfo", help="PyTorch's samples of its function, against the drop-in")
    part.add_argument("--only", default="", help="checks whose name contains this")
    part = commands.add_parser("fuzz", help="random calls against the specification")
    part.add_argument("--start", type=int, default=0, help=f"the first call, a multiple of {PIECE}")
    part.add_argument("--count", type=int, default=10_000, help="so many calls on each engine")
    part.add_argument("--engine", action="append", choices=[*ENGINES, "device"], help="may be repeated; cpu and tiled")
    for name, package in (("gym", "attention-gym"), ("flash", "flash-attention")):
        part = commands.add_parser(name, help=f"the functions of FlexAttention in a checkout of {package}")
        part.add_argument("checkout", type=Path)
    commands.add_parser("flex-time", help="flex_attention's forward beside PyTorch's compiled one, n = 2,048")
    given = parser.parse_args()
    if given.command in ("gym", "flash", "flex-time"):
        sys.path[:0] = [str(HERE), str(HERE.parent)]
        import flex

        return (
            flex.time()
            if given.command == "flex-time"
            else bool(flex.run(given.checkout, getattr(flex, given.command)))
        )
    if given.command == "opinfo":
        return bool(opinfo(given.only))
    return bool(fuzz(given.start, given.count, given.engine or list(ENGINES)))


if __name__ == "__main__":
    sys.exit(main())
