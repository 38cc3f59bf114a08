"""A small decoder over bytes, with trained weights: `model` computes, CARD.md says how it was trained."""
