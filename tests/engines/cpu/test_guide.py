"""The first kernel of `engines/cpu/README.md`."""

import re
from pathlib import Path
from typing import Any

import numpy as np

import regard.engines.cpu


def test_first_kernel() -> None:
    guide = (Path(regard.engines.cpu.__file__).parent / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    x, rng = found["fields"], np.random.default_rng(0)
    for name in ("q", "keys"):
        found[name][...] = rng.standard_normal(found[name].shape)
    found["kernel"](x.buffer_info()[0])
    s = found["keys"].astype(float) @ found["q"]
    expected = np.exp(s - s.max())
    np.testing.assert_allclose(found["w"], expected / expected.sum(), rtol=2e-5, atol=1e-9)
