"""The queries, keys, lse and rules of a model's layers, from which any weight follows.

`captured` has `Capture` and `capture`, `layers` one layer, `files` its file format, `joining` the calls of generation as one layer.
"""
