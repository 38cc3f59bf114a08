"""A small decoder over bytes, with trained weights.

`model` has its code, CARD.md how it was trained.
"""
