"""Derivatives to measure: those of `regard` and of other libraries.

An adapter takes a `DerivativeCall` and the number of threads. It prepares everything that comes before (forward, for
backward; backward, for double backward). It returns the call to time, and a function from its result to named arrays.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import regard
from benchmarks import naive
from benchmarks.peers import Unable, tensor
from cases import Case

Array = np.ndarray[Any, np.dtype[Any]]
Options = dict[str, Any]
Named = dict[str, Array]
Prepared = tuple[Callable[[], Any], Callable[[Any], Named]]
Adapter = Callable[["DerivativeCall", int], Prepared]


@dataclass(frozen=True)
class DerivativeCall:
    """Inputs of a call with cotangents and tangents.

    dout: the cotangent of the output; ddout: its tangent; tangents: of the inputs.
    """

    q: Array
    k: Array
    v: Array
    options: Options
    dout: Array
    ddout: Array
    tangents: regard.Differential

    @classmethod
    def of(cls, c: Case, dtype: np.dtype[Any]) -> "DerivativeCall":
        """Make the call of a case, with the bias in the dtype of sums.

        Layouts other than "bnhd" only.
        """
        q, k, v, options = c.inputs_with_real_bias(dtype)
        rng = np.random.default_rng(1)
        bias = options.get("bias")

        def like(x: Array | None, *shape: int) -> Any:
            return None if x is None else rng.standard_normal(shape or x.shape).astype(x.dtype)

        out = (*q.shape[:-1], v.shape[-1])
        t = regard.Differential(like(q), like(k), like(v), like(bias))
        return cls(q, k, v, options, like(v, *out), like(v, *out), t)

    def wide(self) -> "DerivativeCall":
        """Return the same call in float64."""

        def turn(x: Any) -> Any:
            return None if x is None else x.astype(np.float64)

        options = self.options | ({"bias": turn(self.options["bias"])} if "bias" in self.options else {})
        t = regard.Differential(*(turn(getattr(self.tangents, name)) for name in ("query", "key", "value", "bias")))
        return DerivativeCall(turn(self.q), turn(self.k), turn(self.v), options, turn(self.dout), turn(self.ddout), t)


def named(g: regard.Differential) -> Named:
    arrays = {"dq": g.query, "dk": g.key, "dv": g.value, "dbias": g.bias}
    return {name: x for name, x in arrays.items() if x is not None}


# regard


def known(g: DerivativeCall, engine: str | None) -> Options:
    """Return the options of a derivative, with the outputs of forward."""
    out, seen = regard.attention(g.q, g.k, g.v, observe=["lse"], engine=engine, **g.options)
    return g.options | {"outputs": regard.Outputs(out, seen.lse, None), "engine": engine}


def forward(g: DerivativeCall, threads: int, engine: str | None = None) -> Prepared:
    return partial(regard.attention, g.q, g.k, g.v, engine=engine, **g.options), lambda out: {"out": out}


def backward(g: DerivativeCall, threads: int, engine: str | None = None) -> Prepared:
    return partial(regard.attention_vjp, g.q, g.k, g.v, g.dout, **known(g, engine)), named


def jvp(g: DerivativeCall, threads: int, engine: str | None = None) -> Prepared:
    """Prepare the outputs and their tangents, with no outputs given."""
    t = g.tangents
    more = g.options | ({} if t.bias is None else {"dbias": t.bias}) | {"engine": engine}
    call = partial(regard.attention_jvp, g.q, g.k, g.v, t.query, t.key, t.value, **more)
    return call, lambda found: {"out": found[0].out, "tangent of out": found[1].out}


def double_backward(g: DerivativeCall, threads: int, engine: str | None = None) -> Prepared:
    """Prepare the gradients of ⟨tangents, gradients⟩."""
    call = partial(regard.attention_vjp_jvp, g.q, g.k, g.v, g.dout, g.tangents, **known(g, engine))
    return call, lambda found: named(found[0]) | {"ddout": found[1].out}


def forward_over_reverse(g: DerivativeCall, threads: int, engine: str | None = None) -> Prepared:
    """Prepare the tangents of gradients, with tangents of the cotangent too."""
    moving = regard.Outputs(g.ddout, None, None)
    more = known(g, engine) | {"cotangent_tangents": moving}
    return partial(regard.attention_vjp_jvp, g.q, g.k, g.v, g.dout, g.tangents, **more), lambda found: named(found[0])


OURS: dict[str, Callable[..., Prepared]] = {
    "forward": forward,
    "backward": backward,
    "JVP": jvp,
    "double backward": double_backward,
    "forward over reverse": forward_over_reverse,
}


def exact(kind: str, g: DerivativeCall) -> Named:
    """Compute a derivative in float64, in tiles on NumPy."""
    call, read = OURS[kind](g.wide(), 1, "tiled")
    return read(call())


# PyTorch: its fused path if it has one, else that with n × n arrays


def torch_names(found: Any) -> Named:
    import torch

    names = ("dq", "dk", "dv", "dbias", "ddout") if len(found) == 5 else ("dq", "dk", "dv", "dbias")
    arrays = [np.asarray((x.float() if x.dtype == torch.bfloat16 else x).detach().numpy()) for x in found]
    return dict(zip(names, arrays, strict=False))


class Torch:
    """Inputs as tensors that need gradients, and their `scaled_dot_product_attention`."""

    def __init__(self, g: DerivativeCall, threads: int):
        import torch

        unknown = set(g.options) - {"causal", "bias"}
        if unknown:
            raise Unable(f"has no {' and '.join(sorted(unknown))}")
        torch.set_num_threads(threads)
        self.torch, self.causal = torch, bool(g.options.get("causal"))
        self.inputs = [tensor(x).requires_grad_() for x in (g.q, g.k, g.v)]
        if "bias" in g.options:
            self.inputs.append(tensor(g.options["bias"]).requires_grad_())
        t = g.tangents
        self.dout = tensor(g.dout)
        self.tangents = [tensor(x) for x in (t.query, t.key, t.value, t.bias) if x is not None]

    def attention(self, q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        dpa = self.torch.nn.functional.scaled_dot_product_attention
        four = [x if x.ndim == 4 else x[None] for x in (q, k, v)]  # the fused path needs four dimensions
        out = dpa(*four, attn_mask=bias, is_causal=self.causal, enable_gqa=k.shape[-3] != q.shape[-3])
        return out if q.ndim == 4 else out[0]

    @contextmanager
    def math(self) -> Iterator[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.MATH):
            yield


def torch_backward(g: DerivativeCall, threads: int) -> Prepared:
    t = Torch(g, threads)
    out = t.attention(*t.inputs)
    return partial(t.torch.autograd.grad, out, t.inputs, t.dout, retain_graph=True), torch_names


def torch_jvp(g: DerivativeCall, threads: int) -> Prepared:
    t = Torch(g, threads)
    inputs = tuple(x.detach() for x in t.inputs)

    def call() -> Any:
        with t.math():
            return t.torch.func.jvp(t.attention, inputs, tuple(t.tangents))

    return call, lambda found: dict(zip(("out", "tangent of out"), (x.numpy() for x in found), strict=True))


def torch_double_backward(g: DerivativeCall, threads: int) -> Prepared:
    t = Torch(g, threads)
    dout = t.dout.requires_grad_()
    with t.math():
        out = t.attention(*t.inputs)
        gradients = t.torch.autograd.grad(out, t.inputs, dout, create_graph=True)
    call = partial(t.torch.autograd.grad, gradients, [*t.inputs, dout], t.tangents, retain_graph=True)
    names = ("dq", "dk", "dv", *(["dbias"] if len(t.inputs) == 4 else []), "ddout")
    return call, lambda found: {name: x.numpy() for name, x in zip(names, found, strict=True)}


TORCH: dict[str, Adapter] = {
    "backward": torch_backward,
    "JVP": torch_jvp,
    "double backward": torch_double_backward,
}


# Other peers of backward


def flex_backward(g: DerivativeCall, threads: int) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if g.q.dtype == np.float64:
        raise Unable("takes no float64 on processors")
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise Unable("needs a C++ compiler")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    t = Torch(g, threads)
    n_q, n_k = g.q.shape[-2], g.k.shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n_q, n_k, "cpu") if t.causal else None
    compiled = t.torch.compile(flex_attention, dynamic=False)
    out = compiled(*(x[None] for x in t.inputs), block_mask=mask)[0]
    return partial(t.torch.autograd.grad, out, t.inputs, t.dout, retain_graph=True), torch_names


def jax_backward(g: DerivativeCall, threads: int) -> Prepared:
    import jax

    jax.config.update("jax_enable_x64", True)
    q, k, v, dout = (jax.numpy.asarray(np.ascontiguousarray(x.swapaxes(0, 1))[None]) for x in (g.q, g.k, g.v, g.dout))
    attention = partial(jax.nn.dot_product_attention, is_causal=bool(g.options.get("causal")))
    pull = jax.jit(lambda *args: jax.vjp(attention, *args)[1])(q, k, v)
    run = jax.jit(lambda pull, dout: pull(dout))

    def read(found: Any) -> Named:
        return {name: np.asarray(x[0]).swapaxes(0, 1) for name, x in zip(("dq", "dk", "dv"), found, strict=True)}

    return lambda: jax.block_until_ready(run(pull, dout)), read


def numpy_backward(g: DerivativeCall, threads: int) -> Prepared:
    if g.q.itemsize == 2:
        raise Unable("NumPy has no products of 16-bit floats that use the processor's")
    call = partial(naive.gradients, g.q, g.k, g.v, g.dout, causal=bool(g.options.get("causal")))
    return call, lambda found: dict(zip(("dq", "dk", "dv"), found, strict=True))


def tiled_backward(g: DerivativeCall, threads: int) -> Prepared:
    regard.set_num_threads(threads)
    return backward(g, threads, "tiled")


BACKWARD: dict[str, Adapter] = {
    "PyTorch": torch_backward,
    "FlexAttention": flex_backward,
    "JAX": jax_backward,
    "NumPy": numpy_backward,
    "tiled": tiled_backward,
}
"""Peers with a backward, by the names of `benchmarks.peers.PEERS`.

Heads (h, n, d), as many for key as for query.
"""
