"""The queries, keys, lse and rules of a model's layers, from which any weight follows.

| Module | Contents |
|---|---|
| `captured` | `Capture` and `capture` |
| `layers` | one layer, and the tokens that it read |
| `files` | the file format of captures |
| `joining` | the calls of generation as one layer |
"""
