"""The first kernel of `engines/cpu/README.md`."""

import re
from pathlib import Path
from typing import Any

import numpy as np

import regard.engines.cpu
from support import softmax


def test_first_kernel() -> None:
    guide = (Path(regard.engines.cpu.__file__).parent / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    x, rng = found["fields"], np.random.default_rng(0)
    for name in ("q", "keys"):
        found[name][...] = rng.standard_normal(found[name].shape)
    found["kernel"](x.buffer_info()[0])
    expected = softmax(found["keys"].astype(float) @ found["q"])
    np.testing.assert_allclose(found["w"], expected, rtol=2e-5, atol=1e-9)
