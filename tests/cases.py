"""The table of cases: every option of a call, each in a small shape.

Conformance tests and benchmarks read it. To add an option, add a line to CASES; every engine and framework then has to
run it. Benchmarks take a case by its name at another size, `case("window", n_q=2048, n_k=2048)`; its options follow
the sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import regard

Array = np.ndarray[Any, np.dtype[Any]]
Options = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call.

    options: a function of (rng, case) that returns the options of `regard.attention`.
    """

    name: str
    options: Callable[[np.random.Generator, "Case"], Options] = lambda rng, c: {}
    lead: tuple[int, ...] = (2,)
    kv_lead: tuple[int, ...] | None = None
    h: int = 2
    h_kv: int | None = None
    n_q: int = 21
    n_k: int = 21
    d: int = 8
    d_v: int = 8
    layout: str = "bhnd"
    token_major: bool = False  # strides of K and V: (..., h, n, d) is a view of (..., n, h, d)
    poison: float | None = None  # the value of keys that the mask hides from some queries, in addition to NaN

    def __str__(self) -> str:
        return self.name

    def inputs(self, dtype: Any, seed: int = 0) -> tuple[Array, Array, Array, Options]:
        """Return query, key, value and options, the same for the same seed."""
        rng = np.random.default_rng([seed, *self.name.encode()])
        kv_lead = self.lead if self.kv_lead is None else self.kv_lead
        h_kv = self.h_kv or self.h
        shapes = (
            (*self.lead, self.h, self.n_q, self.d),
            (*kv_lead, h_kv, self.n_k, self.d),
            (*kv_lead, h_kv, self.n_k, self.d_v),
        )
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        options = self.options(rng, self)
        if self.poison is not None:
            k[..., -3, :], v[..., -3, :], v[..., -4, :] = np.nan, np.nan, self.poison
        if self.layout == "bnhd" or self.token_major:
            q, k, v = (np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (q, k, v))
        if self.layout == "bnhd":
            options["layout"] = "bnhd"
        elif self.token_major:
            q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
        return q, k, v, options

    def inputs_with_real_bias(self, dtype: Any, seed: int = 0) -> tuple[Array, Array, Array, Options]:
        """Return `inputs` with the bias in the dtype of sums.

        That is float64 for float64, else float32.
        """
        q, k, v, options = self.inputs(dtype, seed)
        if "bias" in options:
            options["bias"] = options["bias"].astype(np.float64 if q.dtype == np.float64 else np.float32)
        return q, k, v, options


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape)


def mixed_rule(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i - j) % 3 == h) | (j * 2 < i) & ~(j == 4)


