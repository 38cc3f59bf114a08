"""One call: its arguments checked, its problem as data, what it returns.

| Module | Contents |
|---|---|
| `problem` | `Problem`, one normalized call; `Outputs` and `Differential`, what derivatives take and return |
| `checks` | every validation of a call and its message |
| `statistics` | statistics that `observe=` asks for, and `Seen`, in which they come back |
| `rowsums` | whether an lse belongs to the scores of a call |
| `tensors` | tensors as NumPy arrays and back, without copies |
| `types` | types of the public calls, the same for every array library |
"""
