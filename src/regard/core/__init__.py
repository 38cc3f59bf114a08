"""One call: its arguments checked, its problem as data, and its results.

| Module | Contents |
|---|---|
| `problem` | `Problem`, one normalized call; `Outputs` and `Differential`, arguments and results of derivatives |
| `checks` | every validation of a call and its message |
| `arguments` | checks of single arguments; the names that options of other libraries have here |
| `statistics` | statistics that `observe=` asks for, and `Seen`, in which they are returned |
| `rowsums` | a check that an lse belongs to the scores of a call |
| `frameworks` | arrays of PyTorch and JAX: recognized without an import, dispatched to their adapter |
| `signatures` | signatures as `help` shows them; answers to unknown options |
| `types` | types of the public calls, the same for every array library |
"""
