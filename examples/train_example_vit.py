"""Train the small vision transformer that ships with regard: which digit is on the photograph?

    python examples/train_example_vit.py
    python examples/train_example_vit.py --steps 300 --out trial

With `--out DIR` it writes there what it otherwise writes into the repository: the weights, their card, and a few
pictures that were held out. The same options on the same machine give the same weights.

Needs PyTorch, safetensors, scikit-learn (1,797 handwritten digits of 8 × 8 pixels) and scikit-image (photographs in the
public domain). A digit, enlarged to 16 pixels, is pasted on a piece of a photograph of 48 × 48 pixels: where it lies
is never the same, so that a head has to look for it. Every fifth digit and two photographs are held out.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from skimage import data
from sklearn.datasets import load_digits
from torch import Tensor, nn

from regard.interpret.examplemodel.vit import ExampleViT, ViTConfig

REPOSITORY = Path(__file__).parents[1]
PHOTOGRAPHS = ("astronaut", "brick", "camera", "chelsea", "grass", "gravel", "hubble_deep_field", "rocket")
HELD_OUT = ("coffee", "retina")
"""Photographs of scikit-image under CC0 or in the public domain."""

SIZE = 16
"""Pixels of a side of a digit: a ninth of the picture."""

INK = 1.1
CONTRAST = (0.02, 0.15)
"""Standard deviation of a photograph's pixels: at first, and from five eighths of the training on."""


# ── Pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Digits:
    """Pictures of digits (n, 16, 16) with values from 0 to 1, the digit of each, and photographs to paste them on."""

    pixels: np.ndarray
    labels: np.ndarray
    photographs: list[np.ndarray]


def read() -> tuple[Digits, Digits]:
    """The digits and photographs to train on, and those held out."""
    digits = load_digits()
    small = torch.from_numpy(digits.images.astype(np.float32) / 16)
    pixels = F.interpolate(small[:, None], size=SIZE, mode="bilinear", align_corners=False)[:, 0].numpy()
    held_out = np.arange(len(pixels)) % 5 == 0
    return (
        Digits(pixels[~held_out], digits.target[~held_out], [photograph(name) for name in PHOTOGRAPHS]),
        Digits(pixels[held_out], digits.target[held_out], [photograph(name) for name in HELD_OUT]),
    )


def photograph(name: str) -> np.ndarray:
    """A photograph in grey, with values from 0 to 1."""
    pixels = getattr(data, name)()
    return (pixels if pixels.ndim == 2 else pixels[..., :3].mean(-1)).astype(np.float32) / 255


def piece(rng: np.random.Generator, photographs: list[np.ndarray], side: int, contrast: float) -> np.ndarray:
    """A piece of a photograph, at full or half resolution, around a grey of 0.4."""
    whole, step = photographs[rng.integers(len(photographs))], rng.integers(1, 3)
    top, left = (rng.integers(0, size - side * step) for size in whole.shape)
    pixels = whole[top : top + side * step : step, left : left + side * step : step]
    return (pixels - pixels.mean()) / (pixels.std() + 0.05) * contrast + 0.4


