"""One call: its arguments checked, its problem as data, and its results.

| Module | Contents |
|---|---|
| `options` | the options of a call: names, types and defaults, declared once |
| `problem` | `Problem`, one normalized call; `Outputs` and `Differential`, arguments and results of derivatives |
| `extents` | the absolute indices of a call |
| `callrules` | the rules of a call: bounds that hide tiles, derivatives |
| `parts` | problems derived from a problem: scores alone, some rows and keys |
| `layout` | conversion between the layouts of arrays |
| `checks` | every validation of a call and its message |
| `statistics` | the statistics that `observe=` requests, each a class, and `Seen`, which holds them |
| `rowsums` | a check that an lse belongs to the scores of a call |
| `tensors` | tensors as NumPy arrays and back, without copies |
| `types` | types of the public calls, the same for every array library |
"""
