"""Statistics of attention heads."""

from regard.arguments.signatures import listed
from regard.interpret.heads import (
    KINDS,
    HeadStatistics,
    by_chance,
    current_token,
    duplicate_token,
    entropy,
    head_statistics,
    induction,
    kind,
    normalized_entropy,
    previous_token,
    sink,
    sink_rate,
    strongest,
)
from regard.interpret.maps import cluster_heads, copying, effective_rank, head_distance, repeated_tokens
from regard.interpret.streamed import measure_heads

__all__ = [
    "KINDS",
    "HeadStatistics",
    "by_chance",
    "cluster_heads",
    "copying",
    "current_token",
    "duplicate_token",
    "effective_rank",
    "entropy",
    "head_distance",
    "head_statistics",
    "induction",
    "kind",
    "measure_heads",
    "normalized_entropy",
    "previous_token",
    "repeated_tokens",
    "sink",
    "sink_rate",
    "strongest",
]

listed(*(globals()[name] for name in __all__))
