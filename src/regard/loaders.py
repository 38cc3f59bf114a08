"""Modules that import other frameworks, loaded when first needed.

Nothing here imports a framework. The package registers a function for each, with an import statement inside.
`torch.compile` traces through such a function, but not through `importlib`.

| Key | Module |
|---|---|
| `torch`, `jax` | the adapter: functions on the arrays of a framework |
| `torch.dtensors` | `distributed`, attention of DTensors |
| `torch.capture` | `capture` of a PyTorch model |
| `torch.forward` | `attend`, which runs a model for its attention alone |
| `torch.running` | `TextModel`, which runs a model on typed texts |
| `torch.pictured` | `read`, which runs a model on a picture |
| `torch.pretrained` | `read`, which runs a model of transformers on a text |
"""

from collections.abc import Callable
from typing import Any

loaders: dict[str, Callable[[], Any]] = {}
