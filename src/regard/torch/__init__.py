"""regard for PyTorch: `regard.attention` on tensors needs none of this; here is what follows PyTorch's conventions."""

from regard.torch.dropin import scaled_dot_product_attention, sdpa
from regard.torch.varlen import jagged_attention, varlen_attention

__all__ = ["jagged_attention", "scaled_dot_product_attention", "sdpa", "varlen_attention"]
