"""Caches of a bounded number of entries, which any thread may read at any time."""

from typing import Any


def insert(cache: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Cache a value, and drop the oldest entries beyond `size`."""
    for oldest in list(cache)[: max(0, len(cache) - size + 1)]:
        cache.pop(oldest, None)
    cache[key] = value
