"""The command line, run in process: what it prints is what was computed, and every mistake is one line on stderr."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import regard
from regard.cli import main
from regard.interpret.formats import score_text, weight_text
from regard.ops.planning import plan
from regard.ops.stepping import steps
from regard.viewer.data.summary import look_data
from regard.viewer.scene.sources import SENTENCE, Settings, example
from regard.viewer.serve.answers import Answers

HUGE = "9" * 20


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command: (exit status, stdout, stderr), without colours unless asked for."""
    for name in ("FORCE_COLOR", "NO_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def command(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return command


def good(result):
    status, out, err = result
    assert (status, err) == (0, "")
    return out


@pytest.fixture
def arrays():
    rng = np.random.RandomState(0)
    return {
        name: rng.standard_normal((2, n, 4)).astype(np.float32) for name, n in (("query", 5), ("key", 7), ("value", 7))
    }


# General


def test_version_and_help(run):
    assert good(run("--version")) == f"regard {regard.__version__}\n"
    text = good(run("--help"))
    for name in ("look", "steps", "plan", "insight", "doctor"):
        assert re.search(rf"^ +{name} +\w", text, re.MULTILINE)
        assert f"usage: regard {name}" in good(run(name, "--help"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see `regard --help`)"),
        (["stare"], "argument COMMAND: invalid choice: 'stare'"),
        (["look", ""], "text is empty: give at least one character"),
        (["look", "--text", ""], "text is empty: give at least one character"),
        (["look", "a", "--text", "b"], "give TEXT or --text, not both"),
        (["look", "a", "--arrays", "b.npz"], "a text does not go with --arrays, where all was read already"),
        (["look", "--model", "a", "--capture", "b"], "give --capture or --model, not both"),
        (["look", "a", "--file", "b.txt"], "give --text or --file, not both"),
        (["look", "--model", "no/such", "--text", "a"], "no such model: no/such is neither a folder nor in the local"),
        (["look", "--file", "no.txt"], "cannot read no.txt: No such file or directory"),
        (["look", "--arrays", "no.npz"], "cannot read no.npz: No such file or directory"),
        (
            ["look", "--arrays", "no", "no.npy"],
            "files must be three .npy for query, key and value, or one .npz or .safetensors, "
            "got no (no such file), no.npy (no such file)",
        ),
        (["look", "--capture", "no.safetensors"], "cannot read no.safetensors: No such file or directory"),
        (["look", "--arrays", "a.txt"], "files must be three .npy for query, key and value, or one .npz or"),
        (["look", "--view", "none"], "--view must be overview, heads, map, text, token, compare,"),
        (["look", "--terminal", "--key", "3"], "--view and --key are for the page"),
        (["look", "a", "--layer", "9"], "layer 9 does not exist: this model has 0, 1, 2"),
        (["look", "--layer", "30"], "layer 30 does not exist: this model has 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"),
        (["look", "a", "--layer", "1", "--head", "4"], "head 4 does not exist: layer 1 has 0, 1, 2, 3"),
        (["look", "--head", "1"], "on the page --head goes with --layer"),
        (["look", "abc", "--token", "z"], "token 'z' does not occur in the text"),
        (["look", "abc", "--key", "4"], "token 4 does not exist: the text has tokens 0 to 3"),
        (["look", "abc", "--dtype", "bfloat16"], "--dtype goes with --model: it is the dtype in which a model runs"),
        (["insight", "--dtype", "bfloat16"], "--dtype goes with --model: it is the dtype in which a model runs"),
        (["look", "--window", "3"], "--causal and --window go with --arrays: models have rules of their own"),
        (["look", "--port", "70000"], "port must be from 0 (any that is free) to 65535, got 70000"),
        (["look", "a", "--terminal", "--layer", "9"], "layer 9 does not exist: this model has layers 0 to 2"),
        (["look", "a", "--terminal", "--head", "-1"], "head -1 does not exist: this model has heads 0 to 3"),
        (["look", "a", "--terminal", "--token", "7"], "token 7 does not exist: the text has tokens 0 to 1"),
        (["look", "a", "--terminal", "--token", "z"], "token 'z' does not occur in the text"),
        (["look", "a", "--save", "x.pdf"], "cannot save x.pdf: the ending must be .html, .png, .svg or .npz, got .pdf"),
        (["look", "a", "--save", "no/such/x"], "cannot save no/such/x: no/such is not a directory"),
        (["look", "\udcff"], "text is not valid UTF-8"),
        (["look", "ab" * 10_000], "text is too long: 20001 tokens, at most 16384"),
        (["look", "ab" * 8000, "--save", "x.html"], "one file should hold at most 64 MiB of numbers; 12"),
        (["steps", "--n", "0"], "--n must be at least 1, got 0"),
        (["steps", "--n", "three"], "argument --n: invalid int value: 'three' (see `regard steps --help`)"),
        (["steps", "--heads", "3", "--kv-heads", "2"], "the heads of query must be a multiple of those of key"),
        (["steps", "--scale", "nan"], "scale must be finite, got nan"),
        (["steps", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["steps", "--seed", HUGE], f"--seed must be below 2**32, got {HUGE}"),
        (["steps", "--n", HUGE], f"--n must be below 2**60, got {HUGE}"),
        (["steps", "--d", "2" + "0" * 17], "steps shows every feature: query (6, 200000000000000000) and key (6, 2"),
        (["plan", "--n", HUGE, "--d", "8"], f"--n must be below 2**60, got {HUGE}"),
        (["plan", "--n", "8", "--d", HUGE], f"--d must be below 2**60, got {HUGE}"),
        (["plan", "--n", "8", "--d", "8", "--batch", HUGE], f"--batch must be below 2**60, got {HUGE}"),
        (["plan", "--n", "8", "--d", "8", "--window", HUGE], f"--window must be below 2**60, got {HUGE}"),
        (["plan", "--n", str(2**40), "--d", str(2**40)], "query must have fewer than 2**60 entries, got shape (109"),
        (["look", "--port", HUGE], f"port must be from 0 (any that is free) to 65535, got {HUGE}"),
        (["look", "a", "--terminal", "--layer", HUGE], f"layer {HUGE} does not exist: this model has layers 0 to 2"),
        (["bench", "--quick"], "benchmarks run in a checkout of regard: `python -m benchmarks`"),
        (["insight", "--prefix", HUGE], f"--prefix must be below 2**60, got {HUGE}"),
        (["insight", "--ablate", "half"], "--ablate must be zero or mean, got half"),
        (["insight", "--ablate", "--model", "m"], "--ablate runs regard's example model: it does not go with --model"),
        (["steps", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["steps", "--window", "-1"], "--window must be at least 0, got -1"),
        (["steps", "a.npy"], "files must be three .npy for query, key and value, or one .npz or .safetensors, got"),
        (["steps", "a.npy", "b.npy", "c.npy"], "cannot read a.npy: No such file or directory"),
        (["steps", "a.npz", "--n", "4"], "--n does not go with files: sizes and values are those of the arrays"),
        (["steps", "a.npz", "--seed", "4"], "--seed does not go with files: sizes and values are those of the arrays"),
        (["steps", "--n", "30000"], "steps builds every score: 900,000,000 of them, more than 67,108,864; take fewer"),
        (["plan"], "give --n and --d, or files with query, key and value"),
        (
            ["plan", "--n=8", "--d=4", "--engine", "gpu"],
            "engine must be one of 'cpu', 'tiled', 'device', 'spec', got 'gpu'",
        ),
        (["plan", "a.safetensors"], "cannot read a.safetensors: No such file or directory"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith(f"regard: error: {message}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def damaged(path):
    """Files that are not what their ending says, and what is wrong with them."""
    np.save(path / "float.npy", np.zeros((3, 4)))
    np.save(path / "int.npy", np.zeros((3, 4), int))
    np.save(path / "object.npy", np.array([{}], object), allow_pickle=True)
    (path / "text.npy").write_text("not an array")
    (path / "empty.npy").write_bytes(b"")
    (path / "text.npz").write_text("not an archive")
    (path / "text.safetensors").write_text("not tensors at all")
    (path / "short.safetensors").write_bytes(safetensors.numpy.save({"query": np.zeros(4)})[:-8])
    np.savez(path / "names.npz", query=np.zeros((3, 4)), keys=np.zeros((3, 4)))
    np.savez(path / "shapes.npz", q=np.zeros((3, 4)), k=np.zeros((3, 5)), v=np.zeros((3, 5)))
    np.savez(path / "object.npz", q=np.array([{}], object), k=np.zeros(1), v=np.zeros(1))
    (path / "folder.npz").mkdir()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["text.npy", "float.npy", "float.npy"], "cannot read text.npy: not a valid .npy file"),
        (["empty.npy", "float.npy", "float.npy"], "cannot read empty.npy: not a valid .npy file"),
        (["object.npy", "float.npy", "float.npy"], "cannot read object.npy: not a valid .npy file"),
        (["float.npy", "int.npy", "float.npy"], "key must have a floating dtype (float16, bfloat16, float32,"),
        (["text.npz"], "cannot read text.npz: not a valid .npz file"),
        (["object.npz"], "cannot read object.npz: not a valid .npz file"),
        (["folder.npz"], "cannot read folder.npz: Is a directory"),
        (["names.npz"], "names.npz must hold arrays query, key and value (or q, k and v), got query, keys"),
        (["shapes.npz"], "query and key must have the same number of features d, got query ("),
        (["text.safetensors"], "cannot read text.safetensors: not a valid .safetensors file"),
        (["short.safetensors"], "cannot read short.safetensors: not a valid .safetensors file"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["steps", "plan"])
def test_unreadable_files(run, command, files, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    damaged(tmp_path)
    status, out, err = run(command, *files)
    assert (status, out) == (2, "")
    assert err.startswith(f"regard: error: {message}")
    assert err.count("\n") == 1


def test_captures_that_cannot_be_read(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    regard.interpret.capture.captured.Capture.of_arrays(np.zeros((1, 5, 4)), np.zeros((1, 5, 4)), causal=True).save(
        "whole.safetensors"
    )
    whole = Path("whole.safetensors").read_bytes()
    for name, content, message in (
        ("text", b"not tensors at all", "text.safetensors is not a whole safetensors file: "),
        ("empty", b"", "empty.safetensors is not a whole safetensors file: "),
        ("short", whole[:-8], "short.safetensors is not a whole safetensors file: "),
        (
            "other",
            safetensors.numpy.save({"a": np.zeros(4)}),
            "other.safetensors is a safetensors file, but not a capture",
        ),
        ("option", whole.replace(b"causal", b"casual"), "option.safetensors is damaged: "),
    ):
        Path(f"{name}.safetensors").write_bytes(content)
        status, out, err = run("look", "--capture", f"{name}.safetensors", "--no-open")
        assert (status, out) == (2, "")
        assert err.startswith(f"regard: error: {message}"), err
        assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["look", "insight"])
def test_a_model_without_its_library(run, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, out, err = run(command, "--model", "a", "--text", "b")
    assert (status, out) == (2, "")
    assert err == "regard: error: a model needs PyTorch and transformers: pip install 'regard[transformers]'\n"


def test_interrupt(run, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.ops.stepping.steps", interrupted)
    assert run("steps") == (130, "", "")


def test_a_defect_is_not_blamed_on_the_user(run, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("a defect")

    monkeypatch.setattr("regard.ops.stepping.steps", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        run("steps")


def test_output_that_cannot_hold_every_character():
    code = "import sys; from regard.cli import main; sys.exit(main(['steps', '--causal']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "raw scores" in done.stdout


# Steps


def test_steps_of_the_classic_example(run):
    text = good(run("steps", "--seed", 42, "--n", 2, "--n-keys", 3, "--d", 4, "--dtype", "float64"))
    assert re.search(r"0\.445 0\.389 0\.166 *\n.*0\.507 0\.221 0\.272", text)
    assert re.search(r"softmax +P\[i,j\] = exp\(S\[i,j\] − lse\[i\]\) +\(2, 3\)", text)


def test_steps_as_json_are_those_of_the_library(run):
    sizes = shlex.split("--n 5 --d 8 --d-value 3 --heads 4 --kv-heads 2")
    options = shlex.split("--seed 3 --causal --scale 0.5 --window 2 --json")
    found = json.loads(good(run("steps", *sizes, *options)))["steps"]
    rng = np.random.RandomState(3)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5, 8), (2, 5, 8), (2, 5, 3)))
    expected = steps(q, k, v, causal=True, scale=0.5, mask=regard.window(2))
    assert [step["name"] for step in found] == list(expected.names)
    for step, true in zip(found, expected, strict=True):
        assert (step["einsum"], step["formula"], step["shape"]) == (true.einsum, true.formula, list(true.shape))
        np.testing.assert_array_equal(np.array(step["value"], dtype=float), true.value.astype(float))
    assert found[expected.names.index("masked")]["value"][0][0][1] == "-Infinity"


def test_steps_without_arguments(run):
    assert good(run("steps", "--json")) == good(run("steps", "--n", 6, "--d", 4, "--seed", 0, "--json"))
    first = np.random.RandomState(0).standard_normal((6, 4)).astype(np.float32)
    assert json.loads(good(run("steps", "--json")))["steps"][0]["value"] == first.tolist()


@pytest.mark.parametrize("names", [("query", "key", "value"), ("q", "k", "v")])
@pytest.mark.parametrize("kind", ["npy", "npz", "safetensors"])
def test_steps_from_files(run, arrays, kind, names, tmp_path):
    named = dict(zip(names, arrays.values(), strict=True))
    if kind == "npy":
        paths = [tmp_path / f"{name}.npy" for name in named]
        for path, array in zip(paths, named.values(), strict=True):
            np.save(path, array)
    else:
        paths = [tmp_path / f"all.{kind}"]
        np.savez(paths[0], **named) if kind == "npz" else safetensors.numpy.save_file(named, paths[0])
    found = json.loads(good(run("steps", *paths, "--json")))["steps"]
    out = regard.attention(*arrays.values())
    np.testing.assert_allclose(np.array(found[-1]["value"]), out, atol=1e-6)
    assert found[0]["value"] == arrays["query"].tolist()


def test_sixteen_bits(run, arrays, tmp_path):
    path = tmp_path / "all.safetensors"
    safetensors.numpy.save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in arrays.items()}, path)
    found = json.loads(good(run("steps", path, "--json")))["steps"]
    assert (found[0]["dtype"], found[-1]["dtype"]) == ("float32", "bfloat16")
    made = json.loads(good(run("steps", "--dtype", "bfloat16", "--json")))["steps"]
    assert made[-1]["dtype"] == "bfloat16"


def test_colours(run, monkeypatch):
    assert "\x1b[" not in good(run("steps"))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    assert "48;2;" in good(run("steps"))
    assert "48;2;" not in good(run("steps", "--no-color"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2;" not in good(run("steps"))


# Plan


def test_plan_prints_the_plan(run):
    text = good(run("plan", "--n", 8192, "--d", 64, "--heads", 8, "--causal"))
    expected = plan((8, 8192, 64), (8, 8192, 64), (8, 8192, 64), causal=True)
    words = " ".join(text.split())
    for label, line in expected.rows():
        assert f"{label} {line}".strip() in words
    assert "256 MiB per head" in text
    assert "total O(n·m·(d + d_v)) O(n·m)" in words


def test_plan_sizes(run, arrays, tmp_path):
    sizes = shlex.split("--n 100 --n-keys 300 --d 32 --d-value 16 --heads 8 --kv-heads 2 --batch 3 --dtype bfloat16")
    words = " ".join(good(run("plan", *sizes, "--window", 20, "--engine", "spec")).split())
    assert "batch 3, 8 heads over 2, 100 queries, 300 keys, d = 32, d_v = 16, bfloat16" in words
    assert "rules window(20)" in words
    assert "engine spec: named" in words
    np.savez(tmp_path / "all.npz", **arrays)
    assert "batch 1, 2 heads, 5 queries, 7 keys, d = 4, float32" in good(run("plan", tmp_path / "all.npz"))


# Doctor


def test_doctor(run):
    text = good(run("doctor"))
    words = " ".join(text.split())
    for expected in (
        f"regard {regard.__version__}",
        f"numpy {np.__version__}",
        f"used by regard {regard.runtime.threads.num_threads()}",
        *(f"{engine.name} ready ({engine.about})" for engine in regard.available_engines()),
    ):
        assert expected in words
    assert re.search(r"^ +torch +\S", text, re.MULTILINE)


def test_doctor_imports_nothing_heavy():
    code = (
        "import sys; from regard.cli import main; status = main(['doctor'])\n"
        "heavy = {'torch', 'jax', 'matplotlib', 'safetensors', 'transformers'} & set(sys.modules)\n"
        "print(heavy); sys.exit(status or bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_doctor_says_why_an_engine_is_missing(run, monkeypatch):
    monkeypatch.setattr("regard.engines.tiled.state", lambda: "no reason at all")
    assert "tiled not available: no reason at all" in " ".join(good(run("doctor")).split())


def test_doctor_says_where_gradients_have_the_rounded_output(run):
    words = " ".join(good(run("doctor")).split())
    for expected in ("16-bit gradients", "outputs= of (out, seen)", "merge", "PyTorch's operation"):
        assert expected in words


def test_doctor_wraps_lines_in_a_terminal_alone(run, monkeypatch):
    monkeypatch.setattr("regard.engines.tiled.state", lambda: "no reason " * 10)
    whole = good(run("doctor"))
    assert max(map(len, whole.splitlines())) > 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    wrapped = good(run("doctor"))
    assert max(map(len, wrapped.splitlines())) <= 80
    assert wrapped.split() == whole.split()


# Look


def test_look_without_text_shows_induction(run):
    text = good(run("look", "--terminal"))
    data = look_data(example(Settings(SENTENCE)))
    assert f"{len(SENTENCE) + 1} tokens, {data.layers} layers of {data.heads} heads" in text
    for kind in ("previous token", "induction", "first-token sink"):
        section = text[text.index(f"  {kind}") :]
        found = re.findall(r"L(\d) H(\d)  (\d\.\d{2})", section)[:3]
        assert found == [(str(a), str(b), score_text(score)) for a, b, score in data.strongest(kind)]
    # The last token of the sentence came before: the chosen head looks at what followed it then.
    layer, head, score = data.strongest("induction")[0]
    assert score > 0.4
    assert f"Map of L{layer} H{head}" in text
    last = len(SENTENCE)
    follower = SENTENCE.index(SENTENCE[-2:]) + 3
    assert data.attended(data.choose())[0].token == follower
    assert re.search(rf"What token {last}, .*\n +{follower}  ", text)


def test_look_at_a_chosen_head_and_token(run):
    text = good(run("look", "abcabc", "--terminal", "--layer", 1, "--head", 2, "--token", "-2"))
    data = look_data(example(Settings("abcabc")))
    section = text[text.index("What token 5, “b”, attends to in L1 H2") :]
    for token, weight in data.attended(data.choose(1, 2, 5)):
        assert re.search(rf"^ +{token}  {data.labels[token]}  {weight_text(weight)}", section, re.MULTILINE)
    assert "What token 4, “a”" in good(run("look", "abcabc", "--terminal", "--token", "a"))


def test_look_saves_what_is_asked_for(run, tmp_path):
    text = good(run("look", "to be or not to be", "--save", tmp_path / "one.html", "--save", tmp_path / "two"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "two.html", "two.png", "two.svg"]
    for path in tmp_path.iterdir():
        assert f"saved {path}" in text
    assert (tmp_path / "one.html").read_text("utf-8") == (tmp_path / "two.html").read_text("utf-8")
    assert "<title>regard look: to be or not to be</title>" in (tmp_path / "one.html").read_text("utf-8")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "two.svg").read_bytes().startswith(b"<svg")


def test_look_at_weights_in_a_file(run, tmp_path):
    """As `--save` writes them of weights, and others may."""
    weights, saved = np.tril(np.ones((2, 4, 4))) / np.arange(1, 5)[:, None], tmp_path / "weights.npz"
    np.savez(saved, weights=weights, tokens=list("abca"))
    text = good(run("look", "--arrays", saved, "--terminal", "--save", tmp_path / "again.npz"))
    assert "4 tokens, 1 layer of 2 heads" in text
    np.testing.assert_allclose(np.load(tmp_path / "again.npz")["weights"], weights, atol=1e-6)
    assert run("look", "--arrays", saved, "--causal") == (
        2, "", "regard: error: --causal and --window go with queries and keys: weights follow their rules already\n",
    )  # fmt: skip


def test_look_writes_nothing_unless_told(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good(run("look", "a", "--terminal"))
    assert list(tmp_path.iterdir()) == []


def test_look_reads_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abab\n"))
    assert "5 tokens" in good(run("look", "-", "--terminal"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert run("look", "-") == (2, "", "regard: error: standard input is not valid UTF-8\n")


def test_a_file_that_cannot_be_written(run, tmp_path):
    target = tmp_path / "x.html"
    target.mkdir()
    assert run("look", "a", "--save", target)[::2] == (2, f"regard: error: cannot save {target}: it is a directory\n")


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "[red]x[/red]", "🎉 שלום 🎉", "a\tb\r\nc", "\x1b[31mred", "$x_$"]
)
def test_look_at_any_text(run, text, tmp_path):
    shown = good(run("look", text, "--terminal", "--save", tmp_path / "x"))
    assert f"{len(text.encode()) + 1} tokens" in shown
    assert "\x1b" not in shown
    content = (tmp_path / "x.html").read_text("utf-8")
    assert "<script>alert" not in content
    assert "\x1b" not in content


# Insight


def test_insight_finds_the_heads_of_the_example_model(run):
    text = good(run("insight"))
    assert "12 heads in 3 layers, 81 tokens" in text
    assert re.search(r"^previous token +1 of 12 +L1 H0 0\.98", text, re.MULTILINE)
    assert re.search(r"^induction +2 of 12 +L2 H2 0\.71", text, re.MULTILINE)
    assert re.search(r"^L1 H0 +previous token +0\.98", text, re.MULTILINE)
    heads = json.loads(good(run("insight", "--json")))["heads"]
    assert [head["kind"] for head in heads].count("induction") == 2
    rows = good(run("insight", "--csv")).splitlines()
    assert rows[0].startswith("layer,name,head,kv_head,kind,previous,duplicate,induction,sink,current,entropy")
    assert len(rows) == 13


@pytest.mark.engine("tiled")
def test_insight_of_a_text(run, tmp_path):
    (tmp_path / "text").write_text(SENTENCE)
    found = json.loads(good(run("insight", "--file", tmp_path / "text", "--prefix", 3, "--json")))
    data = look_data(example(Settings(SENTENCE)))
    scores = [head["induction"] for head in found["heads"]]
    np.testing.assert_allclose(np.reshape(scores, (3, 4)), data.statistics["induction"], atol=1e-5)


@pytest.mark.parametrize("how", ["zero", "mean"])
def test_insight_ablates_as_the_page_does(run, how):
    answers = Answers([example(Settings(SENTENCE))], patience=None)
    page = answers.get("example/ablations", {"how": how}).content
    given = ["--ablate"] if how == "zero" else ["--ablate", how]
    found = json.loads(good(run("insight", "--text", SENTENCE, *given, "--json")))
    losses = {(row["layer"], row["head"]): row["loss"] for row in page["rows"]}
    assert found["loss"] == page["loss"]
    assert {(head["layer"], head["head"]): head["loss_without"] for head in found["heads"]} == losses
    rows = list(csv.DictReader(good(run("insight", "--text", SENTENCE, *given, "--csv")).splitlines()))
    assert [float(row["loss_without"]) for row in rows] == list(losses.values())
    text = good(run("insight", "--text", SENTENCE, *given))
    assert f"Loss with all heads: {page['loss']:.3f} nats a byte" in text
    listed = re.findall(r"^L(\d) H(\d) .* (\d\.\d{3}) +[+−]\d\.\d{3}$", text, re.MULTILINE)
    order = sorted(losses, key=lambda at: -losses[at])
    assert listed == [(str(layer), str(head), f"{losses[layer, head]:.3f}") for layer, head in order]


@pytest.mark.engine("tiled")
def test_insight_ablates_on_standard_input(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abcabc\n"))
    found = json.loads(good(run("insight", "--text", "-", "--ablate", "--json")))
    assert found == json.loads(good(run("insight", "--text", "abcabc", "--ablate", "--json")))


COMMANDS = [
    ["--version"],
    ["--help"],
    ["plan", "--help"],
    ["plan", "--n", "8", "--d", "4"],
    ["steps"],
    ["steps", "--json"],
    ["doctor"],
    ["insight", "--text", "abab", "--json"],
    ["insight", "--text", "abab", "--csv"],
    ["look", "abab", "--terminal"],
    ["look", "abab", "--no-open"],
]


def process(arguments, **options):
    """A command in a process of its own, whose streams are files of the system: a script cannot be told apart."""
    command = [sys.executable, "-c", "import sys; from regard.cli import main; sys.exit(main())", *arguments]
    options = {
        "stderr": subprocess.PIPE,
        "env": {k: x for k, x in os.environ.items() if k != "PYTHONUNBUFFERED"},
    } | options
    return subprocess.run(command, text=True, timeout=300, check=False, **options)


@pytest.mark.parametrize("arguments", [["--version"], ["plan", "--n", "8", "--d", "4"], ["plan", "--n", "x"], []])
def test_the_module_is_the_command(arguments):
    expected = process(arguments, stdout=subprocess.PIPE)
    found = subprocess.run([sys.executable, "-m", "regard", *arguments], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (expected.returncode, expected.stdout, expected.stderr)


FORKS = """if True:
    import json, os, sys
    from regard.cli import main
    for arguments in json.loads(sys.argv.pop()):
        if not (child := os.fork()):
            sys.argv[1:] = arguments
            sys.exit(main())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != 1:
            sys.exit(f"{arguments}: {status}")
"""


def failing(stdout):
    """What all commands write to stderr, each in a fork of one process, where none can write to stdout."""
    command = [sys.executable, "-c", FORKS, json.dumps(COMMANDS)]
    found = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    return found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        assert failing(full) == "regard: error: cannot write the output: No space left on device\n" * len(COMMANDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_reader_who_has_gone_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    try:
        assert failing(write) == ""
    finally:
        os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_an_error_that_cannot_be_written_has_its_status():
    with open("/dev/full", "w") as full:
        assert process(["plan", "--n", "x"], stdout=full, stderr=full).returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does with >&-")
def test_closed_streams_are_no_error():
    code = "import sys; sys.stdout = sys.stderr = None; from regard.cli import main; sys.exit(main(['doctor']))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
