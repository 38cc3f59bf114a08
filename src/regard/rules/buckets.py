"""Buckets of relative positions, as T5 has them."""

from __future__ import annotations  # so that `help` shows the names of types

from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike, NDArray

from regard.arguments import values
from regard.rules.tracing import as_array


def t5_buckets(
    offset: ArrayLike, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> NDArray[np.int64]:
    """Return T5's bucket of each relative position (Raffel et al. 2020, section 2.1).

    int64, of the shape of `offset`. Half of the buckets hold one distance each. The rest grow
    geometrically up to `max_distance`; everything beyond it shares the last one. Bidirectional: the
    second half of all buckets is for keys after the query. Otherwise those share bucket 0 with the
    query's own position.

    Args:
        offset: integers j - i, key minus query.
        num_buckets: the number of entries of the table.
        max_distance: the distance from which on all share the last bucket.
        bidirectional: True in T5's encoder, False in its decoder.

    With e distances of their own and m buckets beyond, distance n ≥ e lies in bucket e + ⌊m
    log(n/e) / log(D/e)⌋. Implementations take this logarithm in float32, which can fall on the
    wrong side of an edge. Here edges are exact: bucket e + k begins at the least integer n with n^m
    ≥ D^k e^(m-k). The two agree for the sizes in use.

    Raises:
        TypeError: for offsets that are not integers.
        ValueError: for fewer than 4 buckets, or than 2 in one direction, and for a max_distance
            that is not beyond the distances with a bucket of their own.

    >>> t5_buckets(np.arange(-3, 4))
    array([ 3,  2,  1,  0, 17, 18, 19])
    >>> t5_buckets([-1000, -20, -10, 5], bidirectional=False)
    array([31, 17, 10,  0])
    """
    bidirectional = values.boolean("bidirectional", bidirectional)
    o = as_array("offset", offset)
    if o.dtype.kind not in "iu":
        raise TypeError(f"offset must be integers, j - i, got {o.dtype}")
    num_buckets = values.integer("num_buckets", num_buckets, least=4 if bidirectional else 2, below=2**31)
    side = num_buckets // 2 if bidirectional else num_buckets
    own = side // 2
    beyond = side - own
    max_distance = values.integer("max_distance", max_distance, least=own + 1, below=2**62)

    edges = [*range(1, own)]
    for k in range(beyond):
        power = max_distance**k * own ** (beyond - k)
        edges.append(own + bisect_left(range(own, max_distance), power, key=lambda n: n**beyond))
    o = np.clip((np.minimum(o, 2**62) if o.dtype == np.uint64 else o).astype(np.int64), -max_distance, max_distance)
    distance = np.abs(o) if bidirectional else np.maximum(-o, 0)
    buckets = np.asarray(np.searchsorted(edges, distance, side="right"), np.int64)
    return np.asarray(buckets + side * (o > 0) if bidirectional else buckets)
