"""Heads whose weights a page computes: their queries, keys and lse, and a module of WebAssembly for their rules."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from regard.engines import engines
from regard.rules import Mask, Score
from regard.rules.outside import lookups
from regard.viewer.scene.scenes import Head, SceneLayer
from regard.viewer.serve import packed
from regard.viewer.serve.codecs import base64


def module_of(layer: SceneLayer) -> bytes | None:
    """Return the module that computes a layer's weights in a page.

    The result is None without a compiler, and for layers with arrays of all pairs or rules that a module does not take.
    """
    p = layer.problem
    rules = [x for x in (p.mask, p.score) if x is not None]
    exported = p.bias is None and not any(x.dense or x.foreign or lookups(x.node) for x in rules)
    shared = p.origin[2] == 0 and bool((p.offset == p.offset[0]).all())
    if not exported or not shared or engines()["cpu"].state() is not None:
        return None
    return _module(p.mask, p.score)


@lru_cache(maxsize=16)
def _module(mask: Mask | None, score: Score | None) -> bytes | None:
    from regard.engines.cpu.wasm.module import module

    try:
        return module(mask, score, forward=False, maps=True)
    except ValueError:  # rules of the C library, or too long ones
        return None


def product() -> bytes:
    """Return the module that computes the matrix products of a model in a page."""
    from regard.engines.cpu.wasm import product

    return product.product()


def stored(layer: SceneLayer, head: Head, dtype: str, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a head of this layer as JSON, its arrays and its rules.

    dtype: "f32", or "u16" for codes. names: of the arrays, by default "q", "k" and, where they are known, "v".
    """
    p = head.problem
    arrays = {"q": p.query[0], "k": p.key[0]} | ({"v": p.value[0]} if layer.has_values else {})
    shape = {"n_q": p.n_q, "n_k": p.n_k, "d": p.d, "dtype": dtype} | ({"d_v": p.d_v} if layer.has_values else {})
    return shape | packed.arrays({name: arrays[name] for name in names or arrays}, dtype) | {
        "lse": base64(head.lse.astype(np.float32)), "scale": p.scale,
        "causal": layer.plain and p.mask is not None,
        "mask": "" if p.mask is None else str(p.mask), "score": "" if p.score is None else str(p.score),
        "offset": int(p.offset[0]), "b": p.origin[0], "h": p.origin[1], "ruled": not layer.plain,
        "sink": p.sink is not None, "no_values": layer.no_values,
    }  # fmt: skip


def sent(layer: SceneLayer, head: Head) -> dict[str, Any]:
    """Return the arrays of a head and its module as JSON, null for each that a page cannot use."""
    code = module_of(layer)
    fields = stored(layer, head, "f32", ("q", "k")) if layer.plain or code is not None else None
    return {"head": fields, "code": None if code is None else base64(code)}
