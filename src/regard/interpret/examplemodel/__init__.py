"""Two small models with trained weights: a byte-level decoder, and a vision transformer.

`model` and `vit` have their code, made of `blocks`; CARD.md and VIT.md say how they were trained.
"""
