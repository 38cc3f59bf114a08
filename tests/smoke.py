"""A few calls with the least versions of all dependencies, on both engines, and commands: `python smoke.py`."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import regard
from regard.cli import main
from regard.viewer.scene.sources import Settings, example
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.saving import Still
from regard.viewer.show.picture import picture

DTYPES: Sequence[Any] = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)


def attention(engine: str) -> None:
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        for n in (1, 5, 40):  # decoding, and more queries
            q = rng.standard_normal((2, n, 16)).astype(dtype)
            k, v = rng.standard_normal((2, 2, 200, 16)).astype(dtype)
            for options in ({}, {"causal": True, "score": regard.softcap(3.0)}):
                out = regard.attention(q, k, v, engine=engine, **options)
                expected = regard.attention(q, k, v, engine="spec", **options)
                eps = float(ml_dtypes.finfo(dtype).eps)
                np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=0, atol=16 * eps)


def derivatives(engine: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, 40, 16)).astype(np.float32)
    found = regard.attention_vjp(x, x, x, x, engine=engine, causal=True)
    expected = regard.attention_vjp(x, x, x, x, engine="spec", causal=True)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-4)
    regard.attention_jvp(x, x, x, x, engine=engine)


def commands() -> None:
    for words in (["doctor"], ["plan", "--n", "1000", "--d", "64", "--causal"], ["steps"]):
        assert main(words) in (None, 0), words
    answers = Answers([example(Settings("abab"))], patience=None)
    for path in ("scenes", "example/heads", "example/thumbs/0"):
        assert answers.get(path).status == 200, path
    still = Still(example(Settings("abab")))
    assert picture(still.data, still.choice).startswith(b"<svg")
    import regard.viewer.serve.server  # noqa: F401


if __name__ == "__main__":
    for engine in ("cpu", "tiled"):
        attention(engine)
        derivatives(engine)
    commands()
