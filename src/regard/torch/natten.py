"""NATTEN's `na1d`, `na2d` and `na3d`, computed by regard: `from regard.torch.natten import na2d`."""

from regard.torch.dropins.natten import na1d, na2d, na3d, neighborhood_attention_generic

__all__ = ["na1d", "na2d", "na3d", "neighborhood_attention_generic"]
