"""The public calls: make one frozen `Problem`, run the first engine that supports it."""

from __future__ import annotations  # so that `help` shows the names of types

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, cast, overload

import numpy as np

from regard.arguments.frameworks import dispatched
from regard.arguments.signatures import passing_on
from regard.core import checks, rowsums
from regard.core.layout import Layout
from regard.core.options import taking_options
from regard.core.problem import Differential, Outputs, Problem
from regard.core.statistics import ENTROPY, Seen, Statistic, StatisticName
from regard.core.types import Array, ArrayLike, Options, TileOptions
from regard.engines import Engine, choose
from regard.ops import callcache
from regard.ops import metric as metrics
from regard.ops.callcache import Signature, array_operands, arrays_in, signature, with_arrays
from regard.ops.normalization import checked, prepare, problem_from
from regard.ops.tangents import differential_out, known_outputs, outputs_in, tangents_in
from regard.rules import Table

NDArray = np.ndarray[Any, np.dtype[Any]]


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
    observe: Sequence[StatisticName | Statistic],
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
    observe: Sequence[StatisticName | Statistic],
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Array, Seen]: ...
@overload
def attention(
    query: Array, key: Array, value: Array, *, return_weights: bool = False,
    observe: Sequence[StatisticName | Statistic] = (), engine: str | None = None, **options: Unpack[Options],
) -> Any: ...  # fmt: skip
@dispatched
@taking_options()
def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    return_weights: bool = False,
    observe: Sequence[StatisticName | Statistic] = (),
    engine: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Compute exact attention in O(n) memory: softmax(score(scale · Q Kᵀ) + bias) V.

    Vaswani et al. 2017. Three dimensions are (heads, n, d), never (batch, n, d).

    Args:
        query: (..., h, n_q, d); or (n_q, d), one head, with key and value likewise.
        key: (..., h_kv, n_k, d), h a multiple of h_kv (grouped heads). Leading dimensions
            broadcast.
        value: (..., h_kv, n_k, d_v). All three share one dtype of float16, bfloat16, float32,
            float64.
        mask: the pairs that may attend: a rule such as `regard.window(256) &
            regard.documents(ids)`, a function of (b, h, i, j), or an array of booleans or 0/1 that
            aligns right to (..., h, n_q, n_k). True means attend. Masked keys have no influence,
            NaN included; a query that sees nothing gives 0.
        causal: query i sees the keys j ≤ i. Both `causal` and `mask` must allow a pair.
        score: a transformation of scores: a rule such as `regard.softcap(50.0)`, a function of (s,
            b, h, i, j), or a sequence of those, applied in order. A score of −∞ is masked.
        bias: added after `score`; floating, aligned right to (..., h, n_q, n_k).
        scale: factor of Q Kᵀ, by default 1/√d; 1.0 is the plain dot product.
        metric: M in scores scale · Q M Kᵀ (Luong et al. 2015, "general"), floating: (d, d), or
            (h, d, d) for one per head. Q M is rounded to the dtype of the query.
        sink: (h,), a logit that takes weight and gives no value.
        dropout: share of the weights to drop, in [0, 1); the others are scaled by 1/(1 − dropout).
            It depends on `seed`, an int in [0, 2⁶⁴), and (b, h, i, j) alone.
        offset: row r is at the absolute position i = r + offset. The default n_k − n_q puts the
            last query at the last key. An int, or an integer array over the leading dimensions.
        origin: (b, h, j), the first batch element, head and key of a call that is a shard of a
            larger one. By default the call is whole, and a rule with entries for more batch
            elements or heads raises.
        layout: "bhnd", or "bnhd" for query, key, value and output (..., n, heads, d).
        return_weights: also return the weights (..., h, n_q, n_k), before dropout. They take n_q ·
            n_k memory.
        observe: statistics to return, see `Seen`: "lse", "entropy", "visible",
            "normalized_entropy", "effective_states", "max", "argmax", "received", "group_received",
            "profile", `regard.top(k)`, `regard.mass(rule)`, `regard.pooled(rows, cols)`,
            `regard.weights_of(rows)`, `regard.renyi(alpha)`.
        engine: the name of an engine; by default the first that supports the call.

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
    >>> metric = np.eye(64, dtype=np.float32)
    >>> bool(np.allclose(regard.attention(q, k, v, metric=metric), regard.attention(q, k, v)))
    True
    """
    plain = type(observe) is tuple and not observe
    operands = array_operands(query, key, value) if plain else None
    signed = signature(operands, options)
    simple = plain and engine is None and return_weights is False
    of_call = signed or with_arrays(operands, options) if simple else None
    if (known := callcache.find(of_call)) is not None and known.call is not None:
        return known.call(query, key, value, options)
    p = checked(signed, query, key, value, {**options, "observe": observe})
    return_weights = checks.boolean("return_weights", return_weights)
    checks.fits(p, weights=p.pairs if return_weights else 0)
    chosen = choose(p, engine)
    arranged = Layout.of(query, options.get("layout", "bhnd"))
    if of_call is not None:
        _cache_call(of_call, signed is None, p, chosen, arranged.out_shape(p), options)
    outputs, found = chosen.forward(p)
    assert outputs.out is not None
    assert outputs.lse is not None
    results: list[Any] = [arranged.from_bhnd(outputs.out)]
    if return_weights:
        tile = chosen.weights(p, outputs.lse, range(p.n_q), range(p.n_k)).astype(p.dtype, copy=False)
        results.append(arranged.per_head(tile))
    if p.observe:
        results.append(arranged.seen(found))
    return results[0] if len(results) == 1 else tuple(results)


def _cache_call(
    signed: Signature, new: bool, p: Problem, chosen: Engine, shape: tuple[int, ...], options: Mapping[str, Any]
) -> None:
    """Cache the call of a problem if its engine can run it again.

    new: whether to store an entry. Otherwise checks did, or the rules of the call were in no earlier one.
    """
    entry = callcache.find(signed)
    if entry is None and new:
        callcache.store(signed, entry := callcache.Entry())
    if entry is not None and not entry.tried:
        run = chosen.prepare(p)
        call = None if run is None else callcache.CachedCall(run, p, shape, arrays_in(options))
        entry.tried, entry.call = True, call


@dispatched
@taking_options(without=("dropout", "seed", "observe"))
def weights(
    query: Array,
    key: Array,
    *,
    lse: ArrayLike | None = None,
    rows: slice = slice(None),
    cols: slice = slice(None),
    engine: str | None = None,
    **options: Unpack[TileOptions],
) -> Array:
    """Compute any part of the weights exactly.

    P[h, i, j] = exp(S[h, i, j] − lse[h, i]). With `lse` (..., h, n_q), as `observe=["lse"]` gives
    it, only that part is computed. Without it, a pass of these rows over all keys comes first. The
    other arguments are those of `attention`. Returns (..., h, rows, cols), in the inputs' dtype.

    Rows with all keys sum to 1, with the sink's share, and have the error of a plain softmax. In
    other parts of large calls the rounding of lse adds a relative error of |lse| eps.

    Raises ValueError for the lse of another call: with it, the weights of sampled rows do not sum
    to 1.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1000, 16))
    >>> out, seen = regard.attention(q, k, v, causal=True, observe=["lse"])
    >>> rows, cols = slice(500, 502), slice(0, 501)
    >>> tile = regard.weights(q, k, causal=True, lse=seen.lse, rows=rows, cols=cols)
    >>> tile.shape, round(float(tile[0].sum()), 6)
    ((2, 501), 1.0)
    """
    p = problem_from(query, key, key, **options)
    i, j = checks.positions("rows", rows, p.n_q), checks.positions("cols", cols, p.n_k)
    checks.fits(p, outputs=lse is None, weights=p.all_heads * len(i) * len(j), d_v=0)
    chosen = choose(p, engine)
    arranged = Layout.of(query, options.get("layout", "bhnd"))
    if lse is None:
        known = chosen.forward(replace(p, value=p.value[..., :0]), range(p.n_q)[rows])[0].lse
    else:
        known = arranged.rows_to_bhn(checks.shaped("lse", lse, arranged.per_head_shape(p.shape(p.n_q))))
        rowsums.require("lse", p, known, rows=i, pairs=p.all_heads * len(i) * len(j))
    assert known is not None
    tile = arranged.per_head(chosen.weights(p, known, i, j))
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
    """Compute the gradients of ⟨dout, out⟩ + ⟨dlse, lse⟩ + ⟨dentropy, entropy⟩ in every input.

    Memory is O(n).

    Args:
        query, key, value, engine: as in `attention`, and so are the options.
        dout: in the shape and dtype of the output; None is zero.
        dlse, dentropy: (..., h, n_q), floating; None is zero.
        outputs: of the same call, which saves the forward pass: the (out, seen) of `attention(...,
            observe=["lse"])`, or the first result of `attention_jvp`. Only `dentropy` needs its
            entropy. In 16 bits neither has `low`: without `outputs`, gradients of saturated rows
            are more exact.

    Returns:
        a `Differential`: query, key, value, bias, sink and metric in the shapes and dtypes of the
        inputs, and `tables[t]` for every float `regard.table` t of a score.

    Raises:
        TypeError, ValueError, MemoryError: as `attention`, also for cotangents and `outputs`.

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
    p, arranged, chosen = prepare(query, key, value, engine, options, "backward")
    low = p.new_low() if outputs is None else None
    count = (outputs is None) + (low is not None)
    checks.fits(p, outputs=count, entropies=outputs is None and dentropy is not None, gradients=1)
    ct = outputs_in(p, arranged, "d{}", Outputs(dout, dlse, dentropy))
    known = known_outputs(p, arranged, outputs, "dentropy" if dentropy is not None else None)
    if known is None:
        known, _ = chosen.forward(p if dentropy is None else replace(p, observe=(ENTROPY,)), None, low)
    return differential_out(arranged, metrics.gradients(p, chosen.backward(p, known, ct)))


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
    dmetric: NDArray | None = None,
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
    saves the forward pass. If its entropy is None, so is the entropy's tangent.

    >>> import numpy as np, regard
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dv = rng.standard_normal((4, 2, 5, 4))
    >>> primal, tangent = regard.attention_jvp(q, k, v, dvalue=dv)
    >>> bool(np.allclose(tangent.out, regard.attention(q, k, dv)))  # the output is linear in value
    True
    """
    p, arranged, chosen = prepare(query, key, value, engine, options, "jvp")
    count = 2 if outputs is None else 1
    checks.fits(p, outputs=count, entropies=count)
    t = tangents_in(p, arranged, tangents, dquery, dkey, dvalue, dbias, dsink, dtables, dmetric)
    primal, tangent = chosen.jvp(p, metrics.tangents(p, t), known_outputs(p, arranged, outputs))
    return arranged.outputs(primal), arranged.outputs(tangent)


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
    dmetric: NDArray | None = None,
    dtables: Mapping[Table, NDArray] | None = None,
    cotangent_tangents: Outputs | None = None,
    outputs: Outputs | tuple[NDArray, Seen] | None = None,
    engine: str | None = None,
    **options: Unpack[Options],
) -> tuple[Differential, Outputs]:
    """Compute second derivatives in O(n) memory: tangents of gradients and of outputs.

    Args:
        query, key, value, dout, dlse, dentropy, engine: as in `attention_vjp`, and so are the
            options.
        tangents: those of the inputs; None does not vary.
        dquery, dkey, dvalue, dbias, dsink, dmetric, dtables: the same one by one, as in
            `attention_jvp`.
        cotangent_tangents: those of dout, dlse and dentropy, in their shapes and dtypes; None does
            not vary.
        outputs: of the same call, which saves the forward pass, as in `attention_vjp`. dentropy and
            its tangent need its entropy.

    Returns:
        the tangents of the gradients that `attention_vjp` returns, and those of the outputs.

    Raises:
        TypeError, ValueError, MemoryError: as `attention_vjp`, also for tangents.

    Forward over reverse: with ℓ = ⟨dout, out⟩ + ⟨dlse, lse⟩ + ⟨dentropy, entropy⟩ it is the product
    of the Hessian of ℓ with `tangents`. Reverse over reverse is the same. Let u be the gradient of
    a loss in the gradients that `attention_vjp` returned. With `tangents=u`, the first result is
    the loss's gradient in the inputs, and the second that in dout, dlse and dentropy.

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
    p, arranged, chosen = prepare(query, key, value, engine, options, "backward_jvp")
    count = 2 if outputs is None else 1
    checks.fits(p, outputs=count, entropies=count, gradients=1)
    ct = outputs_in(p, arranged, "d{}", Outputs(dout, dlse, dentropy))
    t = tangents_in(p, arranged, tangents, dquery, dkey, dvalue, dbias, dsink, dtables, dmetric)
    moving = Outputs(None, None, None) if cotangent_tangents is None else cotangent_tangents
    d_ct = outputs_in(p, arranged, "cotangent_tangents.{}", checks.instance("cotangent_tangents", moving, Outputs))
    needs = "dentropy" if dentropy is not None else "cotangent_tangents.entropy" if d_ct.entropy is not None else None
    along = metrics.tangents(p, t)
    primal, tangent = chosen.jvp(p, along, known_outputs(p, arranged, outputs, needs))
    second = chosen.backward_jvp(p, primal, ct, along, tangent, d_ct)
    if p.factors is not None:
        second = metrics.gradient_tangents(p, t, chosen.backward(p, primal, ct), second)
    return differential_out(arranged, second), arranged.outputs(tangent)
