"""A small byte-level decoder with trained weights.

`model` has its code, made of `blocks`; CARD.md says how it was trained.
"""
