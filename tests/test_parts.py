"""What runs by default: every case in float32, every error text, and of each product some of every dtype."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import regard
from cases import CASES
from parts import COLLECTED, TABLE, Row, parts, row

ENGINES = "Cpu", "Tiled", "Device", "Specification"
DTYPES = "float32", "float64", "float16", "bfloat16"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_runs_in_float32(engine: str) -> None:
    names = [f"{name}[{case}-float32]" for name in ("forward", "gradients") for case in CASES]
    names += [f"weights[{case}]" for case in CASES]
    found = parts(f"tests/conformance/test_conformance.py::Test{engine}::test_{name}" for name in names)
    assert {*found.values()} == {"fast"}


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.engine(x)) for x in ("tiled", "cpu")])
def test_the_nearest_mark_names_the_engine(name: str) -> None:
    assert regard.plan(n=8, d=4).engine == name


def test_every_error_text_runs() -> None:
    assert {*parts(f"tests/core/test_messages.py::test_the_whole_text[{n}]" for n in range(300)).values()} == {"fast"}


def every_part(config: pytest.Config) -> dict[str, str]:
    """The part of every test there is: of this run, if it has collected all files, else of another that collects."""
    root, found = Path(__file__).parents[1], config.stash[COLLECTED]
    files = {file.relative_to(root).as_posix() for file in root.glob("tests/**/test_*.py")}
    nightly = {file for file in files if (one := row(file)) and one.part == "nightly"}  # none, if JupyterLab is missing
    if files - nightly <= {test.partition("::")[0] for test in found}:
        return found
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return parts(line for line in said.splitlines() if "::" in line)


def test_every_row_has_tests_and_every_share_each_dtype(pytestconfig: pytest.Config) -> None:
    found: dict[Row | None, list[str]] = defaultdict(list)
    part = every_part(pytestconfig)
    for test in part:
        found[row(test)].append(test)
    for one in TABLE:
        tests = found[one]
        assert tests, f"no test is decided by {one.pattern!r}"
        shares = [] if not isinstance(one.part, int) else ["fast"]
        for share in shares + ["slow"] * (one.kept > 1):
            some = [test for test in tests if part[test] == share]
            assert 0 < len(some) < len(tests), (one, share)
            for dtype in DTYPES:
                pattern = re.compile(rf"(?<![a-z]){dtype}\b")  # bfloat16 is not float16
                assert any(map(pattern.search, some)) or not any(map(pattern.search, tests)), (one, share, dtype)
