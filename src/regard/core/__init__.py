"""One call: its arguments checked, its problem as data, what it returns.

| Module | Contents |
|---|---|
| `problem` | `Problem`, one normalized call; `Outputs` and `Differential`, what derivatives take and return |
| `checks` | every validation of a call and its message |
| `arguments` | checks of single arguments; the names that options of other libraries have here |
| `statistics` | statistics that `observe=` asks for, and `Seen`, in which they come back |
| `rowsums` | whether an lse belongs to the scores of a call |
| `frameworks` | arrays of PyTorch and JAX: recognized without an import, dispatched to their adapter |
| `signatures` | signatures as `help` shows them; unknown options, answered |
| `types` | types of the public calls, the same for every array library |
"""
