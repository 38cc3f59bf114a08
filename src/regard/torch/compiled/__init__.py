"""Calls in graphs that PyTorch traces."""
