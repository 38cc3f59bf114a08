"""Captures: the queries, keys, lse and rules of a model's layers.

Any weight follows from them.

| Module | Contents |
|---|---|
| `layers` | one layer, and the tokens that it read |
| `captured` | `Capture`, a list of layers, and `regard.capture` |
| `calls` | one call, and whether another goes on with it |
| `joining` | the calls of a generation, or pieces, as one layer |
| `grids` | the patches of pictures, and frames of sounds, among the tokens |
| `pictures` | the pixels that are shown below them |
| `files` | the file format |
"""
