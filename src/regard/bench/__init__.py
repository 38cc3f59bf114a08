"""Benchmarks, and the table of cases that they share with the tests.

| Module | Contents |
|---|---|
| `cases` | every option of a call as a small case, for conformance tests and benchmarks |
| `rows` | every row of the report: its case, its peers, its goal |
| `row_types` | a row's measurement: share of a limit, cost of an option, derivative, threads, memory |
| `measure` | timing in turns, checks of results, `Result` and `Report` |
| `limits` | the peak and the read bandwidth of this machine |
| `peers`, `naive` | attention of other libraries; textbook NumPy |
| `derivatives` | derivatives of `regard` and of other libraries |
| `memory`, `cold` | peak memory; import and first call; each in a process of its own |
| `models`, `unet`, `shapes`, `model_rows` | models of transformers, a U-Net, attention in the shapes of models |
| `device`, `device_peers`, `device_rows` | the same on a GPU |
| `run`, `report`, `plots` | a run, its tables and files, its plots |

Read `cases`, `rows`, `row_types` and `measure` in this order; each other module is used by one of them. `regard bench`
calls `run` and `report`.
"""
