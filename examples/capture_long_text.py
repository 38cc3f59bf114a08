"""What it costs to see all attention of a model on a long text, beside asking the model for its weights.

    python examples/capture_long_text.py                        # 4 layers of 8 heads, 32,768 tokens
    python examples/capture_long_text.py --tokens 4096 --how weights

A Llama-like model with random weights reads random tokens that come twice. `--how plain` only runs it on regard's
attention, `capture` and `disk` run it inside of `regard.capture`, in memory or with a file, and summarise every head;
`weights` asks for `output_attentions`. Times are those of the process (CPU), memory is its peak beyond the model.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

import regard
import regard.torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--how", choices=["plain", "capture", "disk", "weights"], default="capture")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    regard.set_num_threads(options.threads)
    regard.torch.register_transformers()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=2**20, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    implementation = "eager" if options.how == "weights" else "regard"
    model = transformers.LlamaModel._from_config(config, attn_implementation=implementation).eval()
    half = np.random.default_rng(0).integers(0, 1000, (1, options.tokens // 2))
    ids = torch.from_numpy(np.concatenate([half, half], axis=1))
    with torch.no_grad():
        model(input_ids=ids[:, :64])  # kernels are compiled, or found in the cache
    before = peak()

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        if options.how in ("plain", "weights"):
            model(input_ids=ids, use_cache=False, output_attentions=options.how == "weights")
            report("run", began, before)
            return
        path = Path(folder) / "seen.safetensors" if options.how == "disk" else None
        with regard.capture(model, path=path) as seen:
            model(input_ids=ids, use_cache=False)
        report("run and capture", began, before)
        began = time.process_time()
        heads = seen.measure()
        report("measure every head", began, before)
        began = time.process_time()
        for layer in seen:
            layer.observe([regard.pooled(512, 512), "received"])
        report("maps of 512 × 512, received", began, before)
        began = time.process_time()
        seen[3].weights(5, rows=slice(-256, None), cols=slice(-256, None))
        report("a tile of 256 × 256", began, before)
        print(f"{len(heads)} heads, {seen.nbytes / 2**20:.0f} MiB kept; weights: {weights(seen) / 2**30:.0f} GiB")


def weights(seen: regard.Capture) -> int:
    """Bytes of all weights in float32."""
    return sum(4 * layer.batch * layer.heads * layer.n_q * layer.n_k for layer in seen)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(what: str, began: float, before: int) -> None:
    print(f"{what:32} {time.process_time() - began:8.2f} s   peak {(peak() - before) / 2**20:8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
