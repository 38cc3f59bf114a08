"""What runs by default: every case in float32, every error text, and of each product some of every dtype."""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from parts import TABLE, Row, part, row
from regard.bench.cases import CASES

ENGINES = "Cpu", "Tiled", "Specification"
DTYPES = "float32", "float64", "float16", "bfloat16"


@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_runs_in_float32(engine: str) -> None:
    for case in CASES:
        for name in (f"forward[{case}-float32]", f"gradients[{case}-float32]", f"weights[{case}]"):
            assert part(f"tests/test_conformance.py::Test{engine}::test_{name}") == "fast", name


def test_every_error_text_runs() -> None:
    assert part("tests/test_messages.py::test_the_whole_text[0]") == "fast"


def test_every_row_has_tests_and_every_share_each_dtype() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True).stdout
    found: dict[Row | None, list[str]] = defaultdict(list)
    for test in filter(lambda line: "::" in line, said.splitlines()):
        found[row(test)].append(test)
    for one in TABLE:
        tests = found[one]
        assert tests, f"no test is decided by {one.pattern!r}"
        if isinstance(one.part, int):
            some = [test for test in tests if part(test) == "fast"]
            assert 0 < len(some) < len(tests), one
            for dtype in DTYPES:
                pattern = re.compile(rf"(?<![a-z]){dtype}\b")  # bfloat16 is not float16
                assert any(map(pattern.search, some)) or not any(map(pattern.search, tests)), (one, dtype)
