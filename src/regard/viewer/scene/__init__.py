"""Scenes: layers of heads with their tokens.

`scenes` has the data, `sources` makes it from models, captures and arrays, `weights` from weights alone, `labels` makes
tokens printable.
"""
