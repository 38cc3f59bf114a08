"""The tiled algorithm in plain JAX, for devices without an engine and for what is differentiated beyond the primitives.

Blocks of queries one after the other, and for each a scan over blocks of keys (Rabe and Staats 2021): O(n) memory in
forward and backward, because the scores of a block are computed again from lse. Rules are evaluated as values. A key or
query that is not finite counts as NaN where it is seen.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax
from jax import lax
from regard.core.problem import collapse, compute_dtype
from regard.jax.task import Task, outline, series, turn
from regard.jax.xla.statistics import statistics
from regard.jax.xla.values import Place, evaluate, kept, scattered, seed_words, settings, value
from regard.rules import Node, partials

Arrays = dict[str, Any]
BLOCK = 512


def run(task: Task, operands: Sequence[Any]) -> list[Any]:
    """The results of a task, in the order and with the axes that `regard.jax.task.run` gives them."""
    function: Callable[..., list[Any]] = partial(one, task)
    for n in reversed(range(len(task.sizes))):

        def now(axes: Sequence[int | None], n: int = n) -> int | None:
            """Where the axis lies once those outside of it are gone."""
            at, gone = axes[n], axes[:n]
            return None if at is None else at - sum(g is not None and g < at for g in gone)

        ins = tuple(map(now, task.axes))
        outs = [now(axes) for _, axes in task.wrt] or [0] * len(task.results)
        function = partial(vmapped, function, ins, outs, task.sizes[n])
    with settings():
        found = function(*operands)
    index = jax.dtypes.canonicalize_dtype(np.int64)
    return [x.astype(index) if x.dtype == np.int64 else x for x in found]


def vmapped(function: Any, ins: tuple[int | None, ...], outs: list[int | None], size: int, *operands: Any) -> list[Any]:
    """`jax.vmap`, where a gradient that lacks the axis is summed over it."""
    found = jax.vmap(function, ins, 0, axis_size=size)(*operands)
    return [
        x.sum(0, dtype=x.dtype) if at is None else jnp.moveaxis(x, 0, at) for x, at in zip(found, outs, strict=True)
    ]


def one(task: Task, *operands: Any) -> list[Any]:
    """The results of a task without axes of `vmap`."""
    x = task.named(operands)
    names = task.call.differentiable
    inputs = {n: x[n] for n in names}

    def parts(prefix: str, like: Arrays) -> Arrays:
        return {n: x.get(prefix + n, jnp.zeros_like(a)) for n, a in like.items()}

    def of(inputs: Arrays) -> Blocks:
        return Blocks(task, x | inputs)

    def outputs(inputs: Arrays) -> Arrays:
        return of(inputs).outputs()

    def tangent(inputs: Arrays) -> Arrays:
        dots: Arrays = jax.jvp(outputs, (inputs,), (parts("t.", inputs),))[1]
        return dots

    if task.kind == "forward":
        found = of(inputs).forward()
    elif task.kind == "weights":
        found = {"weights": of(inputs).weights()}
    elif task.kind == "jvp":
        found = tangent(inputs)
    elif task.kind == "jvp_jvp":
        found = jax.jvp(tangent, (inputs,), (parts("s.", inputs),))[1]
    else:
        like = outputs_like(task, x)
        if task.kind == "backward":
            found = of(inputs).backward(parts("ct.", like), {n: x[n] for n in task.call.outputs})
        else:
            found = jax.jvp(
                lambda inputs, ct: of(inputs).backward(ct, outputs(inputs)),
                (inputs, parts("ct.", like)),
                (parts("t.", inputs), parts("t.ct.", like)),
            )[1]
    return [found[n] for n in task.results]


def outputs_like(task: Task, x: Arrays) -> Arrays:
    return {n: x[n] for n in task.call.outputs}


class Blocks:
    """A call cut into blocks: queries (b, kv head, group, ROWS, d), keys (b, kv head, KEYS, d)."""

    def __init__(self, task: Task, x: Arrays):
        call = self.call = task.call
        self.x, self.swap = x, call.layout == "bnhd"
        q, k, v = (self.turned(n, x[n]) for n in ("query", "key", "value"))
        self.dtype = q.dtype
        self.real = compute_dtype(np.dtype(q.dtype))
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.B = int(np.prod(self.lead))
        self.h, self.kv = q.shape[-3], k.shape[-3]
        self.group = self.h // self.kv if self.kv else 1
        self.n_q, self.n_k, self.d, self.d_v = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        self.rows, self.keys = min(BLOCK, max(self.n_q, 1)), min(BLOCK, max(self.n_k, 1))
        self.bands, self.tiles = -(-self.n_q // self.rows) or 1, -(-self.n_k // self.keys) or 1
        self.q, self.k, self.v = (self.flat(a) for a in (q, k, v))
        self.q = self.q.reshape(self.B, self.kv, self.group, self.n_q, self.d)
        masses = {f"mass{n}": of for n, (name, of) in enumerate(call.observe) if name == "mass"}
        self.masks = {name: text for name, text in {"mask": call.mask, **masses}.items() if text is not None}
        self.tables = {n: self.read_tables(n) for n in (*self.masks, "score")}
        origin = x["origin"].astype(jnp.int64) if call.origin is None else jnp.asarray(call.origin, jnp.int64)
        offset = x["offset"].astype(jnp.int64) if call.offset is None else jnp.asarray(call.offset, jnp.int64)
        if call.offset is None:
            offset = jnp.broadcast_to(offset, self.lead)
        self.offset = jnp.broadcast_to(offset.reshape(-1), (self.B,))
        self.b0, self.h0, self.j0 = origin
        self.scale = self.real.type(call.scale)
        self.bias: Any = self.dense(x["bias"]).astype(self.real) if "bias" in x else None
        self.denses = {n: tuple(map(self.dense, series(x, f"{n}.dense"))) for n in self.masks}
        sink = x.get("sink", jnp.full((), -jnp.inf)).astype(self.real)
        self.sink = jnp.broadcast_to(sink, (self.h,)).reshape(1, self.kv, self.group, 1)  # −∞: none

    def turned(self, name: str, a: Any) -> Any:
        return turn(name, a) if self.swap else a

    def flat(self, a: Any) -> Any:
        """(..., h, n, d) as (b, h, n, d), in the dtype of sums."""
        return jnp.broadcast_to(a, (*self.lead, *a.shape[-3:])).reshape(self.B, *a.shape[-3:]).astype(self.real)

    def read_tables(self, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Float tables of a score by slot, and the others."""
        every = series(self.x, f"{name}.table")
        trains = [name == "score" and jnp.issubdtype(t.dtype, jnp.floating) for t in every]
        return (
            tuple(t.astype(self.real) if train else None for t, train in zip(every, trains, strict=True)),
            tuple(None if train else t for t, train in zip(every, trains, strict=True)),
        )

    def band(self, a: Any, r: Any, axis: int) -> Any:
        return cut(a, r * self.rows, self.rows, axis)

    def tile(self, a: Any, t: Any, axis: int) -> Any:
        return cut(a, t * self.keys, self.keys, axis)

    def dense(self, a: Any) -> Any:
        """A dense mask or bias as (b, kv head, group, n_q, n_k), each of which may be 1."""
        a = a.reshape((1,) * (len(self.lead) + 3 - a.ndim) + a.shape)
        lead = a.shape[:-3]
        if any(size != 1 for size in lead):
            a = jnp.broadcast_to(a, (*self.lead, *a.shape[-3:]))
        heads = (1, 1) if a.shape[-3] == 1 else (self.kv, self.group)
        return a.reshape(int(np.prod(a.shape[:-3])), *heads, *a.shape[-2:])

    def part(self, a: Any, r: Any, t: Any) -> Any:
        """A block of what `dense` gives."""
        return self.tile(self.band(a, r, 3), t, 4)

    def place(self, r: Any, t: Any, name: str) -> Place:
        b = jnp.arange(self.B, dtype=jnp.int64)
        h = jnp.arange(self.h, dtype=jnp.int64).reshape(self.kv, self.group, 1, 1)
        i = jnp.arange(self.rows, dtype=jnp.int64)[:, None] + r * self.rows
        return Place(
            b=b[:, None, None, None, None] + self.b0,
            h=h + self.h0,
            i=i + self.offset[:, None, None, None, None],
            j=jnp.arange(self.keys, dtype=jnp.int64) + t * self.keys + self.j0,
            keys=self.j0 + self.n_k,
            others=self.tables[name][1],
            dense=tuple(self.part(a, r, t) for a in self.denses.get(name, ())),
        )

    def scores(self, r: Any, t: Any) -> tuple[Any, Any, Any, Any]:
        """Raw scores T, scores S (0 where hidden), what is visible, and the place of the score rule."""
        call, at = self.call, self.place(r, t, "score")
        q, k = self.band(self.q, r, 3), self.tile(self.k, t, 2)
        T = self.scale * product("bkgia,bkja->bkgij", tame(q), tame(k))
        wild = wild_rows(q)[..., :, None] | wild_rows(k)[:, :, None, None, :]
        visible = (at.j - self.j0 < self.n_k) & (jnp.arange(self.rows)[:, None] + r * self.rows < self.n_q)
        visible = jnp.broadcast_to(visible, T.shape)
        if call.mask is not None:
            visible &= self.allowed("mask", T, r, t)
        T = jnp.where(wild & visible, jnp.nan, T)
        S = T
        if call.score is not None:
            S = value(call.score, outline(call.score)[0], T, self.tables["score"][0], at)
        if self.bias is not None:
            S = S + self.part(self.bias, r, t)
        visible &= S != -jnp.inf
        return T, jnp.where(visible, S, 0), visible, at

    def allowed(self, name: str, T: Any, r: Any, t: Any) -> Any:
        """Where a rule of masks holds, in a block with scores T."""
        text, tables = self.masks[name], (None,) * len(self.tables[name][1])
        return evaluate(text, [outline(text)[0]], T, tables, self.place(r, t, name), self.real)[0]

    def dropout(self, at: Place) -> Any:
        if not self.call.dropout:
            return self.real.type(1)
        seed = seed_words(self.call.seed, self.x.get("seed"))
        keep = kept(self.call.dropout, seed, at)
        return jnp.where(keep, self.real.type(1 / (1 - self.call.dropout)), 0)

    def each_band(self, function: Callable[[Any], Any]) -> Any:
        """The results (..., ROWS, *tail) of every band, axis 3 of each put together again."""
        _, found = scan(lambda _, r: (None, function(r)), None, self.bands)

        def join(a: Any) -> Any:
            a = jnp.moveaxis(a, 0, 3)
            return a.reshape(*a.shape[:3], self.bands * self.rows, *a.shape[5:])[:, :, :, : self.n_q]

        return jax.tree.map(join, found)

    def per_query(self, a: Any, name: str) -> Any:
        """(b, kv head, group, n_q, ...) as the caller sees it."""
        return self.turned(name, a.reshape(*self.lead, self.h, *a.shape[3:]))

    def running(self, r: Any) -> tuple[Any, ...]:
        """out, lse, entropy and the largest score of a band."""
        shape = (self.B, self.kv, self.group, self.rows)
        zero = jnp.zeros(shape, self.real)
        start = (jnp.full(shape, -jnp.inf, self.real), zero, jnp.zeros((*shape, self.d_v), self.real), zero)

        def step(carry: Any, t: Any) -> tuple[Any, None]:
            m, l, O, e = carry
            _, S, visible, at = self.scores(r, t)
            top = jnp.maximum(m, jnp.where(visible, lax.stop_gradient(S), -jnp.inf).max(-1))
            safe = jnp.where(top == -jnp.inf, 0, top)
            old = jnp.exp(m - safe)
            shifted = jnp.where(visible, S - safe[..., None], 0)
            P = jnp.where(visible, jnp.exp(shifted), 0)
            O = O * old[..., None] + seen(P * self.dropout(at), visible, self.tile(self.v, t, 2))
            e = (e + jnp.where(old == 0, 0, m - safe) * l) * old + (P * shifted).sum(-1)
            return (top, l * old + P.sum(-1), O, e), None

        (m, l, O, e), _ = scan(step, start, self.tiles)
        sink = jnp.broadcast_to(self.sink, shape)
        top = lax.stop_gradient(jnp.maximum(m, sink))
        safe = jnp.where(top == -jnp.inf, 0, top)
        old = jnp.exp(m - safe)
        total = l * old + jnp.where(sink == -jnp.inf, 0, jnp.exp(sink - safe))
        positive = jnp.where(total == 0, 1, total)
        e = (e + jnp.where(old == 0, 0, m - safe) * l) * old
        lse = jnp.where(total == 0, -jnp.inf, safe + jnp.log(positive))
        return O * (old / positive)[..., None], lse, (l * old * jnp.log(positive) - e) / positive, m

    def outputs(self) -> Arrays:
        out, lse, entropy, _ = self.each_band(self.running)
        found = {"out": out.astype(self.dtype), "lse": lse, "entropy": entropy}
        return {n: self.per_query(found[n], n) for n in self.call.outputs}

    def forward(self) -> Arrays:
        """Outputs and every statistic that is observed."""
        found = self.outputs()
        return found | statistics(self, found["lse"])

    def known(self, r: Any, t: Any, lse: Any) -> tuple[Any, ...]:
        """T, S − lse, P, what is visible and the place, of a block whose lse (ROWS of it) is known."""
        T, S, visible, at = self.scores(r, t)
        logP = jnp.where(visible, S - jnp.where(lse == -jnp.inf, 0, lse)[..., None], 0)
        return T, logP, jnp.where(visible, jnp.exp(logP), 0), visible, at

    def heads(self, a: Any, tail: int = 0) -> Any:
        """(..., h, n_q, *tail) as (b, kv head, group, n_q, *tail)."""
        shape = a.shape[a.ndim - tail :]
        return a.reshape(self.B, self.kv, self.group, self.n_q, *shape).astype(self.real)

    def weights(self) -> Any:
        lse = self.heads(self.outputs()["lse"])

        def band(r: Any) -> Any:
            rows = self.band(lse, r, 3)
            found = lax.map(lambda t: self.known(r, t, rows)[2], jnp.arange(self.tiles))
            found = jnp.moveaxis(found, 0, 4)
            return found.reshape(*found.shape[:4], self.tiles * self.keys)[..., : self.n_k]

        return self.per_query(self.each_band(band), "weights").astype(self.dtype)

    def backward(self, ct: Arrays, outputs: Arrays) -> Arrays:
        """Gradients of ⟨ō, outputs⟩ with respect to every input that may vary, by name."""
        x, rule = self.x, self.call.score
        lse = self.heads(outputs["lse"])
        dlse = self.heads(ct["lse"])
        out, dO = (self.heads(self.turned("out", a["out"]), 1) for a in (outputs, ct))
        dead = lse == -jnp.inf
        p_sink = jnp.where(dead | (self.sink == -jnp.inf), 0, jnp.exp(self.sink - jnp.where(dead, 0, lse)))
        c = dlse - (dO * out).sum(-1)
        dH = None
        if "entropy" in ct:
            dH = self.heads(ct["entropy"])
            c = c + dH * (jnp.where(dead, 0, 1 - p_sink) - self.heads(outputs["entropy"]))
        d_ds: Any = None
        d_tables: dict[Node, Node] = {}
        tables = self.tables["score"][0]
        if rule is not None:
            d_ds, d_tables = partials(outline(rule)[0])
        zeros = {n: jnp.zeros(t.shape, self.real) for n, t in enumerate(tables) if t is not None}
        bias = None if self.bias is None else jnp.zeros(padded(self.bias.shape, self), self.real)
        keys = jnp.zeros((self.tiles, self.B, self.kv, self.keys, self.d), self.real)
        values = jnp.zeros((self.tiles, self.B, self.kv, self.keys, self.d_v), self.real)

        def band(carry: Any, r: Any) -> tuple[Any, Any]:
            q = tame(self.band(self.q, r, 3))
            rows = {n: self.band(a, r, 3) for n, a in (("lse", lse), ("c", c), ("dO", dO))}

            def step(carry: Any, t: Any) -> tuple[Any, Any]:
                dq, bias, zeros = carry
                T, logP, P, visible, at = self.known(r, t, rows["lse"])
                D = self.dropout(at)
                v, k = tame(self.tile(self.v, t, 2)), tame(self.tile(self.k, t, 2))
                G = D * product("bkgic,bkjc->bkgij", rows["dO"], v) + rows["c"][..., None]
                if dH is not None:
                    G = G - self.band(dH, r, 3)[..., None] * (logP + 1)
                dS = jnp.where(visible, P * G, 0)
                dT = dS
                if rule is not None:
                    dT = jnp.where(visible, dS * value(rule, d_ds, T, tables, at), 0)
                    zeros = dict(zeros)
                    for leaf, part in d_tables.items():
                        slot = outline(rule)[1].index(leaf.payload)
                        each = jnp.where(visible, dS * value(rule, part, T, tables, at), 0)
                        zeros[slot] = zeros[slot] + scattered(rule, leaf, each, tables, at)
                if bias is not None:
                    bias = self.add_bias(bias, dS, r, t)
                dq = dq + product("bkgij,bkja->bkgia", dT, k)
                dk = product("bkgij,bkgia->bkja", dT, q)
                dv = product("bkgij,bkgic->bkjc", P * D, rows["dO"])
                return (dq, bias, zeros), (dk, dv)

            keys, values, bias, zeros = carry
            start = jnp.zeros((self.B, self.kv, self.group, self.rows, self.d), self.real), bias, zeros
            (dq, bias, zeros), (dk, dv) = scan(step, start, self.tiles)
            return (keys + dk, values + dv, bias, zeros), dq

        (keys, values, bias, zeros), dq = scan(band, (keys, values, bias, zeros), self.bands)
        dq = jnp.moveaxis(dq, 0, 3)
        dq = dq.reshape(*dq.shape[:3], self.bands * self.rows, self.d)[:, :, :, : self.n_q]
        found = {"query": self.scale * dq.reshape(*self.lead, self.h, self.n_q, self.d)}
        for n, a, s in (("key", keys, self.scale), ("value", values, self.real.type(1))):
            a = jnp.moveaxis(a, 0, 2).reshape(self.B, self.kv, self.tiles * self.keys, a.shape[-1])[:, :, : self.n_k]
            found[n] = s * a.reshape(*self.lead, *a.shape[1:])
        if bias is not None:
            bias = bias[:, :, :, : self.bias.shape[3], : self.bias.shape[4]]
            full = x["bias"].reshape((1,) * (len(self.lead) + 3 - x["bias"].ndim) + x["bias"].shape)
            lead = self.lead if bias.shape[0] != 1 or self.B == 1 else (1,) * len(self.lead)
            bias = bias.reshape(*lead, full.shape[-3], *bias.shape[3:])
            found["bias"] = collapse(bias, full.shape).reshape(x["bias"].shape)
        if "sink" in x:
            found["sink"] = collapse((p_sink * c).sum((0, 3)).reshape(-1), x["sink"].shape)
        found |= {f"score.table{n}": a for n, a in zeros.items()}
        shapes = {n: self.turned(n, x[n]) for n in self.call.differentiable}
        return {n: self.turned(n, collapse(found[n], a.shape)).astype(a.dtype) for n, a in shapes.items()}

    def add_bias(self, bias: Any, dS: Any, r: Any, t: Any) -> Any:
        """The gradient of the bias with that of a block added, summed where the bias broadcasts."""
        axes = tuple(n for n, size in enumerate(self.bias.shape) if size == 1 != dS.shape[n])
        dS = dS.sum(axes, keepdims=True)
        start = (
            0,
            0,
            0,
            0 if self.bias.shape[3] == 1 else r * self.rows,
            0 if self.bias.shape[4] == 1 else t * self.keys,
        )
        start = tuple(jnp.asarray(n, jnp.int64) for n in start)
        return lax.dynamic_update_slice(bias, lax.dynamic_slice(bias, start, dS.shape) + dS, start)


