"""Caches of a bounded size, which any thread may read at any time."""

from typing import Any


def insert(cache: dict[Any, Any], key: Any, value: Any, size: int) -> None:
    """Cache a value, and drop the oldest entries beyond `size`."""
    for oldest in list(cache)[: max(0, len(cache) - size + 1)]:
        cache.pop(oldest, None)
    cache[key] = value


def make_room(cache: dict[Any, Any], nbytes: int, most: int) -> None:
    """Drop the oldest entries until the rest and `nbytes` more are at most `most` bytes.

    Values have their size in `nbytes`.
    """
    sizes = [(key, value.nbytes) for key, value in list(cache.items())]
    total = nbytes + sum(size for _, size in sizes)
    for oldest, size in sizes:
        if total <= most:
            return
        cache.pop(oldest, None)
        total -= size
