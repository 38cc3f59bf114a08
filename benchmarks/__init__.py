"""Benchmarks of `regard`: rows that compare a call with a limit of the processor or with other libraries.

| Module | Contents |
|---|---|
| `rows` | every row of the report: its case, its peers, its goal |
| `row_types` | a row's measurement: share of a limit, cost of an option, derivative, threads, memory |
| `measure` | timing in turns, checks of results, `Result` and `Report` |
| `peers`, `naive` | attention of other libraries; textbook NumPy |
| `derivatives` | derivatives of `regard` and of other libraries |
| `memory`, `cold` | peak memory; import and first call; each in a process of its own |
| `models`, `unet`, `shapes`, `model_rows` | models of transformers, a U-Net, attention in the shapes of models |
| `reach` | functions of other packages |
| `run`, `report`, `plots` | a run, its tables and files, its plots |

Read `rows`, `row_types` and `measure` in this order; each other module is used by one of them. `python -m benchmarks`
calls `run` and `report`. Limits are those of `regard.engines.cpu.limits`, cases those of the tests (`tests/cases.py`).
"""

import sys
from pathlib import Path

# The folder of the tests does not stay on the path: its `torch` and `jax` would pass for installed packages.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
try:
    import cases as cases
finally:
    del sys.path[0]
