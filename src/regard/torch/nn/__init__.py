"""PyTorch modules: `modules` has attention, blocks and stacks, `positions` encodings for them."""
