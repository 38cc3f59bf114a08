"""Time the heat of a word on a picture of 16,384 patches, and weigh saved pages: python heat_figures.py [LAYERS].

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


def layer(name: str, rng: np.random.Generator, side: int = SIDE, heads: int = HEADS, words: int = WORDS) -> Layer:
    """Return a layer whose last words see all patches."""
    n = side * side + words
    q = rng.standard_normal((1, heads, words, D), dtype=np.float32)
    k = rng.standard_normal((1, KV_HEADS, n, D), dtype=np.float32)
    counts = {"numbers": tuple(range(heads)), "kv_numbers": tuple(range(KV_HEADS)), "group": heads // KV_HEADS}
    lse = np.full((1, heads, words), 15, np.float32)
    grid = PatchGrid.after(side, side, prefix=4)
    return Layer(name, q, k, lse, {"causal": True}, **counts, grids=(grid,), rows=tuple(range(n - words, n)))


def seconds(call: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def timed(layers: int) -> None:
    """Print the times of a word in one head and in all."""
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


def weighed(layers: int, side: int, heads: int) -> None:
    """Print the size of a saved page of the rows of 30 words."""
    rng = np.random.default_rng(0)
    scenes = captured(Capture([layer(f"layer.{n}", rng, side, heads, words=30) for n in range(layers)]))
    answers = Answers(scenes, patience=None)
    (scene,) = answers.scenes
    start = time.process_time()
    size = len(answers.page(scene, limit=24 * 10**6).encode())
    took = time.process_time() - start
    print(f"{layers * heads} heads over {side}² patches: {size / 1e6:.1f} MB, {took:.0f} s")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 28
    timed(count)
    for side, heads in ((32, 20), (32, 28), (64, 28), (128, 28)):
        weighed(count, side, heads)
