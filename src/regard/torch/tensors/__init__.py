"""What all calls need of tensors and of PyTorch's state."""
