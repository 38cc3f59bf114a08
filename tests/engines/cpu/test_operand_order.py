"""The order of rows in the table of operands means nothing."""

import os
import subprocess
import sys

import reordered


def test_results_are_the_same_with_the_rows_reversed() -> None:
    environment = {**os.environ, "REGARD_CACHE": "off"}  # cached kernels have their fields in the table's own order
    command = [sys.executable, reordered.__file__, "reversed"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        expected = reordered.digests()
        results, _ = process.communicate()
    assert results.splitlines() == expected
