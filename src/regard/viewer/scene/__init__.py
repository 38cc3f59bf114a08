"""Scenes: layers of heads with their tokens.

`scenes` has the data, `sources` makes it from models, captures and arrays, `labels` makes tokens printable.
"""
