"""The order of rows in the table of operands means nothing."""

import os
import subprocess
import sys

import reordered
from regard.engines.cpu.spec.operands import FORWARD, PLAIN, block_fields_of


def test_results_are_the_same_with_the_rows_reversed() -> None:
    environment = {**os.environ, "REGARD_CACHE": "off"}  # cached kernels have their fields in the table's own order
    command = [sys.executable, reordered.__file__, "reversed"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        expected = reordered.digests()
        results, _ = process.communicate()
    assert results.splitlines() == expected


def test_short_calls_find_their_operands_first() -> None:
    """They write the addresses of these without names."""
    assert block_fields_of(FORWARD, 2)[: len(PLAIN) + 3] == (*PLAIN, "bias", "dense0", "dense1")
