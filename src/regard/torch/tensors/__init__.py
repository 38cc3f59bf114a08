"""Tensors as NumPy arrays, tables and parameters, and the active modes of PyTorch."""
