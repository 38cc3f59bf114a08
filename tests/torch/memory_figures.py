"""Measure the memory of one run beyond the model's: python memory_figures.py sdpa|capture|queries [TOKENS].

A Llama of 4 layers, random weights, float32. With MALLOC_MMAP_THRESHOLD_=131072 glibc gives freed memory back at once.
Linux only.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import regard

WORDS = 32


def status(name: str) -> float:
    """Return a field of the process's status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def run(model: Any, how: str, n: int) -> float:
    """Run the model on n tokens; return the MiB that a capture keeps."""
    ids = torch.arange(n)[None] % 1000
    if how == "sdpa":
        model(input_ids=ids, use_cache=False)
        return 0.0
    with regard.capture(model, queries=range(n - WORDS, n) if how == "queries" else None) as seen:
        model(input_ids=ids, use_cache=False)
    return float(seen.nbytes) / 2**20


@torch.no_grad()
def main(how: str, n: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=2**15,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    for warm in (64, 1024):
        run(model, how, warm)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, start = status("VmRSS"), time.process_time()
    kept = run(model, how, n)
    seconds = time.process_time() - start
    print(f"{how}: peak {status('VmHWM') - before:.0f} MiB, of which {kept:.0f} are kept, {seconds:.1f} s")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16416)
