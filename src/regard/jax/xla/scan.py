"""The tiled algorithm in plain JAX, for other devices and further derivatives.

A loop over blocks of queries, and for each a scan over blocks of keys (Rabe and Staats 2021), in O(n) memory. Rules are
evaluated as values. A key or query that is not finite counts as NaN where it is seen.

Each query has three sums over keys, for a shift m that may be any number:

    l = Σ_j exp(S − m)      O = Σ_j exp(S − m) D V      e = Σ_j exp(S − m) (S − m)

Forward takes the running maximum for m. Derivatives take lse, which is known by then. The sums are then plain sums over
blocks, which JAX differentiates to any order. `jax.checkpoint` recomputes the scores of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from regard.core.problem import compute_dtype
from regard.jax.task import OUTPUTS, PrimitiveTask, outline, series, transpose
from regard.jax.xla.values import RuleIndices, evaluate, keep_mask, seed_of, settings, value

Arrays = dict[str, Any]
Sums = tuple[Any, Any, Any]
BLOCK = 512
KNOWS = frozenset({"query", "key", "value", "bias", "sink", "offset", "origin", "dropout", "seed"})
"""The arrays and numbers of a call that are computed with."""

checkpoint = partial(jax.checkpoint, prevent_cse=False)  # a scan merges no common subexpressions


def run(task: PrimitiveTask, operands: Sequence[Any]) -> list[Any]:
    """Return the results of a task, in the order and axes of `regard.jax.task.run`.

    Raises NotImplementedError for statistics other than lse and entropy, and for options that are not in `KNOWS`.
    """
    named = {name for name in task.call.inputs if "." not in name}
    if lost := named.union(name for name, _ in task.call.numbers) - KNOWS:
        raise NotImplementedError(f"XLA does not know {', '.join(map(repr, sorted(lost)))}")
    for name, _ in task.call.observe if task.kind == "forward" else ():
        if name not in OUTPUTS:
            raise NotImplementedError(
                f"XLA observes lse and entropy, not {name!r}: call an engine of the CPU, or take return_weights=True"
            )
    function: Callable[..., list[Any]] = partial(one, task)
    for n in reversed(range(len(task.sizes))):

        def now(axes: Sequence[int | None], n: int = n) -> int | None:
            """Return the axis of the n-th `vmap` without those outside of it."""
            at, gone = axes[n], axes[:n]
            return None if at is None else at - sum(g is not None and g < at for g in gone)

        ins = tuple(map(now, task.axes))
        outs = [now(axes) for _, axes in task.wrt] or [0] * len(task.results)
        function = partial(vmapped, function, ins, outs, task.sizes[n])
    with settings():
        return function(*operands)


def vmapped(function: Any, ins: tuple[int | None, ...], outs: list[int | None], size: int, *operands: Any) -> list[Any]:
    """Apply `jax.vmap`; gradients of inputs without the axis are summed over it."""
    results = jax.vmap(function, ins, 0, axis_size=size)(*operands)
    return [
        x.sum(0, dtype=x.dtype) if at is None else jnp.moveaxis(x, 0, at) for x, at in zip(results, outs, strict=True)
    ]


def one(task: PrimitiveTask, *operands: Any) -> list[Any]:
    """Return the results of a task without axes of `vmap`."""
    x = task.named(operands)
    inputs = {n: x[n] for n in task.call.differentiable}

    def along(prefix: str, like: Arrays) -> Arrays:
        return {n: x.get(prefix + n, jnp.zeros_like(a)) for n, a in like.items()}

    def sums(inputs: Arrays) -> Sums:
        return Blocks(task, x | inputs).sums(x["lse"])

    def finish(inputs: Arrays, sums: Sums) -> Arrays:
        blocks = Blocks(task, x | inputs)
        return blocks.outputs(sums, lax.stop_gradient(blocks.heads(x["lse"])))

    def tangent(inputs: Arrays) -> Arrays:
        dots: Arrays = jax.jvp(lambda x: finish(x, sums(x)), (inputs,), (along("t.", inputs),))[1]
        return dots

    def gradients(inputs: Arrays, ct: Arrays, at: Sums) -> Arrays:
        d_inputs, d_sums = jax.vjp(finish, inputs, at)[1](ct)
        total: Arrays = jax.tree.map(add, d_inputs, jax.vjp(sums, inputs)[1](d_sums)[0])
        return total

    if task.kind == "forward":
        results = Blocks(task, x).forward()
    elif task.kind == "weights":
        results = {"weights": Blocks(task, x, whole=True).weights()}
    elif task.kind == "jvp":
        results = tangent(inputs)
    elif task.kind == "jvp_jvp":
        results = jax.jvp(tangent, (inputs,), (along("s.", inputs),))[1]
    else:
        outputs = {n: x[n] for n in task.call.outputs}
        ct = along("ct.", outputs)
        if task.kind == "backward":
            results = gradients(inputs, ct, Blocks(task, x).sums_of(outputs, x.get("low")))
        else:
            tangents = along("t.", inputs), along("t.ct.", outputs)
            results = jax.jvp(lambda x, ct: gradients(x, ct, sums(x)), (inputs, ct), tangents)[1]
    return [results[n] for n in task.results]


class Blocks:
    """A call in blocks: queries (b, kv, group, n_q, d) and keys (b, kv, n_k, d).

    whole: all keys are one block.
    """

    def __init__(self, task: PrimitiveTask, x: Arrays, whole: bool = False):
        call = self.call = task.call
        self.x, self.swap = x, call.layout == "bnhd"
        q, k, v = (self.transposed(n, x[n]) for n in ("query", "key", "value"))
        self.dtype = q.dtype
        self.real = compute_dtype(np.dtype(q.dtype))
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.B = int(np.prod(self.lead))
        self.h, self.kv = q.shape[-3], k.shape[-3]
        self.group = self.h // self.kv if self.kv else 1
        self.n_q, self.n_k, self.d_v = q.shape[-2], k.shape[-2], v.shape[-1]
        self.rows = min(BLOCK, max(self.n_q, 1))
        self.keys = self.n_k if whole else min(BLOCK, max(self.n_k, 1))
        q, k, v = (self.flat(a) for a in (q, k, v))
        self.arrays = {"query": q.reshape(self.B, self.kv, self.group, self.n_q, q.shape[-1]), "key": k, "value": v}
        if "bias" in x:
            self.arrays["bias"] = self.dense(x["bias"].astype(self.real))
        self.arrays |= {f"mask.dense{n}": self.dense(a) for n, a in enumerate(series(x, "mask.dense"))}
        self.tables = {n: self.read_tables(n) for n in ("mask", "score")}
        origin = x["origin"].astype(jnp.int64) if call.origin is None else jnp.asarray(call.origin, jnp.int64)
        offset = x["offset"].astype(jnp.int64) if call.offset is None else jnp.asarray(call.offset, jnp.int64)
        if call.offset is None:
            offset = jnp.broadcast_to(offset, self.lead)
        self.offset = jnp.broadcast_to(offset.reshape(-1), (self.B,))
        self.b0, self.h0, self.j0 = origin
        sink = x.get("sink", jnp.full((), -jnp.inf)).astype(self.real)
        self.sink = jnp.broadcast_to(sink, (self.h,)).reshape(1, self.kv, self.group, 1)  # −∞: none

    def transposed(self, name: str, a: Any) -> Any:
        return transpose(name, a) if self.swap else a

    def flat(self, a: Any) -> Any:
        """Return (..., h, n, d) as (b, h, n, d), in the dtype of sums."""
        a = a.astype(self.real)
        return jnp.broadcast_to(a, (*self.lead, *a.shape[-3:])).reshape(self.B, *a.shape[-3:])

    def heads(self, a: Any, tail: int = 0) -> Any:
        """Return (..., h, n_q, *tail) as (b, kv head, group, n_q, *tail), for sums."""
        return a.reshape(self.B, self.kv, self.group, self.n_q, *a.shape[a.ndim - tail :]).astype(self.real)

    def per_query(self, a: Any, name: str) -> Any:
        """Return (b, kv head, group, n_q, ...) in the caller's layout."""
        return self.transposed(name, a.reshape(*self.lead, self.h, *a.shape[3:]))

    def dense(self, a: Any) -> Any:
        """Return a mask or bias as (b, kv head, group, n_q, n_k), or 1 for any of these."""
        a = a.reshape((1,) * (len(self.lead) + 3 - a.ndim) + a.shape)
        if any(size != 1 for size in a.shape[:-3]):
            a = jnp.broadcast_to(a, (*self.lead, *a.shape[-3:]))
        heads = (1, 1) if a.shape[-3] == 1 else (self.kv, self.group)
        return a.reshape(int(np.prod(a.shape[:-3])), *heads, *a.shape[-2:])

    def read_tables(self, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the float tables of a score by slot, and the others."""
        every = series(self.x, f"{name}.table")
        trains = [name == "score" and jnp.issubdtype(t.dtype, jnp.floating) for t in every]
        return (
            tuple(t.astype(self.real) if train else None for t, train in zip(every, trains, strict=True)),
            tuple(None if train else t for t, train in zip(every, trains, strict=True)),
        )

    def indices(self, r: Any, t: Any, a: Arrays, name: str) -> RuleIndices:
        b = jnp.arange(self.B, dtype=jnp.int64)
        h = jnp.arange(self.h, dtype=jnp.int64).reshape(self.kv, self.group, 1, 1)
        i = jnp.arange(self.rows, dtype=jnp.int64)[:, None] + r * self.rows
        return RuleIndices(
            b=b[:, None, None, None, None] + self.b0,
            h=h + self.h0,
            i=i + self.offset[:, None, None, None, None],
            j=jnp.arange(self.keys, dtype=jnp.int64) + t * self.keys + self.j0,
            keys=self.j0 + self.n_k,
            others=self.tables[name][1],
            dense=tuple(series(a, f"{name}.dense")),
        )

    def scores(self, r: Any, t: Any, a: Arrays) -> tuple[Any, Any, RuleIndices]:
        """Return a block's scores S (0 if hidden), visible pairs, and the rule's indices."""
        call, at = self.call, self.indices(r, t, a, "score")
        q, k = a["query"], a["key"]
        T = call.scale * product("bkgia,bkja->bkgij", finite_or_zero(q), finite_or_zero(k))
        S = T + (nan_rows(q)[..., None] + nan_rows(k)[:, :, None, None, :])
        visible = (at.j - self.j0 < self.n_k) & (jnp.arange(self.rows)[:, None] + r * self.rows < self.n_q)
        visible = jnp.broadcast_to(visible, T.shape)
        if call.mask is not None:
            tables = (None,) * len(self.tables["mask"][1])
            inside = self.indices(r, t, a, "mask")
            visible &= evaluate(call.mask, [outline(call.mask)[0]], T, tables, inside, self.real)[0]
        if "bias" in a:
            visible &= a["bias"] != -jnp.inf
        if call.score is not None:
            S = value(call.score, outline(call.score)[0], S, self.tables["score"][0], at, visible)
        if "bias" in a:
            S = S + a["bias"]
        visible &= S != -jnp.inf
        return jnp.where(visible, S, 0), visible, at

    def terms(self, r: Any, t: Any, a: Arrays, scores: tuple[Any, Any, RuleIndices], shift: Any) -> Sums:
        """Return a block's contribution to the sums."""
        S, visible, at = scores
        shifted = jnp.where(visible, S - finite(shift)[..., None], 0)
        P = jnp.where(visible, jnp.exp(shifted), 0)
        D = self.real.type(1)
        if self.call.dropout:
            keep = keep_mask(self.call.dropout, seed_of(self.call.seed, self.x.get("seed")), at)
            D = jnp.where(keep, self.real.type(1 / (1 - self.call.dropout)), 0)
        return P.sum(-1), visible_product(P * D, visible, a["value"]), (P * shifted).sum(-1)

    def over_queries(self, function: Callable[[Any, Arrays], Any], **more: Any) -> Any:
        """Return function(r, arrays) of every block of queries, joined along axis 3."""
        arrays = self.arrays | more
        axes = {n: 3 for n in arrays if n not in ("key", "value")}
        _, blocks = scan(lambda _, r, a: (None, function(r, a)), None, arrays, axes, self.rows, self.n_q)

        def join(a: Any) -> Any:
            a = jnp.moveaxis(a, 0, 3)
            return a.reshape(*a.shape[:3], a.shape[3] * a.shape[4], *a.shape[5:])[:, :, :, : self.n_q]

        return jax.tree.map(join, blocks)

    def over_keys(self, step: Callable[[Any, Any, Arrays], Any], start: Any, a: Arrays) -> Any:
        """Return the last carry of step(carry, t, arrays) over blocks of keys."""
        axes = {n: 2 if n in ("key", "value") else 4 for n in self.arrays if n != "query"}
        return scan(lambda carry, t, a: (step(carry, t, a), None), start, a, axes, self.keys, self.n_k)[0]

    @property
    def zeros(self) -> Sums:
        zero = jnp.zeros((self.B, self.kv, self.group, self.rows), self.real)
        return zero, jnp.zeros((*zero.shape, self.d_v), self.real), zero

    def forward(self) -> Arrays:
        def query_block(r: Any, a: Arrays) -> Any:
            def step(carry: Any, t: Any, a: Arrays) -> Any:
                m, sums = carry
                S, visible, _ = scores = self.scores(r, t, a)
                top = jnp.maximum(m, jnp.where(visible, S, -jnp.inf).max(-1))
                return top, plus(rescaled(sums, m, top), self.terms(r, t, a, scores, top))

            return self.over_keys(step, (jnp.full_like(self.zeros[0], -jnp.inf), self.zeros), a)

        m, sums = self.over_queries(query_block)
        top = jnp.maximum(m, self.sink)
        return self.outputs(rescaled(sums, m, top), top)

    def sums(self, lse: Any) -> Sums:
        """Return the sums for the constant shift `lse`; differentiable."""

        @checkpoint
        def query_block(r: Any, a: Arrays) -> Any:
            tile = checkpoint(lambda t, a: self.terms(r, t, a, self.scores(r, t, a), a["shift"]))
            return self.over_keys(lambda sums, t, a: plus(sums, tile(t, a)), self.zeros, a)

        sums_of_rows: Sums = self.over_queries(query_block, shift=lax.stop_gradient(self.heads(lse)))
        return sums_of_rows

    def sums_of(self, outputs: Arrays, low: Any) -> Sums:
        """Return the sums for the shift lse, from the outputs.

        l = 1 − exp(sink − lse), O = out + low if that is given, e = −entropy.
        """
        lse = self.heads(outputs["lse"])
        l = jnp.where(lse == -jnp.inf, 0, 1 - jnp.exp(self.sink - finite(lse)))
        e = -self.heads(outputs["entropy"]) if "entropy" in outputs else jnp.zeros_like(l)
        O = self.heads(self.transposed("out", outputs["out"]), 1)
        if low is not None:
            O = rounded(O, self.dtype) + self.heads(self.transposed("low", low), 1)
        return l, O, e

    def outputs(self, sums: Sums, shift: Any) -> Arrays:
        l, O, e = sums
        total = l + jnp.exp(self.sink - finite(shift))
        positive = jnp.where(total == 0, 1, total)
        out = O / positive[..., None]
        outputs = {
            "out": out.astype(self.dtype),
            "low": remainder(out, self.dtype),
            "lse": jnp.where(total == 0, -jnp.inf, finite(shift) + jnp.log(positive)),
            "entropy": (l * jnp.log(positive) - e) / positive,
        }
        names = (*self.call.outputs, "low") if self.call.low else self.call.outputs
        return {n: self.per_query(outputs[n], n) for n in names}

    def weights(self) -> Any:
        """Return the softmax of all scores as (..., h, n_q, n_k).

        Weights do not follow from lse, which holds few digits next to a large score.
        """

        def query_block(r: Any, a: Arrays) -> Any:
            S, visible, _ = self.scores(r, 0, a)
            S = jnp.where(visible, S, -jnp.inf)
            m = finite(jnp.maximum(S.max(-1, initial=-jnp.inf), self.sink))[..., None]
            P = jnp.where(visible, jnp.exp(jnp.where(visible, S - m, 0)), 0)
            total = P.sum(-1, keepdims=True) + jnp.exp(self.sink[..., None] - m)
            return jnp.where(visible, P / jnp.where(total == 0, 1, total), 0)

        return self.per_query(self.over_queries(query_block), "weights").astype(self.dtype)


def scan(
    step: Callable[[Any, Any, Arrays], tuple[Any, Any]], start: Any, arrays: Arrays, axes: Mapping[str, int], size: int,
    length: int,
) -> tuple[Any, Any]:  # fmt: skip
    """Apply `lax.scan` of step(carry, n, arrays) over blocks of some arrays.

    Blocks have `size` entries along the axis of each array; zeros fill the last one. Arrays of length 1 there, or
    without an axis, stay whole.
    """
    count = -(-length // max(size, 1)) or 1

    def blocks(a: Any, axis: int) -> Any:
        a = jnp.pad(a, [(0, count * size - length if n == axis else 0) for n in range(a.ndim)])
        return jnp.moveaxis(a.reshape(*a.shape[:axis], count, size, *a.shape[axis + 1 :]), axis, 0)

    split = {n: blocks(arrays[n], axis) for n, axis in axes.items() if arrays[n].shape[axis] != 1}

    def body(carry: Any, at: Any) -> tuple[Any, Any]:
        return step(carry, at[0], arrays | at[1])

    if count > 1:
        carry, stacked = lax.scan(body, start, (jnp.arange(count), split))
        return carry, stacked
    carry, stacked = body(start, (0, {n: a[0] for n, a in split.items()}))  # a program without loops compiles faster
    return carry, jax.tree.map(lambda a: a[None], stacked)


def plus(x: Sums, y: Sums) -> Sums:
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


def rescaled(sums: Sums, shift: Any, new: Any) -> Sums:
    """Return sums for another shift."""
    l, O, e = sums
    step = jnp.where(shift == -jnp.inf, 0, shift - finite(new))
    factor = jnp.exp(step)
    return l * factor, O * factor[..., None], (e + step * l) * factor


def finite(shift: Any) -> Any:
    """Return a shift, with 0 for the −∞ of a query that sees nothing."""
    return jnp.where(shift == -jnp.inf, 0, shift)


def product(pattern: str, x: Any, y: Any) -> Any:
    return jnp.einsum(pattern, x, y, precision=lax.Precision.HIGHEST)


# 0 for values that are not finite, which are counted elsewhere; the derivative is 1.
finite_or_zero: Any = jax.custom_jvp(lambda x: jnp.where(jnp.isfinite(x), x, 0))
finite_or_zero.defjvp(lambda primals, tangents: (finite_or_zero(*primals), *tangents))


def nan_rows(x: Any) -> Any:
    """Return NaN for each row that is not finite, 0 for others."""
    return jnp.where(jnp.isfinite(x).all(-1), 0, jnp.nan).astype(x.dtype)


def visible_product(weight: Any, visible: Any, v: Any) -> Any:
    """Return weight @ v over the visible pairs; hidden ones never give 0 · NaN."""
    plain = product("bkgij,bkjc->bkgic", weight, finite_or_zero(v))

    def nonfinite(plain: Any) -> Any:
        def reach(flag: Any) -> Any:
            return product("bkgij,bkjc->bkgic", visible.astype(v.dtype), flag.astype(v.dtype)) > 0

        up, down, nan = reach(v == jnp.inf), reach(v == -jnp.inf), reach(jnp.isnan(v))
        wild = jnp.where(nan | up & down, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, 0)))
        return plain + wild.astype(plain.dtype)  # a sum, through which gradients pass

    return lax.cond(jnp.isfinite(v).all(), lambda x: x, nonfinite, plain)


def remainder(x: Any, dtype: Any) -> Any:
    """Return x − x as `dtype`, in that dtype; 0 where x or that is not finite."""
    rest = x - rounded(x, dtype)
    return jnp.where(jnp.isfinite(rest), rest, 0).astype(dtype)


def rounded(x: Any, dtype: Any) -> Any:
    """Round to a dtype and back, which XLA leaves out if they are conversions."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)