def batch(
    rng: np.random.Generator, of: Digits, count: int, side: int, contrast: float
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Pictures (count, side, side), their digits (count,), and the top and left of each digit (count, 2)."""
    pictures, chosen = np.empty((count, side, side), np.float32), rng.integers(len(of.labels), size=count)
    corners = rng.integers(0, side - SIZE + 1, (count, 2))
    for picture, digit, (top, left) in zip(pictures, chosen, corners, strict=True):
        picture[:] = piece(rng, of.photographs, side, contrast)
        box = picture[top : top + SIZE, left : left + SIZE]
        np.maximum(box, INK * of.pixels[digit], out=box)
    return torch.from_numpy(pictures.clip(0, 1)), torch.from_numpy(of.labels[chosen]), corners


# ── The model, for training ───────────────────────────────────────────────────────────────────────────────────────────


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-6)


class Block(nn.Module):
    def __init__(self, config: ViTConfig):
        super().__init__()
        width, hidden = config.width, config.hidden
        self.heads = config.heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class ViT(nn.Module):
    """Patches and a class token, blocks, and the odds of each digit from the class token."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        self.patches = nn.Linear(config.patch**2, config.width)
        self.cls = nn.Parameter(torch.zeros(config.width))
        self.positions = nn.Parameter(0.02 * torch.randn(config.tokens, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.classes = nn.Linear(config.width, config.classes, bias=False)

    def forward(self, pictures: Tensor) -> Tensor:
        cells, patch = self.config.cells, self.config.patch
        pixels = pictures.unflatten(-1, (cells, patch)).unflatten(-3, (cells, patch)).transpose(-3, -2)
        patches = self.patches(pixels.flatten(-2).flatten(-3, -2) - 0.5)
        x = torch.cat([self.cls.expand(len(pictures), 1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.classes(self.norm(x[:, 0]))

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters under the names that `ExampleViT` knows; matrices as (in, out)."""
        named = {}
        for name, parameter in self.named_parameters():
            short = name.removeprefix("blocks.").removesuffix(".weight").removesuffix(".gain").replace(".bias", "_bias")
            array = parameter.detach().numpy()
            named[short] = np.ascontiguousarray(array.T if name.endswith(".weight") else array)
        return named


# ── Training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(config: ViTConfig, of: Digits, options: argparse.Namespace) -> tuple[ViT, float]:
    """The trained model, and the seconds of processor time that its steps took."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = ViT(config)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.01, fused=True),
    )
    began = time.process_time()
    for step in range(options.steps):
        share = step / options.steps
        contrast = CONTRAST[0] + (CONTRAST[1] - CONTRAST[0]) * min(1, share * 1.6)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = options.rate * min(1, step / 200) * max(0.02, 1 - share)
        pictures, labels, _ = batch(rng, of, options.pictures, config.side, contrast)
        loss = F.cross_entropy(model(pictures), labels, label_smoothing=0.05)
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 250 == 0:
            print(f"step {step:>5}  loss {loss.item():.3f}  {time.process_time() - began:.0f} s", flush=True)
    return model, time.process_time() - began


# ── Measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def accuracy(model: ExampleViT, of: Digits, count: int = 1000) -> float:
    """The share of pictures whose likeliest digit is the right one."""
    pictures, labels, _ = batch(np.random.default_rng(1), of, count, model.config.side, CONTRAST[1])
    return float(np.mean(model.run(pictures.numpy()).logits.argmax(-1) == labels.numpy()))


def on_digit(model: ExampleViT, of: Digits, count: int = 256) -> tuple[np.ndarray, float]:
    """The share of the class token's weight on patches that lies on the digit: (layers, heads), and that by chance."""
    config = model.config
    pictures, _, corners = batch(np.random.default_rng(2), of, count, config.side, CONTRAST[1])
    inside = np.zeros((count, config.side, config.side))
    for n, (top, left) in enumerate(corners):
        inside[n, top : top + SIZE, left : left + SIZE] = 1
    cells = (
        inside.reshape(count, config.cells, config.patch, config.cells, config.patch).mean((2, 4)).reshape(count, -1)
    )
    trace = model.run(pictures.numpy())
    shares = []
    for layer in range(config.layers):
        row = trace.weights(layer, rows=slice(0, 1))[:, :, 0, 1:]
        shares.append(((row * cells[:, None]).sum(-1) / row.sum(-1)).mean(0))
    return np.array(shares), float(cells.mean())


# ── What it leaves behind ─────────────────────────────────────────────────────────────────────────────────────────────


def export(model: ViT, of: Digits) -> tuple[bytes, float]:
    """A safetensors file in float16, and how far NumPy's logits with it are from PyTorch's."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
        pictures, *_ = batch(np.random.default_rng(3), of, 64, model.config.side, CONTRAST[1])
        expected = model(pictures).numpy()
    stored = ExampleViT(model.config, model.weights()).to_safetensors()
    worst = float(np.abs(ExampleViT.from_safetensors(stored).run(pictures.numpy()).logits - expected).max())
    assert worst < 1e-3, f"NumPy and PyTorch differ by {worst:.2e} in the logits"
    return stored, worst


def write_pictures(of: Digits, side: int, path: Path) -> None:
    """Pictures that were held out, two of each digit, as bytes, with their digits and the corners of these."""
    pictures, labels, corners = (np.asarray(x) for x in batch(np.random.default_rng(4), of, 400, side, CONTRAST[1]))
    chosen = np.concatenate([np.flatnonzero(labels == digit)[:2] for digit in range(10)])
    pixels, digits = np.rint(255 * pictures[chosen]).astype(np.uint8), labels[chosen].astype(np.uint8)
    np.savez_compressed(path, pictures=pixels, digits=digits, corners=corners[chosen])


CARD = """\
# The example vision transformer

It tells which handwritten digit was pasted on a photograph. It is small enough to run in a web page, and is there to be
looked at: a head has to find the digit before it can be read. In Python it is `regard.interpret.examplemodel.vit`.

| | |
|---|---|
| Layers | {layers}, of {heads} heads with {head_width} features each; width {width}, feed-forward {hidden} |
| Blocks | RMSNorm before each, GELU in its tanh form, biases on queries and keys alone |
| Input | {side} × {side} pixels in grey from 0 to 1 |
| Tokens | a class token, then {cells} × {cells} patches of {patch} × {patch} pixels, row by row |
| Positions | learned, added to the patches |
| Output | {classes} digits, from the class token |
| Size | {parameters:,} parameters, {size:,} bytes as float16 (`vit.safetensors`); computed in float32 |
| Licence | that of `regard` (Apache-2.0) |

All figures below were measured by the script that trained it:

    {command}

## Data

1,797 handwritten digits of 8 × 8 pixels come with scikit-learn (Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", 1998, UCI Machine Learning Repository, CC BY 4.0). They are enlarged to {size_of_digit} pixels, and
pasted anywhere on pieces of photographs that scikit-image ships under CC0 or in the public domain:

- {photographs};
- held out: {held_out}, and every fifth digit.

`vit-pictures.npz` has 20 pictures of held-out digits on held-out photographs, two of each digit.

## Training

{steps:,} steps of {pictures} pictures took {minutes:.1f} minutes of processor time (threads: {threads}). Muon for the
matrices of the blocks, AdamW for the rest; the contrast of the photographs grows from {low:g} to {high:g}. PyTorch's
logits and those of `regard` on NumPy differ by at most {difference:.1e}.

## What it can do

Of 1,000 pictures with held-out digits and photographs it reads {right:.1%} right, of those that it was trained on
{right_seen:.1%}.

## Its heads

The share of the class token's weight on patches that lies on the digit, held out; by chance {chance:.2f}:

| Layer | {columns} |
|---|{dashes}
{rows}

## Limits

It was trained on light digits of {size_of_digit} pixels, in the style of one collection. It calls anything a digit: its
odds mean nothing on a picture without one. Where a head looks is not why the model answers.
"""


def write_card(
    path: Path, model: ExampleViT, seen: Digits, held_out: Digits, options: argparse.Namespace, **facts: float
) -> None:
    """The model card, with everything measured on the model as it was exported."""
    config = model.config
    shares, chance = on_digit(model, held_out)
    card = CARD.format(
        **asdict(config),
        **facts,
        cells=config.cells,
        head_width=config.width // config.heads,
        parameters=model.parameters,
        command=command(options),
        size_of_digit=SIZE,
        photographs=", ".join(PHOTOGRAPHS),
        held_out=" and ".join(HELD_OUT),
        steps=options.steps,
        pictures=options.pictures,
        threads=options.threads,
        low=CONTRAST[0],
        high=CONTRAST[1],
        right=accuracy(model, held_out),
        right_seen=accuracy(model, seen),
        chance=chance,
        columns=" | ".join(f"Head {head}" for head in range(config.heads)),
        dashes="---|" * config.heads,
        rows="\n".join(f"| {n} | {' | '.join(f'{share:.2f}' for share in row)} |" for n, row in enumerate(shares)),
    )
    path.write_text(card, encoding="utf-8")


def command(options: argparse.Namespace) -> str:
    settings = (f"--{name} {getattr(options, name)}" for name in ("steps", "seed", "rate", "pictures", "threads"))
    return " ".join(("python examples/train_example_vit.py", *settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--pictures", type=int, default=64, help="pictures per step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="a repository's root, or any folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    seen, held_out = read()
    config = ViTConfig(layers=4, heads=4, width=64, hidden=128, side=48, patch=8, classes=10)
    trained, seconds = train(config, seen, options)
    stored, difference = export(trained, held_out)
    package = options.out / "src" / "regard" / "interpret" / "examplemodel"
    package.mkdir(parents=True, exist_ok=True)
    (package / "vit.safetensors").write_bytes(stored)
    write_pictures(held_out, config.side, package / "vit-pictures.npz")
    facts = {"minutes": seconds / 60, "size": len(stored), "difference": difference}
    write_card(package / "VIT.md", ExampleViT.from_safetensors(stored), seen, held_out, options, **facts)


if __name__ == "__main__":
    main()
