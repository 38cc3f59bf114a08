"""Train an attention that saturates: with δ of the rounded output, with regard's δ, and in float32.

    python examples/saturated_training.py --out trial                   # some 2 minutes of one core
    REGARD_CPU=avx2 python examples/saturated_training.py --out trial   # products in float32: P is not rounded

Backward's dS = P (dP − δ) needs δ = Σ dout · out. FlashAttention takes the output as it was rounded to bfloat16.
Where a few keys share all the weight and their values are alike, dP − δ is nearly 0, and the error of δ is not. Then
dq = Σ dS k has an error along the mean key, with the same sign step after step (arXiv 2510.04212).

The last token of each row asks. It and four others share a mark and tell a class by a little; the rest is noise.
Projections are float32, and operands of attention are rounded to bfloat16. Σ dS of a row is 0, or else minus the error
of δ: the gradient of a bias per row. The error of dW_q is over float32 arithmetic on the same operands.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import regard
from regard.viewer.show.figure import lines

Array = np.ndarray[Any, np.dtype[Any]]
WAYS = {"rounded": ml_dtypes.bfloat16, "regard": ml_dtypes.bfloat16, "float32": np.float32}
COLUMNS = "step", "loss", "Σ error of δ", "‖Σ error of dW_q‖", "‖W_q‖"
CLASSES, D, BATCH, N = 8, 32, 16, 16
RATE, DECAY = 3e-3, 0.1


def rows(rng: np.random.Generator, mark: Array, classes: Array) -> tuple[Array, Array]:
    """Draw tokens (BATCH, N, D) and their classes (BATCH)."""
    y, noise = rng.integers(CLASSES, size=BATCH), rng.standard_normal((BATCH, N, D))
    marked = rng.permuted(np.tile(np.arange(N) < 4, (BATCH, 1)), axis=1)
    marked[:, -1] = True
    alike = mark + 0.03 * classes[y][:, None] + 0.005 * noise
    return np.where(marked[..., None], alike, 0.3 * noise).astype(np.float32), y


def weight_gradient(x: Array, dy: Array) -> Array:
    """The gradient of W (a, b), of x (..., a) and the gradient of y = x W (..., b), in float32."""
    return x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1]).astype(np.float32)


def attended(way: str, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """The output in the dtype of `way`, and its backward: dout → gradients, and float32's gradient of q."""
    q, k, v = (x[:, None].astype(WAYS[way]) for x in (q, k, v))
    bias = np.zeros((BATCH, 1, q.shape[-2], 1), np.float32)
    out, seen = regard.attention(q, k, v, bias=bias, observe=["lse"])
    known = (out, seen) if way == "rounded" else None  # has no `low`, so backward has the rounded output alone

    def backward(dout: Array) -> tuple[regard.Differential, Array]:
        dout = dout[:, None].astype(out.dtype)
        wide = (x.astype(np.float32) for x in (q, k, v, dout))
        return regard.attention_vjp(q, k, v, dout, bias=bias, outputs=known), regard.attention_vjp(*wide).query

    return out[:, 0].astype(np.float32), backward


def train(way: str, steps: int, seed: int = 0) -> Iterator[tuple[float, float, Array, Array]]:
    """Train by AdamW; yields the loss, the mean error of δ, that of the gradient of W_q (D, D), and W_q (D, D)."""
    rng = np.random.default_rng(seed)
    mark, classes = rng.standard_normal(D), rng.standard_normal((CLASSES, D))
    mark *= np.sqrt(D) / np.linalg.norm(mark)
    q, v, o = ((rng.standard_normal((D, n)) / np.sqrt(D)).astype(np.float32) for n in (D, D, CLASSES))
    w = {"q": 2 * q, "k": 2 * q, "v": v, "o": 0.1 * o}
    moments = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in w.items()}
    for t in range(1, steps + 1):
        x, y = rows(rng, mark, classes)
        last = x[:, -1:]
        out, backward = attended(way, last @ w["q"], x @ w["k"], x @ w["v"])
        p = np.exp(out[:, 0] @ w["o"])
        p /= p.sum(-1, keepdims=True)
        dlogits = (p - np.eye(CLASSES, dtype=np.float32)[y])[:, None] / BATCH
        g, right = backward(dlogits @ w["o"].T)
        error = weight_gradient(last, g.query.astype(np.float32) - right)
        yield -np.log(p[np.arange(BATCH), y]).mean(), -g.bias.mean(), error, w["q"].copy()
        pairs = {"q": (last, g.query), "k": (x, g.key), "v": (x, g.value), "o": (out, dlogits)}
        for name, (m, s) in moments.items():
            dw = weight_gradient(*pairs[name])
            m += 0.1 * (dw - m)
            s += 0.001 * (dw**2 - s)
            w[name] *= 1 - RATE * DECAY
            w[name] -= RATE * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.999**t)) + 1e-12)


def followed(way: str, steps: int, every: int, seed: int) -> Array:
    """Train, and return COLUMNS of every so many steps, which are printed, too; the loss is their mean."""
    losses, of_delta, of_w, table = [], 0.0, np.zeros((D, D)), []
    for t, (loss, delta, error, w_q) in enumerate(train(way, steps, seed), 1):
        losses, of_delta, of_w = [*losses, loss], of_delta + delta, of_w + error
        if t % every == 0:
            table.append((t, np.mean(losses[-every:]), of_delta, np.linalg.norm(of_w, 2), np.linalg.norm(w_q, 2)))
            print(f"{way:8}", *(f"{x:18.4g}" for x in table[-1]), flush=True)
    return np.array(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(), help="a folder, for saturated-training.svg")
    options = parser.parse_args()
    regard.set_num_threads(1)
    print(" " * 8, *(f"{x:>18}" for x in COLUMNS))
    tables = {way: followed(way, options.steps, max(options.steps // 40, 1), options.seed) for way in WAYS}
    norms = {way: (table[:, 0], table[:, 4]) for way, table in tables.items()}
    title = "The norm of W_q over the steps of training: with the rounded δ, with regard's δ, and in float32."
    lines(title, norms, "step", "‖W_q‖").save(options.out / "saturated-training.svg")


if __name__ == "__main__":
    main()
