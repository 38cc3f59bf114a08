"""Time the heat of a word on a picture of 16,384 patches: python heat_figures.py [LAYERS].

Random queries and keys in the shapes of Qwen2.5-VL 7B: 28 layers of 28 heads over 4, d = 128.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer
from regard.viewer.scene.sources import captured
from regard.viewer.serve.answers import Answers

WORDS, SIDE, HEADS, KV_HEADS, D = 32, 128, 28, 4, 128


def layer(name: str, rng: np.random.Generator) -> Layer:
    """Return a layer whose last words see all patches."""
    n = SIDE * SIDE + WORDS
    q = rng.standard_normal((1, HEADS, WORDS, D), dtype=np.float32)
    k = rng.standard_normal((1, KV_HEADS, n, D), dtype=np.float32)
    heads = {"numbers": tuple(range(HEADS)), "kv_numbers": tuple(range(KV_HEADS)), "group": HEADS // KV_HEADS}
    lse = np.full((1, HEADS, WORDS), 15, np.float32)
    grid = PatchGrid.after(SIDE, SIDE, prefix=4)
    return Layer(name, q, k, lse, {"causal": True}, **heads, grids=(grid,), rows=tuple(range(n - WORDS, n)))


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def main(layers: int) -> None:
    rng = np.random.default_rng(0)
    answers = Answers(list(captured(Capture([layer(f"layer.{n}", rng) for n in range(layers)]))), patience=None)
    (scene,) = answers.scenes
    one, every = [], []
    for word in range(7):
        row, heat = f"{scene}/row/{word % layers}/3/{word}", {"token": str(word), "numbers": "f32"}
        one.append(seconds(lambda row=row: answers.get(row)))
        every.append(seconds(lambda heat=heat: answers.get(f"{scene}/heat", heat)))
    for name, times in ((f"a row of one head of {HEADS * layers}", one[1:]), ("a word in every head", every[1:])):
        print(f"{name}: {1e3 * min(times):.1f} ms, median {1e3 * np.median(times):.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 28)
