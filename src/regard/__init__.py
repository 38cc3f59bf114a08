"""Exact attention for NumPy, PyTorch and JAX, and a viewer of what it attends to.

Everything a user may import is in the table `_HOMES`, by the module that has it, and is loaded on first use: `import
regard` costs little more than `import numpy`. `__all__`, the stub next to this file, and the reference follow from it.
"""

from importlib import import_module
from typing import Any

import numpy as _numpy  # noqa: F401  loaded here, so that the first call does not pay for it

import regard.runtime.forks as _forks  # noqa: F401  before any thread imports the rest
from regard.loaders import loaders as _loaders

_HOMES = {
    "regard.ops.attention": "attention weights attention_vjp attention_jvp attention_vjp_jvp",
    "regard.ops.multihead": "multihead_attention",
    "regard.ops.linear": "linear_attention",
    "regard.ops.merging": "merge",
    "regard.ops.retrieval": "hopfield Retrieval",
    "regard.core.problem": "Outputs Differential",
    "regard.ops.stepping": "steps",
    "regard.ops.planning": "plan",
    "regard.engines": "available_engines",
    "regard.runtime.threads": "set_num_threads",
    "regard.warning": "RegardWarning",
    "regard.ops.exporting": "export_wasm",
    "regard.rules.masks": "causal window documents padding prefix blocks dilated strided global_tokens mask Mask",
    "regard.rules.grids": "neighborhood",
    "regard.rules.scores": "alibi relative softcap temperature score Score",
    "regard.rules.tracing": "table where Table",
    "regard.core.statistics": "top mass pooled weights_of renyi Seen Top Profile",
    "regard.viewer": "look",
    "regard.interpret.capture.captured": "capture Capture",
    "regard.version": "__version__",
}
_MODULES = ("examplemodel", "insight", "positions")
_UNLISTED = ("doctor", "jax", "torch")  # not in __all__, so that `from regard import *` imports no framework
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME, *_MODULES])


def _torch() -> Any:
    import regard.torch.public.attention as adapter

    return adapter


def _jax() -> Any:
    import regard.jax.adapter as adapter

    return adapter


def _torch_dtensors() -> Any:
    import regard.torch.processes.dtensors as dtensors

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
