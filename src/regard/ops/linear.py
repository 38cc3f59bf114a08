"""Linear attention: exp(q · k) replaced by φ(q) · φ(k).

Keys are summed once, not for every query.
"""

from __future__ import annotations  # so that `help` shows the names of types

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from regard.arguments.frameworks import NUMPY, Namespace, dispatched
from regard.core import checks
from regard.core.layout import Layout
from regard.core.types import Array, LayoutName
from regard.ops.keymask import KeyMask, by_documents
from regard.ops.normalization import problem_from
from regard.reference.specification import evaluate_one, indices_of
from regard.runtime.threads import one_blas_thread

NDArray = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class RandomFeatures:
    """Positive orthogonal random features, FAVOR+.

    Choromanski et al. 2021, https://arxiv.org/abs/2009.14794.

        φ(x)[r] = exp(W[r,a] y[a] - |y|²/2) / √m,   y = x / d^(1/4),   E[φ(q) · φ(k)] = exp(q · k / √d)

    W has m = `num_features` rows: normal vectors, orthogonal within each block of d. All heads share W, which is a
    function of (num_features, d, seed). The variance grows as exp(|q + k|² / √d): the norms decide how large m must be.
    """

    num_features: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("num_features", self.num_features, least=1)
        if checks.integer("seed", self.seed) < 0:
            raise ValueError(f"seed must not be negative, got {checks.shown(self.seed)}")

    def projection(self, d: int) -> NDArray:
        """Return W, (num_features, d) in float64."""
        random = np.random.default_rng(self.seed)
        normal = random.standard_normal((math.ceil(self.num_features / d), d, d))
        orthogonal, triangular = np.linalg.qr(normal)
        # QR alone is biased to a sign; with a positive diagonal of R, rotations are uniform.
        orthogonal *= np.sign(np.diagonal(triangular, axis1=-2, axis2=-1))[..., None, :]
        norms = np.sqrt(random.chisquare(d, normal.shape[:-1]))
        rows: NDArray = (orthogonal.swapaxes(-1, -2) * norms[..., None]).reshape(-1, d)
        return rows[: self.num_features]


LOWEST = -1e30  # below every useful log φ, and finite: −∞ − (−∞) would be NaN

FeatureMap = str | RandomFeatures | Callable[[NDArray], NDArray]


