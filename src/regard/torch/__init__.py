"""regard for PyTorch."""
from regard.torch.transformers import register_transformers
