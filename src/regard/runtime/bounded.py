"""Caches of a bounded number of entries, which any thread may read meanwhile."""

from typing import Any


def insert(cache: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Cache a value; of more than `size` entries the oldest go."""
    for oldest in list(cache)[: max(0, len(cache) - size + 1)]:
        cache.pop(oldest, None)
    cache[key] = value
