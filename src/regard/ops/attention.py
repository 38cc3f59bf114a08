"""The public calls: validate once, build one frozen `Problem`, run the first engine that supports it."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Unpack, cast, overload
from weakref import WeakKeyDictionary, ref

import numpy as np

from regard.arguments.frameworks import dispatched
from regard.arguments.signatures import passing_on
from regard.core import checks, rowsums
from regard.core.problem import Differential, Outputs, Problem, compute_dtype, remember
from regard.core.statistics import Seen, Statistic, each_array
from regard.core.types import Array, ArrayLike, Layout, MaskLike, Options, ScoreLike
from regard.engines import Engine, choose, engines
from regard.ops import fastpath
from regard.rules import Mask, Score, Table, type_name
from regard.rules import causal as causal_rule

NDArray = np.ndarray[Any, np.dtype[Any]]
ORIGIN = (0, 0, 0)
KEPT = 256  # forms of calls: what their checks found


class Frame(NamedTuple):
    """How the caller's arrays lie: `inward` makes them (..., h, n, d), `outward` turns results back; views, no copies.

    matrices: plain (n, d), one head. positions_first: (..., n, h, d).
    """

    matrices: bool
    positions_first: bool

    @classmethod
    def of(cls, query: Any, layout: object) -> Frame:
        return cls(query.ndim == 2, checks.layout(layout) == "bnhd" and query.ndim > 2)

    def inward(self, x: NDArray) -> NDArray:
        return x[None] if self.matrices else x.swapaxes(-2, -3) if self.positions_first else x

    def outward(self, x: NDArray) -> NDArray:
        return x[0] if self.matrices else x.swapaxes(-2, -3) if self.positions_first else x

    def per_head(self, x: NDArray) -> NDArray:
        """A statistic or the weights: (..., h, ...) in both layouts, without h for matrices."""
        return x[0] if self.matrices else x

    def inward_rows(self, x: NDArray) -> NDArray:
        """A per-query array of the caller as (..., h, n_q)."""
        return x[None] if self.matrices else x

    def per_head_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[1:] if self.matrices else shape

    def out_shape(self, p: Problem) -> tuple[int, ...]:
        """The shape of the output as the caller sees it."""
        return tuple(self.outward(np.broadcast_to(np.float32(0), p.shape(p.n_q, p.d_v))).shape)

    def seen(self, found: Mapping[Statistic, Any]) -> Seen:
        return Seen({s: each_array(x, self.per_head) for s, x in found.items()})

    def outputs(self, x: Outputs) -> Outputs:
        out, *rest = x
        return Outputs(
            None if out is None else self.outward(out), *(None if a is None else self.per_head(a) for a in rest)
        )


def problem_from(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: MaskLike = None,
    causal: bool = False,
    score: ScoreLike = None,
    bias: Any = None,
    scale: float | None = None,
    sink: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    offset: Any = None,
    origin: tuple[int, int, int] = ORIGIN,
    layout: Layout = "bhnd",
    observe: Sequence[str | Statistic] = (),
) -> Problem:
    """The call with these arguments (see `attention`), checked and normalized to (..., h, n, d); nothing is copied."""
    signature = _signature(
        query, key, value, mask, causal, score, bias, scale, sink, dropout, seed, offset, origin, layout, observe
    )
    if signature is not None and (found := _forms.get(signature)):
        frame, form = found
        q, k, v = frame.inward(query), frame.inward(key), frame.inward(value)
        rule = causally(mask) if causal else mask  # type: ignore[arg-type]
        return Problem.again(form, query=q, key=k, value=v, mask=rule, score=score)
    query, key, value = checks.operands(query, key, value)
    frame = Frame.of(query, layout)
    q, k, v = (frame.inward(x) for x in (query, key, value))
    lead = checks.sizes(q, k, v, (query, key, value))
    h, n_q, n_k = q.shape[-3], q.shape[-2], k.shape[-2]
    rule = checks.mask(mask, lead, h, n_q, n_k)
    if checks.boolean("causal", causal):
        rule = causally(rule)
    p_drop, seed_int = checks.dropout(dropout, seed)
    problem = Problem(
        query=q,
        key=k,
        value=v,
        lead=lead,
        mask=rule,
        score=checks.score(score),
        bias=checks.bias(bias, lead, h, n_q, n_k),
        scale=checks.scale(scale, q.shape[-1], compute_dtype(q.dtype)),
        sink=checks.sink(sink, h),
        dropout=p_drop,
        seed=seed_int,
        offset=checks.offset(offset, lead, n_q, n_k),
        origin=checks.origin(origin),
        positions_first=frame.positions_first,
        observe=checks.observe(observe),
    )
    checks.covers(problem)
    checks.observable(problem)
    if signature is not None and problem.batch <= KEPT:
        object.__setattr__(problem, "signature", signature)
        problem.offset.setflags(write=False)
        remember(_forms, signature, (frame, problem.form), KEPT)
    return problem


_forms: dict[Any, tuple[Frame, dict[str, Any]]] = {}


def _signature(
    query: Any, key: Any, value: Any, mask: Any, causal: Any, score: Any, bias: Any, scale: Any, sink: Any,
    dropout: Any, seed: Any, offset: Any, origin: Any, layout: Any, observe: Any,
) -> tuple[Any, ...] | None:  # fmt: skip
    """What a call with few options is but for the contents of arrays; None for others, whose checks look at those.

    A rule never changes, and a reference that is dead equals no other: the form of a rule that is gone goes unused.
    """
    if not (
        bias is sink is seed is offset is None
        and origin is ORIGIN
        and type(observe) is tuple
        and not observe
        and type(query) is type(key) is type(value) is np.ndarray
        and (mask is None or (type(mask) is Mask and not mask.dense))
        and (score is None or type(score) is Score)
        and type(causal) is bool
        and (scale is None or (type(scale) is float and scale))  # 0.0 equals −0.0
        and type(dropout) is float
        and not dropout
        and type(layout) is str
    ):
        return None
    return (
        query.dtype, query.shape, query.strides, key.dtype, key.shape, key.strides,
        value.dtype, value.shape, value.strides,
        mask if mask is None else ref(mask), causal, score if score is None else ref(score), scale, layout,
    )  # fmt: skip


_causal: Mask = causal_rule.__wrapped__()  # type: ignore[attr-defined]
_causally: WeakKeyDictionary[Mask, Mask] = WeakKeyDictionary()


def causally(mask: Mask | None) -> Mask:
    """What a mask allows of the keys up to the query; as long as the mask is there, the same rule each time."""
    if mask is None:
        return _causal
    found = _causally.get(mask)
    if found is None:
        found = _causally[mask] = _causal & mask
    return found


@overload
def attention(  # type: ignore[overload-overlap]  # () is also a sequence of statistics
    query: Array,
    key: Array,
    value: Array,
    *,
    return_weights: Literal[False] = False,
    observe: tuple[()] = (),
    engine: str | None = None,
    **options: Unpack[Options],
) -> Array: ...
@overload
def attention(  # type: ignore[overload-overlap]  # () is also a sequence of statistics
    query: Array,
    key: Array,
    value: Array,
    *,
    return_weights: Literal[True],
    observe: tuple[()] = (),
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_weights: Literal[False] = False,
    observe: Sequence[str | Statistic],
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Seen]: ...
@overload
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_weights: Literal[True],
    observe: Sequence[str | Statistic],
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Array, Seen]: ...
@overload
def attention(
    query: Array, key: Array, value: Array, *, return_weights: bool = False, observe: Sequence[str | Statistic] = (),
    engine: str | None = None, **options: Unpack[Options],
) -> Any: ...  # fmt: skip
@dispatched
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: MaskLike = None,
    causal: bool = False,
    score: ScoreLike = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    sink: ArrayLike | None = None,
    dropout: float = 0.0,
    seed: int | ArrayLike | None = None,
    offset: int | ArrayLike | None = None,
    origin: tuple[int, int, int] = ORIGIN,
    layout: Layout = "bhnd",
    return_weights: bool = False,
    observe: Sequence[str | Statistic] = (),
    engine: str | None = None,
) -> Any:
    """Compute exact attention in O(n) memory: softmax(score(scale · Q Kᵀ) + bias) V.

    Vaswani et al. 2017. Three dimensions are (heads, n, d), never (batch, n, d).

    Args:
        query: (..., h, n_q, d); or (n_q, d), one head, with key and value likewise.
        key: (..., h_kv, n_k, d), h a multiple of h_kv (grouped heads). Leading dimensions
            broadcast.
        value: (..., h_kv, n_k, d_v). All three share one dtype of float16, bfloat16, float32,
            float64.
        mask: who may be attended to, True = attend: a rule such as `regard.window(256) &
            regard.documents(ids)`, a function of (b, h, i, j), or an array of booleans or 0/1 that
            aligns right to (..., h, n_q, n_k). What is masked has no influence, NaN included; a
            query that sees nothing gives 0.
        causal: query i sees the keys j ≤ i. Both `causal` and `mask` must allow a pair.
        score: what is done to a score: a rule such as `regard.softcap(50.0)`, a function of (s, b,
            h, i, j), or a sequence of those, applied in order. A score of −∞ is masked.
        bias: added after `score`; floating, aligned right to (..., h, n_q, n_k).
        scale: of Q Kᵀ, 1/√d unless given; 1.0 is the plain dot product.
        sink: (h,), a logit that takes weight and gives no value.
        dropout: share of the weights that is dropped, in [0, 1), the others scaled by 1/(1 −
            dropout); a function of `seed`, an int in [0, 2⁶⁴), and of (b, h, i, j) alone.
        offset: row r is at the absolute position i = r + offset; n_k − n_q unless given, so that
            the last query sits at the last key. An int, or an integer array over the leading
            dimensions.
        origin: (b, h, j) of this call's first batch element, head and key in the whole that it is a
            shard of.
        layout: "bhnd", or "bnhd" for query, key, value and output (..., n, heads, d).
        return_weights: also return the weights (..., h, n_q, n_k), before dropout. They take n_q ·
            n_k memory.
        observe: statistics to return, see `Seen`: "lse", "entropy", "visible",
            "normalized_entropy", "max", "argmax", "received", "group_received", "profile",
            `regard.top(k)`, `regard.mass(rule)`, `regard.pooled(rows, cols)`,
            `regard.weights_of(rows)`.
        engine: the name of an engine; otherwise the first that supports the call.

    Returns:
        out (..., h, n_q, d_v); with `return_weights` (out, weights), with `observe` (out, seen),
        with both (out, weights, seen), where `seen` is a `Seen`.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected, before any
            work.
        MemoryError: for results larger than the memory of this machine or of its control group,
            before any work.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> regard.attention(q, k, v, causal=True).shape
    (8, 100, 64)
    >>> out, seen = regard.attention(q, k, v, mask=regard.window(16), observe=["entropy"])
    >>> seen.entropy.shape
    (8, 100)
    """
    bare = engine is None and return_weights is False
    if bare:
        signature = _signature(
            query, key, value, mask, causal, score, bias, scale, sink, dropout, seed, offset, origin, layout, observe
        )
        if signature is not None and (call := fastpath.known(signature)) is not None:
            return call(cast(NDArray, query), cast(NDArray, key), cast(NDArray, value))
    p = problem_from(
        query, key, value, mask=mask, causal=causal, score=score, bias=bias, scale=scale, sink=sink, dropout=dropout,
        seed=seed, offset=offset, origin=origin, layout=layout, observe=observe,
    )  # fmt: skip
    return_weights = checks.boolean("return_weights", return_weights)
    checks.fits(p, weights=p.batch * p.heads * p.n_q * p.n_k if return_weights else 0)
    chosen = choose(p, engine)
    frame = Frame.of(query, layout)
    if bare and p.signature is not None and chosen is engines()["cpu"]:
        fastpath.keep(p, frame.out_shape(p))
    outputs, found = chosen.forward(p)
    assert outputs.out is not None
    assert outputs.lse is not None
    results: list[Any] = [frame.outward(outputs.out)]
    if return_weights:
        tile = chosen.weights(p, outputs.lse, range(p.n_q), range(p.n_k)).astype(p.dtype, copy=False)
        results.append(frame.per_head(tile))
    if p.observe:
        results.append(frame.seen(found))
    return results[0] if len(results) == 1 else tuple(results)


@dispatched
def weights(
    query: Array,
    key: Array,
    *,
    lse: ArrayLike | None = None,
    rows: slice = slice(None),
    cols: slice = slice(None),
    mask: MaskLike = None,
    causal: bool = False,
    score: ScoreLike = None,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    sink: ArrayLike | None = None,
    offset: int | ArrayLike | None = None,
    origin: tuple[int, int, int] = ORIGIN,
    layout: Layout = "bhnd",
    engine: str | None = None,
) -> Array:
    """Compute any part of the weights exactly: P[h, i, j] = exp(S[h, i, j] − lse[h, i]).

    With `lse` (..., h, n_q), as `observe=["lse"]` gives it, only that part is computed; without it,
    a pass of these rows over all keys comes first. The other arguments are those of `attention`.
    Returns (..., h, rows, cols), of the inputs' dtype. Raises ValueError for an lse of another
    call: with it, the weights of sampled rows do not sum to 1.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1000, 16))
    >>> out, seen = regard.attention(q, k, v, causal=True, observe=["lse"])
    >>> rows, cols = slice(500, 502), slice(0, 501)
    >>> tile = regard.weights(q, k, causal=True, lse=seen.lse, rows=rows, cols=cols)
    >>> tile.shape, round(float(tile[0].sum()), 6)
    ((2, 501), 1.0)
    """
    p = problem_from(
        query, key, key, mask=mask, causal=causal, score=score, bias=bias, scale=scale, sink=sink, offset=offset,
        origin=origin, layout=layout,
    )  # fmt: skip
    i, j = checks.positions("rows", rows, p.n_q), checks.positions("cols", cols, p.n_k)
    checks.fits(p, outputs=lse is None, weights=p.batch * p.heads * len(i) * len(j), d_v=0)
    chosen = choose(p, engine)
    frame = Frame.of(query, layout)
    if lse is None:
        known = chosen.forward(replace(p, value=p.value[..., :0]), range(p.n_q)[rows])[0].lse
    else:
        known = frame.inward_rows(checks.shaped("lse", lse, frame.per_head_shape(p.shape(p.n_q))))
        rowsums.require("lse", p, known, rows=i, pairs=len(i) * len(j) * p.batch * p.heads)
    assert known is not None
    tile = frame.per_head(chosen.weights(p, known, i, j))
    return cast(Array, tile if tile.dtype == p.dtype else tile.astype(p.dtype))


@dispatched
@passing_on(attention, without=("return_weights", "observe"))
def attention_vjp(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    dout: NDArray | None,
    *,
    dlse: NDArray | None = None,
    dentropy: NDArray | None = None,
    outputs: Outputs | tuple[NDArray, Seen] | None = None,
    engine: str | None = None,
    **options: Unpack[Options],
) -> Differential:
    """Compute the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩ + ⟨dentropy, entropy⟩ in O(n) memory.

    With respect to every input. dout has the shape and dtype of the output, dlse and dentropy are
    (..., h, n_q) and floating; None is zero. The options are those of `attention`, except
    `return_weights` and `observe`. `outputs` of the same call, the (out, seen) of `attention(...,
    observe=["lse"])` or the first result of `attention_jvp`, saves the forward pass. Its entropy is
    needed for `dentropy` alone.

    Returns a `Differential`: query, key, value, bias and sink in the shapes and dtypes of the
    inputs, and `tables[t]` for every float `regard.table` t of a score.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 5, 4))
    >>> slopes = regard.table(np.array([0.5, 0.25]))
    >>> outputs = regard.attention(q, k, v, score=regard.alibi(slopes), observe=["lse"])
    >>> dout = np.ones((2, 5, 4))
    >>> g = regard.attention_vjp(q, k, v, dout, outputs=outputs, score=regard.alibi(slopes))
    >>> g.query.shape, g.tables[slopes].shape
    ((2, 5, 4), (2,))
    """
    p, frame, chosen = prepare(query, key, value, engine, options)
    checks.fits(p, outputs=outputs is None, entropies=outputs is None and dentropy is not None, gradients=1)
    ct = outputs_in(p, frame, "d{}", Outputs(dout, dlse, dentropy))
    known = known_outputs(p, frame, outputs, "dentropy" if dentropy is not None else None)
    if known is None:
        known, _ = chosen.forward(p if dentropy is None else replace(p, observe=(Statistic("entropy"),)))
    return differential_out(frame, chosen.backward(p, known, ct))


@dispatched
@passing_on(attention, without=("return_weights", "observe"))
def attention_jvp(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    dquery: NDArray | None = None,
    dkey: NDArray | None = None,
    dvalue: NDArray | None = None,
    *,
    dbias: NDArray | None = None,
    dsink: NDArray | None = None,
    dtables: Mapping[Table, NDArray] | None = None,
    tangents: Differential | None = None,
    outputs: Outputs | tuple[NDArray, Seen] | None = None,
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Outputs, Outputs]:
    """Compute (out, lse, entropy) and their tangents, forward mode, in O(n) memory.

    Each tangent has the shape of its input, and dquery, dkey, dvalue its dtype; None does not vary.
    `dtables` maps float tables of the score rules to tangents. `tangents` gives all of them as one
    `Differential` instead. The options are those of `attention`, except `return_weights` and
    `observe`. `outputs` of the same call, the (out, seen) of `attention(..., observe=["lse"])`,
    saves the forward pass; where their entropy is None, so is its tangent.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dv = rng.standard_normal((4, 2, 5, 4))
    >>> primal, tangent = regard.attention_jvp(q, k, v, dvalue=dv)
    >>> bool(np.allclose(tangent.out, regard.attention(q, k, dv)))  # the output is linear in value
    True
    """
    p, frame, chosen = prepare(query, key, value, engine, options)
    count = 2 if outputs is None else 1
    checks.fits(p, outputs=count, entropies=count)
    t = tangents_in(p, frame, tangents, dquery, dkey, dvalue, dbias, dsink, dtables)
    primal, tangent = chosen.jvp(p, t, known_outputs(p, frame, outputs))
    return frame.outputs(primal), frame.outputs(tangent)


@dispatched
@passing_on(attention, without=("return_weights", "observe"))
def attention_vjp_jvp(
    query: NDArray,
    key: NDArray,
    value: NDArray,
    dout: NDArray | None,
    tangents: Differential | None = None,
    *,
    dlse: NDArray | None = None,
    dentropy: NDArray | None = None,
    dquery: NDArray | None = None,
    dkey: NDArray | None = None,
    dvalue: NDArray | None = None,
    dbias: NDArray | None = None,
    dsink: NDArray | None = None,
    dtables: Mapping[Table, NDArray] | None = None,
    cotangent_tangents: Outputs | None = None,
    outputs: Outputs | tuple[NDArray, Seen] | None = None,
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Differential, Outputs]:
    """Compute second derivatives in O(n) memory: tangents of gradients and of outputs.

    `tangents` are those of the inputs, also given one by one as in `attention_jvp`.
    `cotangent_tangents` are those of dout, dlse and dentropy. What is None does not vary. Shapes,
    dtypes, the options and `outputs` are as in `attention_vjp` and `attention_jvp`.

    Forward over reverse: with ℓ = ⟨dout, out⟩ + ⟨dlse, lse⟩ + ⟨dentropy, entropy⟩ it is the product
    of the Hessian of ℓ with `tangents`. Reverse over reverse is the same: if a loss has the
    gradient u in the gradients that `attention_vjp` returned, then along u the first result is its
    gradient in the inputs, and the second that in dout, dlse and dentropy.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 2, 5, 4))
    >>> def penalty(q, dout):  # of a gradient, as in a gradient penalty
    ...     return 0.5 * (regard.attention_vjp(q, k, v, dout).query ** 2).sum()
    >>> dquery = regard.attention_vjp(q, k, v, dout).query
    >>> u = regard.Differential(query=dquery)  # the gradient of the penalty in dquery
    >>> inputs, cotangents = regard.attention_vjp_jvp(q, k, v, dout, u)
    >>> step = 1e-5 * rng.standard_normal(q.shape)
    >>> slope = (penalty(q + step, dout) - penalty(q - step, dout)) / 2
    >>> bool(np.isclose((inputs.query * step).sum(), slope))
    True
    >>> slope = (penalty(q, dout + step) - penalty(q, dout - step)) / 2
    >>> bool(np.isclose((cotangents.out * step).sum(), slope))
    True
    """
    p, frame, chosen = prepare(query, key, value, engine, options)
    count = 2 if outputs is None else 1
    checks.fits(p, outputs=count, entropies=count, gradients=1)
    ct = outputs_in(p, frame, "d{}", Outputs(dout, dlse, dentropy))
    t = tangents_in(p, frame, tangents, dquery, dkey, dvalue, dbias, dsink, dtables)
    moving = Outputs(None, None, None) if cotangent_tangents is None else cotangent_tangents
    d_ct = outputs_in(p, frame, "cotangent_tangents.{}", checks.instance("cotangent_tangents", moving, Outputs))
    wish = "dentropy" if dentropy is not None else "cotangent_tangents.entropy" if d_ct.entropy is not None else None
    primal, tangent = chosen.jvp(p, t, known_outputs(p, frame, outputs, wish))
    return differential_out(frame, chosen.backward_jvp(p, primal, ct, t, tangent, d_ct)), frame.outputs(tangent)


def prepare(
    query: Any, key: Any, value: Any, engine: str | None, options: Mapping[str, Any]
) -> tuple[Problem, Frame, Engine]:
    p = problem_from(query, key, value, **options)
    return p, Frame.of(query, options.get("layout", "bhnd")), choose(p, engine)


def outputs_in(p: Problem, frame: Frame, label: str, x: Outputs, lse_dtype: np.dtype[Any] | None = None) -> Outputs:
    """Outputs, cotangents or their tangents of the caller, checked and as engines want them.

    label: how messages name one of them, such as "d{}". lse_dtype: the dtype of lse and entropy if one is required.
    """
    rows = frame.per_head_shape(p.shape(p.n_q))
    out = None if x.out is None else checks.shaped(label.format("out"), x.out, frame.out_shape(p), p.dtype)
    lse, entropy = (
        None if a is None else frame.inward_rows(checks.shaped(label.format(name), a, rows, lse_dtype))
        for name, a in (("lse", x.lse), ("entropy", x.entropy))
    )
    return Outputs(None if out is None else frame.inward(out), lse, entropy)


def known_outputs(
    p: Problem, frame: Frame, outputs: Outputs | tuple[Any, ...] | None, entropy_for: str | None = None
) -> Outputs | None:
    """Check the outputs that the caller gives. entropy_for: the argument that needs the entropy, if one does.

    Derivatives take the weights from lse; of the output and the entropy nothing but shape and dtype is checked.
    """
    if outputs is None:
        return None
    if type(outputs) is tuple and len(outputs) in (2, 3) and isinstance(outputs[-1], Seen):
        seen = outputs[-1]
        outputs = Outputs(outputs[0], seen.get("lse"), seen.get("entropy"))
    elif not isinstance(outputs, Outputs):
        expected = 'a regard.Outputs, or the (out, seen) of attention(..., observe=["lse"])'
        raise TypeError(f"outputs must be {expected}, got {type_name(outputs)}")
    for name, wish in (("out", "a derivative"), ("lse", "a derivative"), ("entropy", entropy_for)):
        if wish is not None and getattr(outputs, name) is None:
            raise ValueError(f"outputs.{name} is None, but {wish} needs it")
    known = outputs_in(p, frame, "outputs.{}", outputs, p.compute)
    assert known.lse is not None
    rowsums.require("outputs.lse", p, known.lse, pairs=p.batch * p.heads * p.n_q * p.n_k)
    return known


def tangents_in(
    p: Problem, frame: Frame, tangents: Differential | None, dquery: NDArray | None, dkey: NDArray | None,
    dvalue: NDArray | None, dbias: NDArray | None, dsink: NDArray | None, dtables: Mapping[Table, NDArray] | None,
) -> Differential:  # fmt: skip
    """Check the tangents of inputs, given together or one by one."""
    single = {"query": dquery, "key": dkey, "value": dvalue, "bias": dbias, "sink": dsink, "tables": dtables}
    given: dict[str, Any] = {name: x for name, x in single.items() if x is not None}
    if tangents is None:
        return differential_in(p, frame, "d{}", Differential(**given))
    if given:
        names = ", ".join(f"d{name}" for name in given)
        raise TypeError(f"tangents holds the tangents of all inputs: give it or {names}, not both")
    return differential_in(p, frame, "tangents.{}", checks.instance("tangents", tangents, Differential))


def differential_in(p: Problem, frame: Frame, label: str, t: Differential) -> Differential:
    """Tangents of the caller, checked and as engines want them; `label` as in `outputs_in`."""
    turned: dict[str, NDArray | None] = {}
    for name in ("query", "key", "value"):
        x, shape = getattr(t, name), frame.outward(getattr(p, name)).shape
        turned[name] = None if x is None else frame.inward(checks.shaped(label.format(name), x, shape, p.dtype))
    for name in ("bias", "sink"):
        x, like = getattr(t, name), getattr(p, name)
        if x is not None and like is None:
            raise ValueError(f"{label.format(name)} is given, but this call has no {name}")
        turned[name] = None if x is None else checks.shaped(label.format(name), x, like.shape)
    tables = label.format("tables")
    if not isinstance(t.tables, Mapping):
        raise TypeError(f"{tables} must map tables to their tangents, got {type_name(t.tables)}")
    for table, x in t.tables.items():
        if table not in p.tables:
            raise ValueError(f"{tables}: {table!r} is not a float table of this call's score")
        checks.shaped(f"{tables}[{table!r}]", x, table.shape)
    return Differential(**turned, tables=dict(t.tables))


def differential_out(frame: Frame, g: Differential) -> Differential:
    """Gradients, or their tangents, as the caller has the inputs."""
    q, k, v = (None if x is None else frame.outward(x) for x in (g.query, g.key, g.value))
    return replace(g, query=q, key=k, value=v)
