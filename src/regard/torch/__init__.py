"""regard for PyTorch: `regard.attention` on tensors needs none of this; here is what follows PyTorch's conventions."""

from regard.torch.dropin import scaled_dot_product_attention, sdpa

__all__ = ["scaled_dot_product_attention", "sdpa"]
