"""NATTEN's functions and modules, computed by regard: `from regard.torch.natten import na2d`."""

from regard.arguments.signatures import listed
from regard.torch.dropins.natten import (
    NeighborhoodAttention1D,
    NeighborhoodAttention2D,
    NeighborhoodAttention3D,
    na1d,
    na2d,
    na3d,
)

__all__ = [
    "NeighborhoodAttention1D",
    "NeighborhoodAttention2D",
    "NeighborhoodAttention3D",
    "na1d",
    "na2d",
    "na3d",
]

listed(*(globals()[name] for name in __all__))
