"""A small byte-level decoder, with trained weights.

`model` has its code, CARD.md how it was trained.
"""
