"""Public calls on NumPy arrays.

| Module | Contents |
|---|---|
| `attention` | attention, its derivatives and weights: make a `Problem`, choose an engine, run |
| `normalization` | a call checked once and made one frozen `Problem` |
| `tangents` | outputs, cotangents and tangents that a caller gives, checked |
| `callcache` | the one cache of calls, which skips checks, the choice of an engine and the plan |
| `merging` | attention over a set of keys from its parts |
| `multihead`, `linear` | multi-head attention; linear attention |
| `metric` | a metric in the scores: the product before an engine, the chain rule after it |
| `retrieval` | modern Hopfield networks |
| `stepping` | every intermediate of a call, with its indices |
| `exporting` | attention for web pages |
| `planning` | FLOPs, bytes, tiles and the engine of a call |
"""
