"""What attention heads look at, measured."""

from .heads import (
    KINDS,
    HeadStatistics,
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

__all__ = [
    "KINDS",
    "HeadStatistics",
    "current_token",
    "duplicate_token",
    "entropy",
    "head_statistics",
    "induction",
    "kind",
    "normalized_entropy",
    "previous_token",
    "sink",
    "sink_rate",
    "strongest",
]
