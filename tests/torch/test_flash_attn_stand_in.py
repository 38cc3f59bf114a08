"""A model file that imports flash_attn at its top runs unedited under `stand_in("flash_attn")`."""

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import regard.torch
from regard.torch import flash_attn

pytestmark = pytest.mark.engine("tiled")

MODEL = """
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
from flash_attn.layers.rotary import apply_rotary_emb
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        angles = torch.outer(torch.arange(64.0), 0.1 ** torch.arange(width // heads // 2))
        self.rotary = angles.cos(), angles.sin()

    def forward(self, x, mask=None, cache=None, used=0):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if cache is not None:
            out = flash_attn_with_kvcache(
                q, *cache, k, v, *self.rotary, cache_seqlens=used, causal=True, window_size=(7, 0),
                rotary_interleaved=False,
            )
            return self.out(out.flatten(-2))
        q, k = (apply_rotary_emb(x, *self.rotary) for x in (q, k))
        if mask is None:
            out = flash_attn_func(q, k, v, causal=True, window_size=(7, 0))
            return self.out(out.flatten(-2))
        b, n = mask.shape
        rows, at, ends, longest, _ = unpad_input(torch.stack([q, k, v], 2), mask)
        out = flash_attn_varlen_func(*rows.unbind(1), ends, ends, longest, longest, causal=True, window_size=(7, 0))
        return self.out(pad_input(out.flatten(-2), at, b, n))


class Model(nn.Module):
    def __init__(self, words=11, width=32, heads=4):
        super().__init__()
        self.embed, self.attention = nn.Embedding(words, width), Attention(width, heads)
        self.head = nn.Linear(width, words)

    def forward(self, ids, **options):
        x = self.embed(ids)
        return self.head(x + self.attention(x, **options))

    @torch.no_grad()
    def generate(self, ids, n):
        heads = self.attention.heads
        cache = torch.zeros(2, len(ids), 64, heads, self.embed.embedding_dim // heads)
        step, used = ids, 0
        for _ in range(n):
            logits = self(step, cache=cache, used=used)
            used, step = used + step.shape[1], logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
        return ids
"""


def loaded(tmp_path: Path) -> ModuleType:
    path = tmp_path / "model_with_flash_attn.py"
    path.write_text(MODEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_model_trains_and_generates(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        loaded(tmp_path)
    with regard.torch.stand_in("flash_attn"):
        model = loaded(tmp_path).Model()
    assert "flash_attn" not in sys.modules
    ids, optimizer = torch.randint(11, (3, 16)), torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    assert all(x.grad is not None and x.grad.any() for x in model.parameters())
    out = model.generate(ids[:, :5], 12)
    expected = ids[:, :5]
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
        assert torch.equal(out, expected)
        mask = torch.arange(16) < torch.tensor([[16], [3], [9]])
        padded, whole = model(ids, mask=mask), model(ids)
    torch.testing.assert_close(padded[mask], whole[mask])


def test_what_asks_for_the_package() -> None:
    with regard.torch.stand_in("flash_attn"):
        import flash_attn as package  # type: ignore[import-not-found, unused-ignore]

        assert package.__version__ == importlib.metadata.version("flash_attn") == "2.8.4"
        for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.flash_attn_interface"):
            assert importlib.util.find_spec(name) is not None
        assert package.flash_attn_func is flash_attn.flash_attn_func
        assert {x for name in ("flash_attn", "flash_attn.bert_padding", "flash_attn.layers.rotary")
                for x in vars(sys.modules[name]) if hasattr(flash_attn, x)} >= set(flash_attn.__all__)  # fmt: skip
    assert importlib.util.find_spec("flash_attn") is None


@pytest.mark.parametrize(
    ("name", "version"), [("flash_attn_interface", 3), ("flash_attn_3", 3), ("flash_attn.cute", 4)]
)
def test_other_versions_say_what_there_is(name: str, version: int) -> None:
    with regard.torch.stand_in("flash_attn"):
        assert importlib.util.find_spec(name) is None
        with pytest.raises(
            ModuleNotFoundError, match=f"{name} is FlashAttention {version}, .* provides FlashAttention 2"
        ):
            importlib.import_module(name)
        with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_attn\.losses'"):
            importlib.import_module("flash_attn.losses")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module(name)


def test_another_version_that_is_there_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("answer = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    with regard.torch.stand_in("flash_attn"):
        assert importlib.import_module("flash_attn_interface").answer == 3
    del sys.modules["flash_attn_interface"]


def test_the_real_package_is_hidden_only_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("answer = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="flash-attn is installed, and stand_in would hide it"):
        regard.torch.stand_in("flash_attn")
    with regard.torch.stand_in("flash_attn", force=True):
        assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func


def test_transformers_loads_remote_code(tmp_path: Path) -> None:
    from transformers.dynamic_module_utils import check_imports
    from transformers.utils import is_flash_attn_2_available

    path = tmp_path / "model.py"
    path.write_text(MODEL)
    with pytest.raises(ImportError, match="flash_attn"):
        check_imports(path)
    with regard.torch.stand_in("flash_attn"):
        check_imports(path)
        assert is_flash_attn_2_available() == torch.cuda.is_available()