def linear_spec(
    query: NDArray, key: NDArray, value: NDArray, *, feature_map: FeatureMap = "elu", causal: bool = False,
    mask: Any = None,
) -> tuple[NDArray, NDArray]:  # fmt: skip
    """Compute `linear_attention` by its definition, in float64 and O(n²), with any mask.

    Returns its output and its weights (..., h, n_q, n_k).

    >>> out, weights = linear_spec(np.eye(2), np.eye(2), np.array([[1.0], [4.0]]))
    >>> weights
    array([[0.55555556, 0.44444444],
           [0.44444444, 0.55555556]])
    """
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    if q.ndim > 2:
        k, v = (x.repeat(q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    p = problem_from(q, k, v, mask=mask, causal=causal)
    visible = np.ones((q.shape[-2], k.shape[-2]), bool)
    if p.mask_node is not None:
        visible = evaluate_one(p.mask_node, indices_of(p, np.float64), (p.batch, p.heads, p.n_q, p.n_k))
        visible = visible.reshape(*(p.shape(p.n_q, p.n_k) if q.ndim > 2 else (p.n_q, p.n_k)))

    phi = _features(feature_map, q.shape[-1], q.dtype)
    if phi.per_feature:  # softmax over the features of a query, over the visible keys for a feature
        e = np.where(visible[..., None], np.exp(k[..., None, :, :]), 0)
        over_keys = _divide(e, e.sum(-2, keepdims=True))
        over_features = _divide(e := np.exp(q), e.sum(-1, keepdims=True))
        a = np.einsum("...ir,...ijr->...ij", over_features, over_keys)
    else:
        phi_q, phi_k = (np.exp(phi.of(x)) if phi.log else phi.of(x) for x in (q, k))
        a = np.where(visible, np.einsum("...ir,...jr->...ij", phi_q, phi_k), 0)
    weights = _divide(a, a.sum(-1, keepdims=True))
    return np.einsum("...ij,...jb->...ib", weights, v), weights


@dispatched
def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    feature_map: FeatureMap = "elu",
    causal: bool = False,
    mask: Any = None,
    chunk: int = 128,
    layout: LayoutName = "bhnd",
) -> Array:
    """Attend with weights φ(q) · φ(k) instead of exp(q · k), in O(n · d²) time.

    Memory is O(n · d + d²).

        A[h,i,j] = φ(Q)[h,i,r] φ(K)[h,j,r]         for the j that i may see
        O[h,i,b] = A[h,i,j] V[h,j,b] / Σ_j A[h,i,j]

    This is not softmax attention (see `RandomFeatures` for an approximation of it).

    Args:
        query: (..., h, n_q, d), or a plain matrix (n_q, d) with key and value likewise.
        key: (..., h_kv, n_k, d), h a multiple of h_kv. Leading dimensions broadcast.
        value: (..., h_kv, n_k, d_v). All three share one dtype of float16, bfloat16, float32,
            float64.
        feature_map: φ. One of "elu": elu(x) + 1 (Katharopoulos et al. 2020,
            https://arxiv.org/abs/2006.16236). "relu": max(x, 0). "softmax": efficient attention
            (Shen et al. 2021, https://arxiv.org/abs/1812.01243), softmax over features for a query,
            and over visible keys for each feature of the keys. "favor": `RandomFeatures()`, stable
            for any norms. Or a `RandomFeatures`, or a function of the last axis alone, from
            (..., d) to (..., r), not negative, which is given float32 or float64.
        causal: query i sees the keys j ≤ i + n_k - n_q, as in `regard.attention`; the others have
            no influence.
        mask: the keys that queries see, in sequences of different lengths or packed documents:
            booleans or 0/1 (..., 1, n_k), `regard.padding`, `regard.documents` of contiguous ids,
            and `&` of them. A mask that hides a key from some queries of a document alone needs
            `regard.attention`.
        chunk: keys and queries taken at once. It changes rounding, speed and memory, not the
            meaning.
        layout: "bhnd", or "bnhd" for query, key, value and output (..., n, heads, d).

    Returns:
        (..., h, n_q, d_v) in the dtype of the inputs; sums are float64 for float64, else float32. A
        query that sees no key, or has zero weights only (relu), gives 0.

    Raises:
        TypeError: for dtypes.
        ValueError: for shapes that do not fit, d = 0, other masks, and unknown feature maps or
            features of a wrong shape.

    >>> import numpy as np, regard
    >>> x = np.eye(3, dtype=np.float32)
    >>> regard.linear_attention(x, x, x, causal=True).round(3)
    array([[1.   , 0.   , 0.   ],
           [0.455, 0.545, 0.   ],
           [0.312, 0.312, 0.375]], dtype=float32)
    """
    arranged, shape, hidden = _checked(query, key, value, causal, mask, chunk, layout)
    q, k, v = (arranged.to_bhnd(np.asarray(x)) for x in (query, key, value))
    wide = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    phi = _features(feature_map, q.shape[-1], wide)

    def attend(q: NDArray, k: NDArray, v: NDArray, keep: NDArray | None) -> NDArray:
        lead = np.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        out = np.zeros((*lead, *q.shape[-3:-1], v.shape[-1]), q.dtype)
        _stream(q, k, v, keep, phi, wide, causal, chunk, out)
        return out

    with one_blas_thread(), np.errstate(invalid="ignore", over="ignore"):
        return cast(Array, arranged.from_bhnd(_masked(attend, NUMPY, q, k, v, hidden, causal, shape)))


def _masked(
    attend: Any, space: Namespace, q: Any, k: Any, v: Any, hidden: KeyMask, causal: bool, shape: tuple[int, ...]
) -> Any:
    """Attend to the visible keys, within documents if there are any."""
    keep = hidden.visible(lambda x: space.like(x, q))
    if hidden.documents is None or 0 in shape or not k.shape[-2]:
        return attend(q, k, v, keep)
    return by_documents(attend, space, q, k, v, keep, hidden.documents, causal)


def _grouped(keep: Any, h_kv: int) -> Any:
    """Return visible keys (..., h or 1, n) as (..., h_kv, group, n, 1), with 1 for heads that share them."""
    heads = (h_kv, -1) if keep.ndim > 1 and keep.shape[-2] > 1 else (1, 1)
    return keep.reshape(*keep.shape[:-2], *heads, keep.shape[-1], 1)


def _checked(
    query: Any, key: Any, value: Any, causal: bool, mask: Any, chunk: int, layout: LayoutName
) -> tuple[Layout, tuple[int, ...], KeyMask]:
    """Check the arguments; return their layout, the output's shape and what the mask hides."""
    q, k, v = checks.operands(query, key, value)
    checks.boolean("causal", causal)
    checks.integer("chunk", chunk, least=1)
    arranged = Layout.of(q, layout)
    q, k, v = (arranged.to_bhnd(x) for x in (q, k, v))
    lead = checks.sizes(q, k, v)
    if q.shape[-1] == 0:
        raise ValueError(f"linear attention needs at least one feature, got query {query.shape} and key {key.shape}")
    hidden = KeyMask.of(mask, lead, q.shape[-3], q.shape[-2], k.shape[-2])
    return arranged, (*lead, *q.shape[-3:-1], v.shape[-1]), hidden


def _stream(
    q: NDArray, k: NDArray, v: NDArray, keep: NDArray | None, phi: _Features, wide: np.dtype[Any], causal: bool,
    chunk: int, out: NDArray,
) -> None:  # fmt: skip
    (h, n_q, d), (h_kv, n_k, d_v) = q.shape[-3:], v.shape[-3:]
    # Heads as (h_kv, group): the queries of a group share the sums of one key-value head.
    q = q.reshape(*q.shape[:-3], h_kv, h // h_kv if h_kv else 1, n_q, d)
    k, v = k[..., None, :, :], v[..., None, :, :]
    if keep is not None:
        keep = np.broadcast_to(keep := _grouped(keep, h_kv), (*keep.shape[:-2], n_k, 1))
        k, v = (np.where(keep, x, x.dtype.type(0)) for x in (k, v))

    def keys(start: int, stop: int) -> tuple[NDArray, NDArray]:
        values = np.ones((*v.shape[:-2], stop - start, d_v + 1), wide)  # the column of ones sums the weights
        values[..., :-1] = v[..., start:stop, :]
        features = phi.of(k[..., start:stop, :].astype(wide))
        if keep is not None:
            features = phi.visible(features, keep[..., start:stop, :])
        return features, values

    def queries(start: int, stop: int) -> NDArray:
        return q[..., start:stop, :].astype(wide)

    def store(start: int, stop: int, sums: NDArray) -> None:
        rows = _divide(sums[..., :-1], sums[..., -1:])
        out[..., start:stop, :] = rows.reshape(*rows.shape[:-4], h, stop - start, d_v)

    def diagonal(start: int, stop: int, state: _State) -> _State:
        """Attend from rows that see the keys of the state, then one more key each."""
        pending = [(start, stop)]
        while pending:
            start, stop = pending.pop()
            features, values = keys(start + n_k - n_q, stop + n_k - n_q)
            if stop - start > 1 and not phi.safe(features, values, state):
                middle = (start + stop) // 2
                pending += [(middle, stop), (start, middle)]
                continue
            features, state = phi.rescaled(features, state)
            phi_q = phi.query(queries(start, stop), state, features)
            store(start, stop, phi_q @ state.sums + np.tril(phi_q @ features.swapaxes(-1, -2)) @ values)
            state = state.plus(features, values)
        return state

    seen_by_all = max(n_k - n_q, 0) if causal else n_k
    first = max(n_q - n_k, 0) if causal or not n_k else 0  # rows before it see nothing
    features, values = keys(0, 0)
    state = _State(features.swapaxes(-1, -2) @ values, np.full((1, features.shape[-1]), -np.inf, wide))
    for start in range(0, seen_by_all, chunk):
        features, values = keys(start, min(start + chunk, seen_by_all))
        features, state = phi.rescaled(features, state)
        state = state.plus(features, values)
    for start in range(first, n_q, chunk):
        stop = min(start + chunk, n_q)
        if causal:
            state = diagonal(start, stop, state)
        else:
            store(start, stop, phi.query(queries(start, stop), state) @ state.sums)


class _State(NamedTuple):
    """Sums over the keys so far.

    sums[r,b] = Σ_j φ(k_j)[r] [v_j, 1][b] / exp(peak[r]); peak (1, r) is the largest log φ(k_j)[r].
    """

    sums: NDArray
    peak: NDArray

    def plus(self, features: NDArray, values: NDArray) -> _State:
        return _State(self.sums + features.swapaxes(-1, -2) @ values, self.peak)


@dataclass(frozen=True)
class _Features:
    """A feature map from (..., n, d) to (..., n, r).

    of: φ itself, or log φ where φ is an exponential.
    """

    of: Callable[[Any], Any]
    log: bool = False
    per_feature: bool = False  # normalized over keys for each feature, not for each query
    space: Namespace = NUMPY

    @property
    def xp(self) -> Any:
        return self.space.xp

    def constant(self, x: Any) -> Any:
        return self.space.constant(x)

    def visible(self, features: Any, keep: Any) -> Any:
        """Return φ of keys, 0 for those that are not visible, whose values are 0.

        Where a row sees none, exponentials relative to their peak are 1, and their values still sum to 0.
        """
        return self.xp.where(keep, features, LOWEST if self.log else 0.0)

    def rescaled(self, features: NDArray, state: _State) -> tuple[NDArray, _State]:
        """Return φ of keys, and the state, relative to peaks that include these keys."""
        if not self.log:
            return features, state
        peak = np.maximum(state.peak, features.max(-2, keepdims=True))
        return np.exp(features - peak), _State(state.sums * np.exp(state.peak - peak).swapaxes(-1, -2), peak)

    def safe(self, features: NDArray, values: NDArray, state: _State) -> bool:
        """Return True if all rows of a chunk can share its peaks.

        Then no row's terms underflow for a peak too far below them. Nor does a hidden value that is
        not finite turn a zero weight into NaN.
        """
        if not np.isfinite(values).all():
            return False
        if not self.log:
            return True
        lowest = np.maximum(state.peak, features[..., :1, :])
        return bool((features.max(-2, keepdims=True) - lowest <= 20).all())

    def query(self, q: Any, state: _State, features: Any = None) -> Any:
        """Return φ(q) up to a factor for each row, in units of the state.

        features: of keys that are visible from their own row on.
        """
        phi = self.of(q)
        if self.log:
            phi = phi if self.per_feature else phi + state.peak
            phi = self.xp.exp(phi - self.constant(self.xp.amax(phi, -1)[..., None]))
        if self.per_feature:
            phi = phi / (state.sums[..., None, :, -1] + (0 if features is None else features.cumsum(-2)))
        return phi


def in_parallel(
    space: Namespace,
    query: Any,
    key: Any,
    value: Any,
    *,
    feature_map: FeatureMap = "elu",
    causal: bool = False,
    mask: Any = None,
    chunk: int = 128,
    layout: LayoutName = "bhnd",
) -> Any:
    """Compute `linear_attention` on the arrays of a framework.

    The function neither loops over chunks nor branches on values, so that it can be traced. Memory is O(n · (r + d_v))
    for r features φ. If causal, the sums of chunks take n · r · d_v / chunk more.
    """
    arrays = {"query": query, "key": key, "value": value}
    hollow = {name: space.hollow(name, x) for name, x in arrays.items()}
    arranged, shape, hidden = _checked(**hollow, causal=causal, mask=mask, chunk=chunk, layout=layout)
    dtype = hollow["query"].dtype
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    q, k, v = (space.cast(arranged.to_bhnd(x), wide) for x in arrays.values())
    if 0 in shape or not k.shape[-2]:
        xp = space.xp
        return arranged.from_bhnd(space.cast(xp.zeros_like(space.like(np.zeros(shape, wide), q)), dtype))
    phi = _features(feature_map, q.shape[-1], wide, space)

    def attend(q: Any, k: Any, v: Any, keep: Any) -> Any:
        return _at_once(phi, q, k, v, keep, causal, chunk)

    return arranged.from_bhnd(space.cast(_masked(attend, space, q, k, v, hidden, causal, shape), dtype))


def _at_once(phi: _Features, q: Any, k: Any, v: Any, keep: Any, causal: bool, chunk: int) -> Any:
    """Return the output (..., h, n_q, d_v) without a loop over chunks."""
    xp, (h, n_q, d), (h_kv, n_k) = phi.xp, q.shape[-3:], k.shape[-3:-1]
    shape = (*np.broadcast_shapes(*(tuple(x.shape[:-3]) for x in (q, k, v))), h, n_q, v.shape[-1])
    rows = min(n_q, n_k) if causal else n_q  # the rows before them see nothing
    q = q[..., n_q - rows :, :].reshape(*q.shape[:-3], h_kv, h // h_kv, rows, d)
    k, v = k[..., None, :, :], v[..., None, :, :]
    if keep is not None:
        keep = _grouped(keep, h_kv)
        k, v = (xp.where(keep, x, 0.0) for x in (k, v))
    values = xp.concatenate([v, xp.ones_like(v[..., :1])], -1)  # the column of ones sums the weights
    sums = _hierarchy(phi, q, k, values, keep, chunk) if causal else _whole(phi, q, k, values, keep)
    out = _divide(sums[..., :-1], sums[..., -1:], xp)
    out = xp.broadcast_to(out.reshape(*out.shape[:-4], h, rows, shape[-1]), (*shape[:-2], rows, shape[-1]))
    if rows < n_q:
        nothing = xp.broadcast_to(xp.zeros_like(out[..., :1, :]), (*shape[:-2], n_q - rows, shape[-1]))
        out = xp.concatenate([nothing, out], -2)
    return out


def _whole(phi: _Features, q: Any, k: Any, values: Any, keep: Any) -> Any:
    """Return weighted sums of the values over all keys, each row up to a factor."""
    features = phi.of(k) if keep is None else phi.visible(phi.of(k), keep)
    peak = phi.constant(phi.xp.amax(features, -2)[..., None, :])
    if phi.log:
        features = phi.xp.exp(features - peak)
    state = _State(features.swapaxes(-1, -2) @ values, peak)
    return phi.query(q, state) @ state.sums


def _hierarchy(phi: _Features, q: Any, k: Any, values: Any, keep: Any, chunk: int) -> Any:
    """Return weighted sums of values up to each row's key, up to a factor.

    The last row's key is the last. A row sees all keys of the chunks before its own. Its own chunk
    is halved repeatedly: a row in the second half sees the first half, and at last its own key. No
    product has a key that one of its rows does not see. So hidden keys have no influence.
    Exponentials are relative to the largest of the keys: they never overflow, nor do all underflow.
    """
    xp = phi.xp
    c = 1 << (min(chunk, 2 * k.shape[-2]).bit_length() - 1)
    rows, n = q.shape[-2], k.shape[-2]
    features, q = phi.of(k) if keep is None else phi.visible(phi.of(k), keep), phi.of(q)
    scale = None
    if phi.log:
        if phi.per_feature:
            q = q - _accumulated(xp.logaddexp, features, xp)[..., n - rows :, :]
        highest = _accumulated(xp.maximum, phi.constant(features), xp)[..., n - rows :, :]
        scale = xp.amax(phi.constant(q) + highest, -1)[..., None]

    def padded(x: Any, fill: float = 0.0) -> Any:
        """Pad x at the front to the number of keys, and at the end to a whole chunk."""
        size = (*x.shape[:-2], n - x.shape[-2], x.shape[-1]), (*x.shape[:-2], -n % c, x.shape[-1])
        before, after = (xp.broadcast_to(xp.full_like(x[..., :1, :], fill), shape) for shape in size)
        return xp.concatenate([before, x, after], -2)

    q, features, values = padded(q, LOWEST if phi.log else 0.0), padded(features), padded(values)
    scale = None if scale is None else padded(scale)

    def split(x: Any, *sizes: int) -> Any:
        return x.reshape(*x.shape[:-2], -1, *sizes, x.shape[-1])

    def left(q: Any, peak: Any, scale: Any) -> Any:
        return xp.exp(q + peak - scale) if phi.log else q

    def right(features: Any, peak: Any) -> Any:
        return xp.exp(features - peak) if phi.log else features

    def peaks(features: Any) -> Any:
        return phi.constant(xp.amax(features, -2)[..., None, :])

    chunks = split(features, c)
    peak = peaks(chunks)
    sums = right(chunks, peak).swapaxes(-1, -2) @ split(values, c)
    peak, sums = _before(peak, sums, phi.log, xp)
    sums_so_far = left(split(q, c), peak, None if scale is None else split(scale, c)) @ sums
    sums_so_far = sums_so_far.reshape(*sums_so_far.shape[:-3], -1, sums_so_far.shape[-1])
    size = c // 2
    while size:
        keys, pairs = split(features, 2, size)[..., 0, :, :], split(values, 2, size)[..., 0, :, :]
        peak = peaks(keys)
        below = None if scale is None else split(scale, 2, size)[..., 1, :, :]
        weights = left(split(q, 2, size)[..., 1, :, :], peak, below) @ right(keys, peak).swapaxes(-1, -2)
        part = weights @ pairs
        part = xp.stack([xp.zeros_like(part), part], -3)
        sums_so_far = sums_so_far + part.reshape(*part.shape[:-4], -1, part.shape[-1])
        size //= 2
    own = left(q, features, scale) if phi.log else q * features
    sums_so_far = sums_so_far + own.sum(-1)[..., None] * values
    return sums_so_far[..., n - rows : n, :]


def _accumulated(combine: Any, x: Any, xp: Any) -> Any:
    """Return the running result of an associative operation along rows.

    x: (..., n, r).
    """
    step = 1
    while step < x.shape[-2]:
        x = xp.concatenate([x[..., :step, :], combine(x[..., step:, :], x[..., :-step, :])], -2)
        step *= 2
    return x


def _before(peak: Any, sums: Any, log: bool, xp: Any) -> tuple[Any, Any]:
    """Return the peaks and sums over all chunks before each one.

    peak: (..., c, 1, r). sums: (..., c, r, e).
    """

    def later(x: Any, step: int, fill: float) -> Any:
        return xp.concatenate([xp.full_like(x[..., :step, :, :], fill), x[..., : x.shape[-3] - step, :, :]], -3)

    peak, sums = later(peak, 1, LOWEST), later(sums, 1, 0)
    step = 1
    while step < sums.shape[-3]:
        other, more = later(peak, step, LOWEST), later(sums, step, 0)
        if log:
            top = xp.maximum(peak, other)
            sums = sums * xp.exp(peak - top).swapaxes(-1, -2) + more * xp.exp(other - top).swapaxes(-1, -2)
            peak = top
        else:
            sums = sums + more
        step *= 2
    return peak, sums


def _features(feature_map: FeatureMap, d: int, dtype: np.dtype[Any], space: Namespace = NUMPY) -> _Features:
    xp = space.xp
    named = isinstance(feature_map, str) and feature_map in ("elu", "relu", "softmax", "favor")
    if not (named or isinstance(feature_map, RandomFeatures) or callable(feature_map)):
        names = "'elu', 'relu', 'softmax', 'favor', RandomFeatures(...) or a function"
        raise ValueError(f"feature_map must be {names}, got {checks.shown(feature_map)}")
    if feature_map == "favor":
        feature_map = RandomFeatures()
    if isinstance(feature_map, RandomFeatures):
        w = (feature_map.projection(d).T * d**-0.25).astype(dtype)
        return _Features(
            lambda x: x @ space.like(w, x) - (x * x).sum(-1)[..., None] / (2 * math.sqrt(d)), log=True, space=space
        )  # 1/√m cancels
    if feature_map == "elu":
        return _Features(lambda x: xp.where(x > 0, x + 1, xp.exp(xp.where(x > 0, 0.0, x))), space=space)
    if feature_map == "relu":
        return _Features(lambda x: xp.where(x <= 0, 0.0, x), space=space)
    if feature_map == "softmax":
        return _Features(lambda x: x, log=True, per_feature=True, space=space)
    function: Callable[[Any], Any] = checks.function("feature_map", feature_map, ("x",))

    def of(x: Any) -> Any:
        features = np.asarray(function(x)) if space is NUMPY else function(x)
        if space is NUMPY and features.dtype.kind not in "biuf":
            raise TypeError(f"feature_map must return numbers, got {features.dtype}")
        if features.ndim != x.ndim or features.shape[:-1] != x.shape[:-1]:
            shapes = tuple(x.shape), tuple(features.shape)
            raise ValueError("feature_map must keep all but the last axis of {}, got {}".format(*shapes))
        return space.cast(features, dtype)

    return _Features(of, space=space)


def _divide(a: Any, total: Any, xp: Any = np) -> Any:
    """Return a / total with 0 / 0 = 0; NaN stays NaN."""
    return a / xp.where(total == 0, 1.0, total)
