"""The operations of PyTorch's dispatcher."""
