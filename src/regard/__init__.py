"""Exact attention for NumPy, PyTorch and JAX, and a viewer of what it attends to.

Everything a user may import is here, and is loaded on first use: `import regard` costs little more than `import numpy`.
The stub next to this file tells type checkers the same.
"""

from importlib import import_module
from typing import Any

import numpy as _numpy  # noqa: F401  loaded here, so that the first call does not pay for it

import regard.runtime.forks as _forks  # noqa: F401  before any thread imports the rest
from regard.loaders import loaders as _loaders

_HOMES = {
    "regard.ops.attention": "attention attention_jvp attention_vjp attention_vjp_jvp weights",
    "regard.interpret.capture.captured": "Capture capture",
    "regard.engines": "available_engines",
    "regard.ops.exporting": "export_wasm",
    "regard.ops.linear": "linear_attention",
    "regard.ops.merging": "merge",
    "regard.ops.multihead": "multihead_attention",
    "regard.core.statistics": "Profile Seen Top mass pooled renyi top weights_of",
    "regard.ops.planning": "plan",
    "regard.ops.retrieval": "Retrieval hopfield",
    "regard.core.problem": "Differential Outputs",
    "regard.rules": (
        "Mask Score Table alibi blocks causal dilated documents global_tokens mask neighborhood padding prefix "
        "relative score softcap strided table temperature where window"
    ),
    "regard.ops.stepping": "steps",
    "regard.runtime.threads": "set_num_threads",
    "regard.version": "__version__",
    "regard.viewer": "look",
    "regard.warning": "RegardWarning",
}
_MODULES = ("examplemodel", "insight", "positions")
_UNLISTED = ("doctor", "jax", "torch")  # not in __all__, so that `from regard import *` imports no framework
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *_MODULES])


def _torch() -> Any:
    import regard.torch.adapter as adapter

    return adapter


def _jax() -> Any:
    import regard.jax.adapter as adapter

    return adapter


def _torch_dtensors() -> Any:
    import regard.torch.dtensors as dtensors

    return dtensors


def _torch_capture() -> Any:
    import regard.torch.capture.recorder as recorder

    return recorder


def _torch_forward() -> Any:
    import regard.torch.capture.forward as forward

    return forward


def _torch_running() -> Any:
    import regard.torch.capture.running as running

    return running


def _torch_pictured() -> Any:
    from regard.torch.capture import pictured

    return pictured


def _torch_pretrained() -> Any:
    import regard.torch.capture.pretrained as pretrained

    return pretrained


_loaders |= {
    "torch": _torch,
    "jax": _jax,
    "torch.dtensors": _torch_dtensors,
    "torch.capture": _torch_capture,
    "torch.forward": _torch_forward,
    "torch.running": _torch_running,
    "torch.pictured": _torch_pictured,
    "torch.pretrained": _torch_pretrained,
}


def __getattr__(name: str) -> Any:
    if name in _MODULES or name in _UNLISTED:
        return import_module(f"regard.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    import_module("regard.arguments.signatures").listed(value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