def scan(step: Callable[[Any, Any], tuple[Any, Any]], start: Any, count: int) -> tuple[Any, Any]:
    """`lax.scan` over 0, 1, ..., but no loop where there is one step: a program without loops compiles faster."""
    if count > 1:
        carry, found = lax.scan(step, start, jnp.arange(count))
    else:
        carry, found = step(start, 0)
        found = jax.tree.map(lambda a: a[None], found)
    return carry, found


def padded(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    rows = 1 if shape[3] == 1 else blocks.bands * blocks.rows
    return (*shape[:3], rows, 1 if shape[4] == 1 else blocks.tiles * blocks.keys)


def cut(a: Any, start: Any, size: int, axis: int) -> Any:
    """`size` entries along an axis from `start`, zeros beyond its end; all of an axis of 1 that broadcasts."""
    length = a.shape[axis]
    if length == size or length == 1:
        return a
    over = -length % size if length else size
    if over:
        a = jnp.pad(a, [(0, over if n == axis else 0) for n in range(a.ndim)])
    return lax.dynamic_slice_in_dim(a, start, size, axis)


def product(pattern: str, x: Any, y: Any) -> Any:
    return jnp.einsum(pattern, x, y, precision=lax.Precision.HIGHEST)


def tame(x: Any) -> Any:
    return jnp.where(jnp.isfinite(x), x, 0)


def wild_rows(x: Any) -> Any:
    return ~jnp.isfinite(x).all(-1)


def seen(weight: Any, visible: Any, v: Any) -> Any:
    """weight @ v over the visible pairs, so that what is hidden never makes 0 · NaN."""
    plain = product("bkgij,bkjc->bkgic", weight, tame(v))

    def careful(plain: Any) -> Any:
        def reach(flag: Any) -> Any:
            return product("bkgij,bkjc->bkgic", visible.astype(v.dtype), flag.astype(v.dtype)) > 0

        up, down, nan = reach(v == jnp.inf), reach(v == -jnp.inf), reach(jnp.isnan(v))
        return jnp.where(nan | up & down, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, plain)))

    return lax.cond(jnp.isfinite(v).all(), lambda x: x, careful, plain)
