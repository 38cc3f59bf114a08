"""Attention by PyTorch's own operations, which differentiates to any order; third derivatives use it."""
