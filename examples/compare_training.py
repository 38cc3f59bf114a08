"""Train the example model twice from the same start, step by step in turns: on PyTorch's attention and on regard's.

    python examples/compare_training.py --steps 300

Both see the same batches. Prints the losses of both, and the processor time of a step, which is that of one thread.
Needs what `train_example_model.py` needs.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from train_example_model import LENGTHS, Decoder, batch, fetch, split

import regard
import regard.torch
from regard.examplemodel import Config

ATTENTION = {"sdpa": nullcontext, "regard": regard.torch.sdpa}


def trained(config: Config, batches: Iterator[Tensor], rate: float) -> Iterator[tuple[float, float]]:
    """The loss of every step, and its seconds."""
    torch.manual_seed(0)
    model = Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
    for ids in batches:
        began = time.thread_time()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--length", type=int, help="tokens of a row; default: as in training")
    parser.add_argument("--text", type=Path, default=Path.home() / ".cache/regard-text", help="where the text is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    regard.set_num_threads(1)

    works, _ = split(fetch(options.text))
    config = Config(layers=3, heads=4, width=128, hidden=256, rotary=16, context=LENGTHS[-1], base=100.0)
    lengths = LENGTHS if options.length is None else (options.length,)

    def batches() -> Iterator[Tensor]:
        rng = np.random.default_rng(0)
        return (batch(rng, works, options.tokens, lengths) for _ in range(options.steps))

    runs = {name: trained(config, batches(), rate=1e-3) for name in ATTENTION}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for step in range(options.steps):
        for name, run in runs.items():
            with ATTENTION[name]():
                found[name].append(next(run))
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:>5}  " + "  ".join(f"{name} {found[name][-1][0]:.5f}" for name in runs), flush=True)
    losses, seconds = (np.array([[s[k] for s in found[name]] for name in ATTENTION]) for k in (0, 1))
    difference = np.abs(losses[0] - losses[1]).max()
    times = np.median(seconds, axis=1)
    print(f"largest difference of losses {difference:.1e}; time of a step, regard / sdpa {times[1] / times[0]:.3f}")


if __name__ == "__main__":
    main()
