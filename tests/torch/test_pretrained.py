"""`regard insight --model`: models of transformers that lie on this machine, and what is wrong with others."""

import csv
import io
import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.viewer import command
from regard.viewer.looking import scenes_of
from regard.viewer.scene.own import SENTENCE

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")

TEXT = "the cat sat on the mat, the cat sat on the hat"


def tokenizer() -> Any:
    """Words and signs, with a mark at the beginning."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "<unk>", "the", "cat", "sat", "on", "mat", "hat", ","]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=9, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, pad_token_id=1, eos_token_id=None,
        decoder_start_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("t5")
    transformers.T5ForConditionalGeneration(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(x) for x in arguments])
    return status, *capsys.readouterr()


def test_a_model_reads_a_text(llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = run(capsys, "insight", "--model", llama, "--text", TEXT, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["model"] == f"LlamaModel {llama.name}"  # no path of this machine
    assert [(head["layer"], head["head"], head["kv_head"]) for head in found["heads"]] == [
        (layer, head, head // 2) for layer in range(2) for head in range(4)
    ]
    (tmp_path / "text").write_text(TEXT + "\n")
    assert run(capsys, "insight", "--model", llama, "--file", tmp_path / "text", "--json") == (0, out, "")
    network = transformers.LlamaModel.from_pretrained(llama)
    ids = torch.tensor([tokenizer()(TEXT)["input_ids"]])
    with regard.capture(network) as seen, torch.no_grad():
        network(input_ids=ids)
    for head, row in zip(seen.measure(), found["heads"], strict=True):
        assert row["name"] == seen[head.layer].name
        assert row["induction"] == pytest.approx(head.induction)
        assert row["normalized_entropy"] == pytest.approx(head.normalized_entropy)


def test_tokens_are_pieces_of_the_text(llama: Path) -> None:
    from regard.torch.capture import pretrained

    seen = pretrained.read(str(llama), "the  cat, dog")
    assert seen.labels(0) == ("<s>", "the", "  cat", ",", " dog")
    assert seen.ids(1, "key").tolist() == [[0, 2, 3, 8, 1]]


def test_a_dtype_that_the_model_runs_in(llama: Path) -> None:
    from regard.torch.capture.pretrained import read

    assert {layer.query.dtype.name for layer in read(str(llama), TEXT, dtype="bfloat16").layers} == {"bfloat16"}
    assert {layer.query.dtype.name for layer in read(str(llama), TEXT).layers} == {"float32"}


def test_look_computes_few_logits_and_no_cache(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.torch.capture import running

    monkeypatch.setattr(running, "LOGITS", 5 * 4 * 300)  # of five tokens
    network, outputs = transformers.LlamaForCausalLM.from_pretrained(llama), []
    network.register_forward_hook(lambda module, given, output: outputs.append(output))
    regard.look(network, text=TEXT, tokenizer=tokenizer(), save=tmp_path / "weights.npz")
    assert [(x.logits.shape[1], x.past_key_values) for x in outputs] == [(5, None)]


def test_without_a_text_it_reads_tokens_that_repeat(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from regard.torch.capture import pretrained

    seen = pretrained.read(str(llama))
    ids = seen.ids(0)[0]
    assert ids[0] == 0
    np.testing.assert_array_equal(ids[1:26], ids[76:101])
    status, out, err = run(capsys, "insight", "--model", llama)
    assert (status, err) == (0, "")
    assert "8 heads in 2 layers, 101 tokens" in out
    assert "L1 H3 (keys of 1)" in out


def test_a_page_without_a_text_keeps_the_model(llama: Path, tmp_path: Path) -> None:
    """A model opens on a sentence, and reads what is typed; one without a tokenizer has tokens that repeat."""
    given = {"text": None, "capture": None, "arrays": None, "dtype": None, "image": None}
    scenes = command._of_page(Namespace(model=str(llama), **given), None, None, lambda stage: None)
    of_python = scenes_of(transformers.LlamaForCausalLM.from_pretrained(llama), tokenizer=tokenizer())
    for (scene,) in (scenes, of_python):
        assert (scene.settings, scene.predicts) == ({"text": SENTENCE}, "next")
        assert scene.runner.scenes({"text": TEXT})[0].query_tokens[1] == "the"
    transformers.LlamaForCausalLM.from_pretrained(llama).save_pretrained(tmp_path)
    (scene,) = command._of_page(Namespace(model=str(tmp_path), **given), None, None, lambda stage: None)
    assert (scene.runner, scene.layers[0].problem.n_q) == (None, 101)


def test_a_model_that_does_not_load_is_loaded_once(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a missing tokenizer leads to tokens that repeat."""
    tokenizer().save_pretrained(tmp_path)
    shutil.copy(llama / "config.json", tmp_path)
    monkeypatch.setattr(command, "_scenes", lambda *_: pytest.fail("the model was loaded twice"))
    given = {"text": None, "capture": None, "arrays": None, "dtype": None, "image": None}
    with pytest.raises(ValueError, match="has no model that transformers can load"):
        command._of_page(Namespace(model=str(tmp_path), **given), None, None, lambda stage: None)


