"""PyTorch's own function: `functional` has its conventions, `nested` its nested tensors."""
