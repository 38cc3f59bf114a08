"""The executable specification, which judges every engine.

| Module | Contents |
|---|---|
| `specification` | attention, its derivatives and its statistics in O(n²), as formulas in `einsum` |
| `engine` | the same as the engine "spec" |
"""