def test_an_encoder_reads_and_its_decoder_answers(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "insight", "--model", t5, "--text", TEXT, "--csv")
    assert (status, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["name"] for row in rows[::4]] == [
        "encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    ]  # fmt: skip
    assert rows[8]["previous"] == rows[8]["duplicate"] == ""
    assert 0 < float(rows[8]["sink"]) < 1


def test_a_capture_that_was_saved(llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from regard.torch.capture import pretrained

    seen = pretrained.read(str(llama), TEXT, path=tmp_path / "seen.safetensors")
    assert not seen[0].key.flags.writeable
    seen.save(tmp_path / "seen.safetensors")  # over the file that its arrays lie in
    direct = run(capsys, "insight", "--model", llama, "--text", TEXT, "--csv")
    assert run(capsys, "insight", "--capture", tmp_path / "seen.safetensors", "--csv") == direct


def test_what_is_wrong(llama: Path, t5: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nothing, bare, vit, clip = (tmp_path / name for name in ("empty", "bare", "vit", "clip"))
    nothing.mkdir()
    transformers.LlamaModel.from_pretrained(llama).save_pretrained(bare)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    pictures = {**sizes, "image_size": 8, "patch_size": 4}
    transformers.ViTModel(transformers.ViTConfig(**pictures)).save_pretrained(vit)
    both = transformers.CLIPConfig(text_config={**sizes, "vocab_size": 9}, vision_config=pictures, projection_dim=8)
    transformers.CLIPModel(both).save_pretrained(clip)
    tokenizer().save_pretrained(clip)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "x.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      trailing")
    ours = ["--model", llama]
    for arguments, message in (
        (["--model", "no/such-model"], "no such model: no/such-model is neither a folder nor in the local cache of"),
        (["--model", nothing], f"{nothing} has no configuration that transformers can load: "),
        (["--model", bare, "--text", "a"], f"{bare} has no tokenizer that transformers can load\n"),
        (["--model", vit], f"{vit} reads no text: ViTModel takes pixel_values. Give it a picture: regard look"),
        (["--model", vit, "--text", "a"], f"{vit} reads no text: ViTModel takes pixel_values. Give it a picture"),
        (["--model", clip, "--text", TEXT], "CLIPModel does not run on tokens alone ("),
        ([*ours, "--text", ""], "text is empty: give at least one character"),
        ([*ours, "--text", "the cat " * 64], f"text is too long: 129 tokens, and {llama} reads at most 128"),
        ([*ours, "--text", "a", "--file", "b"], "give --text or --file, not both"),
        ([*ours, "--file", tmp_path / "none"], f"cannot read {tmp_path / 'none'}: No such file or directory"),
        ([*ours, "--file", tmp_path / "bytes"], f"{tmp_path / 'bytes'} is not valid UTF-8"),
        ([*ours, "--prefix", "0"], "--prefix must be at least 1, got 0"),
        ([*ours, "--json", "--csv"], "give --json or --csv, not both"),
        ([*ours, "--capture", "x"], "--model does not go with --capture, which has all of it"),
        (["--capture", tmp_path / "none"], f"cannot read {tmp_path / 'none'}: No such file or directory"),
        (["--capture", tmp_path / "x.safetensors"], f"{tmp_path / 'x.safetensors'} is not a whole safetensors file: "),
    ):
        status, out, err = run(capsys, "insight", *arguments)
        assert (status, out) == (2, "")
        assert err.startswith(f"regard: error: {message}")
        assert err.count("\n") == 1


@pytest.mark.filterwarnings("default::regard.RegardWarning")  # once a process: that such a model names no backends
@pytest.mark.parametrize("kind", ["XLNet", "Mamba", "FNet"])
@pytest.mark.parametrize("command", [["insight"], ["look", "--terminal"]], ids=" ".join)
def test_a_model_whose_attention_cannot_be_looked_at(
    kind: str, command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = {
        "XLNet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
        "FNet": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=61, **options)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    message = (
        f"regard: error: the attention of {tmp_path} cannot be looked at: {kind}Model computes it itself, without "
        "transformers' attention interface, or has none\n"
    )
    status, out, err = run(capsys, command[0], "--model", tmp_path, *command[1:])
    assert (status, out) == (2, "")
    assert err.endswith(message)
    assert "Traceback" not in err


def test_look_at_a_masked_model_computes_no_logits() -> None:
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model, heads = transformers.BertForMaskedLM(config).eval(), []
    model.cls.register_forward_pre_hook(lambda *given: heads.append(given))
    (scene,) = scenes_of(model, text=TEXT, tokenizer=tokenizer())
    assert (len(scene.layers), scene.query_tokens[:2], heads) == (2, ("<s>", "the"), [])


def test_look_at_an_encoder_decoder_model(t5: Path) -> None:
    model = transformers.T5ForConditionalGeneration.from_pretrained(t5)
    scenes = scenes_of(model, text=TEXT, tokenizer=tokenizer())
    for scene, stack in zip(scenes, ("encoder", "decoder", "decoder, cross-attention"), strict=True):
        assert scene.name.endswith(f", {stack}")
        assert [layer.number for layer in scene.layers] == [0]


def test_layers_are_reported_in_a_pipe(llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, "look", "--model", llama, "--text", TEXT, "--save", tmp_path / "x.npz")
    lines = err.splitlines()
    assert (status, lines[:2]) == (0, ["loading PyTorch and transformers", "loading the model"])
    assert [line for line in lines if line.startswith("layer")] == ["layer 1 of 2", "layer 2 of 2"]
