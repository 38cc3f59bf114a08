"""xFormers' `memory_efficient_attention` and its biases, on regard's kernels.

`from regard.torch.xformers import memory_efficient_attention, BlockDiagonalMask`.
"""

from regard.torch.dropins import xformers_biases
from regard.torch.dropins.xformers import memory_efficient_attention

globals().update(xformers_biases.CLASSES)

__all__ = ["memory_efficient_attention", *sorted(xformers_biases.CLASSES)]
