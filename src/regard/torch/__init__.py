"""regard for PyTorch."""