def recency(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - 0.1 * abs(i - j) / (h + 1)


def curved(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return np.sqrt(1.0 + s**2) + 0.3 * s * np.tanh(s) - np.sqrt(1.0 + (i - j) ** 2)


def hiding(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return regard.where(i >= j, s, -np.inf)


def tabled(table: regard.Table) -> Callable[..., Any]:
    """Return a score rule that multiplies the score by a table.

    Its mixed second derivatives are not zero.
    """

    def rule(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * np.tanh(table[h, i - j + 4]) + table[h, j % 9] ** 2

    return rule


def stretched(number: regard.Table) -> Callable[..., Any]:
    """Return a score rule that reads a table without axes."""
    return lambda s, b, h, i, j: s * number[()]


CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("one query", n_q=1),
    Case("one key", n_k=1),
    Case("larger than a tile", lead=(), n_q=130, n_k=600, d=16, d_v=16),
    Case("no batch", lead=()),
    Case("two leading dimensions", lead=(2, 3)),
    Case("broadcast leading dimensions", lead=(2, 1), kv_lead=(3,)),
    Case("grouped heads", h=6, h_kv=2),
    Case("one key head", h=4, h_kv=1, d=5),
    Case("wide value", d=4, d_v=11),
    Case("one feature", d=1, d_v=1),
    Case("positions first", layout="bnhd", h=4, h_kv=2),
    Case("two queries, token-major", token_major=True, h=6, h_kv=3, n_q=2, n_k=300),
    Case("no queries", n_q=0),
    Case("no queries, keys beyond the last", lambda rng, c: {"mask": regard.global_tokens(3)}, n_q=0, n_k=257),
    Case("no keys", n_k=0),
    Case("no keys, sink", lambda rng, c: {"sink": normal(rng, c.h)}, n_k=0),
    Case("empty batch", lead=(0,)),
    Case("no features", d=0),
    Case("no value features", d_v=0),
    Case("plain dot product", lambda rng, c: {"scale": 1.0}),
    Case("causal", lambda rng, c: {"causal": True}),
    Case("causal, fewer queries", lambda rng, c: {"causal": True}, n_q=5),
    Case("causal, rows that see nothing", lambda rng, c: {"causal": True}, n_q=21, n_k=9),
    Case("causal over tiles", lambda rng, c: {"causal": True}, lead=(), n_q=300, n_k=300),
    Case("offset", lambda rng, c: {"causal": True, "offset": 7}),
    Case("offset for each batch element", lambda rng, c: {"causal": True, "offset": np.array([3, -2])}, n_q=5),
    Case("origin", lambda rng, c: {"causal": True, "offset": 30, "origin": (5, 7, 20), "dropout": 0.3, "seed": 3}),
    Case("window", lambda rng, c: {"mask": regard.window(c.n_k // 8)}),
    Case("window both ways", lambda rng, c: {"mask": regard.window(2, 3)}),
    Case("window over tiles", lambda rng, c: {"mask": regard.window(40, 3)}, lead=(), n_q=400, n_k=700),
    Case("gap between tiles", lambda rng, c: {"mask": regard.prefix(140) | outside(512)}, lead=(), n_q=9, n_k=600),
    Case("prefix", lambda rng, c: {"mask": regard.causal() | regard.prefix(np.array([c.n_k // 7, c.n_k // 3]))}),
    Case("padding", lambda rng, c: {"mask": regard.padding(np.array([c.n_k // 5, c.n_k]))}),
    Case("padding left", lambda rng, c: {"mask": regard.padding(np.array([4, 0]), side="left")}),
    Case("documents", lambda rng, c: {"mask": regard.documents(thirds(c)), "causal": True}),
    Case("strided", lambda rng, c: {"mask": regard.strided(4) | regard.global_tokens(2)}),
    Case("dilated", lambda rng, c: {"mask": regard.dilated(3, 4)}),
    Case("neighborhood", lambda rng, c: {"mask": regard.neighborhood((5, 7), 3)}, n_q=35, n_k=35),
    Case(
        "neighborhood in three dimensions",
        lambda rng, c: {"mask": regard.neighborhood((4, 5, 6), (3, 2, 3), (2, 1, 1), (1, 2, 1), (False, True, False))},
        n_q=120,
        n_k=120,
    ),
    Case("blocks", lambda rng, c: {"mask": regard.blocks(rng.random((c.h, 3, 3)) < 0.5, 8)}),
    Case(
        "composed masks",
        lambda rng, c: {"mask": ~regard.window(c.n_k // 10) & regard.causal() | regard.global_tokens(1)},
    ),
    Case("mask rule", lambda rng, c: {"mask": mixed_rule}),
    Case(
        "mask rule with large integers", lambda rng, c: {"mask": lambda b, h, i, j: (i - j) * 1000003 * 1000003 % 7 < 4}
    ),
    Case("boolean mask", lambda rng, c: {"mask": rng.random((2, 1, c.n_q, c.n_k)) < 0.4}),
    Case("0/1 mask over tiles", lambda rng, c: {"mask": rng.integers(0, 2, (c.n_q, 1))}, lead=(), n_q=70, n_k=300),
    Case("mask and rule", lambda rng, c: {"mask": regard.causal() & (rng.random((c.n_q, c.n_k)) < 0.7)}),
    Case("NaN behind the mask", lambda rng, c: {"mask": ~regard.mask(last_keys(c))}, poison=np.inf),
    Case("NaN behind causal", lambda rng, c: {"causal": True, "bias": normal(rng, c.h, 1, c.n_k)}, poison=np.nan),
    Case("softcap", lambda rng, c: {"score": regard.softcap(1.5)}),
    Case(
        "alibi",
        lambda rng, c: {"score": regard.alibi(regard.table(normal(rng, c.h) * 21 / c.n_k)), "causal": True},
    ),
    Case("alibi of each batch element", lambda rng, c: {"score": regard.alibi(regard.table(normal(rng, 2, c.h) / 9))}),
    Case("relative", lambda rng, c: {"score": regard.relative(regard.table(normal(rng, c.h, 11)))}),
    Case("T5 buckets", lambda rng, c: {"score": regard.relative(regard.table(normal(rng, c.h, 16)), buckets="t5")}),
    Case("temperature", lambda rng, c: {"score": regard.temperature(regard.table(np.exp(normal(rng, c.h))))}),
    Case("score rule", lambda rng, c: {"score": recency}),
    Case("curved score", lambda rng, c: {"score": curved}),
    Case("score that hides", lambda rng, c: {"score": hiding}),
    Case("score with a table", lambda rng, c: {"score": tabled(regard.table(normal(rng, c.h, 9)))}),
    Case("scores in order", lambda rng, c: {"score": [regard.softcap(2.0), recency, regard.temperature(0.7)]}),
    Case("bias", lambda rng, c: {"bias": normal(rng, 2, c.h, c.n_q, c.n_k)}),
    Case("broadcast bias", lambda rng, c: {"bias": normal(rng, c.h, 1, c.n_k)}, lead=(3,)),
    Case("bias of one row", lambda rng, c: {"bias": normal(rng, c.n_k)}, lead=(2, 2)),
    Case("bias that hides", lambda rng, c: {"bias": np.where(rng.random((c.n_q, c.n_k)) < 0.5, -np.inf, 0.3)}),
    Case("bias over tiles", lambda rng, c: {"bias": normal(rng, 1, c.n_q, c.n_k)}, lead=(), n_q=70, n_k=300),
    Case("sink", lambda rng, c: {"sink": normal(rng, c.h)}),
    Case("one sink for all", lambda rng, c: {"sink": np.array(0.7), "causal": True}, n_k=4),
    Case("dropout", lambda rng, c: {"dropout": 0.4, "seed": 11}),
    Case("dropout over tiles", lambda rng, c: {"dropout": 0.1, "seed": 2**63}, lead=(), n_q=70, n_k=300),
    Case("metric", lambda rng, c: {"metric": normal(rng, c.h, c.d, c.d) / 2}, h=4, h_kv=2, layout="bnhd"),
    Case("one metric for all", lambda rng, c: {"metric": normal(rng, c.d, c.d) / 2, "causal": True}, kv_lead=(1,)),
    Case("latent heads", lead=(), h=4, h_kv=1, n_q=3, n_k=150, d=576, d_v=512),
    Case("widest heads", lambda rng, c: {"causal": True}, lead=(), h=1, d=1024, d_v=1024),
    Case("bias of one number", lambda rng, c: {"bias": np.array(0.3)}),
    Case("score with a number", lambda rng, c: {"score": stretched(regard.table(np.array(1.3)))}),
    Case(
        "everything",
        lambda rng, c: {
            "mask": regard.window(15, 6) & regard.padding(np.array([c.n_k, c.n_k * 13 // 21])),
            "causal": True,
            "score": [regard.softcap(5.0), tabled(regard.table(normal(rng, c.h, 9)))],
            "bias": normal(rng, c.h, 1, c.n_k),
            "scale": 0.3,
            "sink": normal(rng, c.h),
            "dropout": 0.2,
            "seed": 5,
            "offset": np.array([0, 2]),
        },
        h=4,
        h_kv=2,
        d_v=6,
    ),
)


def thirds(c: Case) -> Array:
    """Return document ids that neither ascend nor begin at 0."""
    return np.array([7, 1, 4])[np.arange(c.n_k) * 3 // c.n_k]


def outside(n: int) -> regard.Mask:
    return regard.mask(lambda b, h, i, j: j >= n)


def last_keys(c: Case) -> Callable[..., Any]:
    return lambda b, h, i, j: (j == c.n_k - 3) | (j == c.n_k - 4)


def case(name: str, **sizes: Any) -> Case:
    """Return the case of a name in other sizes."""
    return replace(next(c for c in CASES if c.name == name), **sizes)
