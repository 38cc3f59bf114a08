"""Captures: layers as data, one head at a time or together, in memory and in files, against `regard.weights`."""

import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import regard
from regard import cli, insight
from regard.examplemodel import ExampleModel, repeated_bytes
from regard.interpret.capture.layers import Layer, Tokens
from regard.runtime import arrayfile
from regard.viewer.data import summary
from regard.viewer.scene import sources
from regard.viewer.serve import saving
from regard.viewer.serve.answers import Answers
from support import on_cpu

pytestmark = pytest.mark.engine("tiled")

RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((2, 6, 20, 8)), RNG.standard_normal((2, 3, 25, 8))
SHOWN = RNG.random((2, 6, 20, 25)) < 0.8
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.5},
    "rules": {"mask": regard.window(4, 3) & regard.mask(lambda b, h, i, j: (i + b + h + j) % 5 != 0),
              "score": [regard.alibi(RNG.random(6)), regard.softcap(2.0)]},
    "arrays": {"mask": SHOWN, "bias": RNG.standard_normal((6, 1, 25)), "sink": RNG.standard_normal(6)},
    "a bias for each batch element": {"bias": RNG.standard_normal((2, 1, 20, 25))},
    "places": {"causal": True, "offset": np.array([3, 5]), "sink": RNG.standard_normal(6)},
    "a whole elsewhere": {"mask": regard.documents(np.arange(64) // 9), "offset": 12, "origin": (0, 0, 7)},
    "nothing seen": {"mask": regard.mask(lambda b, h, i, j: (j > i) & (i > 9))},
}  # fmt: skip


def kept(layer: Layer, heads: tuple[int, ...]) -> Layer:
    """The layer as it is where only some heads were kept."""
    of = tuple(dict.fromkeys(head // layer.group for head in heads))
    rows = list(heads)
    options = dict(layer.options)
    for name in ("bias", "sink"):
        axis = {"bias": -3, "sink": 0}[name]
        if name in options and options[name].shape[axis] > 1:
            options[name] = np.take(options[name], rows, axis)
    q, k, lse = layer.query[:, rows], layer.key[:, list(of)], layer.lse[:, rows]
    return Layer(layer.name, q, k, lse, options, numbers=heads, kv_numbers=of, group=layer.group)


def same(layer: Layer, weights: Any) -> None:
    for b in range(layer.batch):
        for head in layer.numbers:
            np.testing.assert_array_equal(layer.weights(head, batch=b), weights[b, head])


@pytest.mark.parametrize("wish", on_cpu(WISHES, "rules"))
def test_weights_of_a_head_are_those_of_the_call(wish: str) -> None:
    weights = regard.weights(Q, K, **WISHES[wish])
    layer = Layer.of("attention", Q, K, **WISHES[wish])
    same(layer, weights)
    tile = layer.weights(2, slice(3, 18, 5), slice(2, 9), batch=1)
    np.testing.assert_array_equal(tile, weights[1, 2, 3:18:5, 2:9])


@pytest.mark.parametrize("wish", WISHES)
def test_a_file_holds_all_of_it(wish: str, tmp_path: Path) -> None:
    layer = Layer.of("attention", Q, K, cross=True, query_tokens="text", **WISHES[wish])
    path = tmp_path / "seen.safetensors"
    regard.Capture([layer], {"text": Tokens(np.arange(40).reshape(2, 20))}, "a model").save(path)
    seen = regard.Capture.load(path)
    assert repr(seen) == repr(regard.Capture([layer], model="a model"))
    assert (seen[0].cross, seen[0].query_tokens, seen[0].key_tokens) == (True, "text", None)
    np.testing.assert_array_equal(seen.ids(0), np.arange(40).reshape(2, 20))
    same(seen[0], regard.weights(Q, K, **WISHES[wish]))


@pytest.mark.parametrize("wish", ["plain", "rules", "a bias for each batch element", "places"])
def test_some_heads_of_a_layer(wish: str) -> None:
    whole = Layer.of("attention", Q, K, **WISHES[wish])
    some = kept(whole, (5, 1, 0))
    same(some, regard.weights(Q, K, **WISHES[wish]))
    assert [some.kv_head(head) for head in some.numbers] == [2, 0, 0]
    one = some.observe(["entropy"], head=1, batch=1).entropy
    np.testing.assert_array_equal(one, whole.observe(["entropy"], head=1, batch=1).entropy)
    np.testing.assert_array_equal(some.weights(-1), some.weights(0))
    with pytest.raises(IndexError, match=r"^head 2 does not exist: there are 3, 5, 1, 0$"):
        some.arguments(2)
    top = regard.top(2)
    all_seen, seen = whole.observe([top]), some.observe([top])
    np.testing.assert_array_equal(seen[top].indices, all_seen[top].indices[:, [5, 1, 0]])
    np.testing.assert_array_equal(seen[top].values, all_seen[top].values[:, [5, 1, 0]])


def test_some_heads_are_measured_under_their_numbers() -> None:
    whole = Layer.of("attention", Q, K)
    heads = regard.Capture([kept(whole, (5, 1, 0))]).measure()
    assert [(head.head, head.kv_head) for head in heads] == [(5, 2), (1, 0), (0, 0)]
    np.testing.assert_equal(heads[0], regard.Capture([whole]).measure()[5])


@pytest.mark.parametrize("wish", WISHES)
def test_statistics_of_one_head_are_those_of_all(wish: str) -> None:
    layer = Layer.of("attention", Q, K, **WISHES[wish])
    asked, pooled = ["lse", "entropy", "argmax"], regard.pooled(4, 5)
    every, one = layer.observe([*asked, pooled]), layer.observe([*asked, pooled], head=4, batch=1)
    for name in asked:
        np.testing.assert_array_equal(one[name], every[name][1, 4])
    # Sums over queries: their order depends on how many queries share keys.
    np.testing.assert_allclose(one[pooled], every[pooled][1, 4], rtol=8 * np.finfo(float).eps)
    np.testing.assert_array_equal(one.lse, layer.lse[1, 4])
    element = layer.observe(asked, batch=1)
    for name in asked:
        np.testing.assert_array_equal(element[name], every[name][1])
    with pytest.raises(IndexError, match=r"^batch 2 does not exist: there are 2$"):
        layer.observe(asked, batch=2)


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_weights_sum_to_one(wish: str, dtype: Any) -> None:
    layer = Layer.of("attention", Q.astype(dtype), K.astype(dtype), **WISHES[wish])
    assert layer.deviation(rows=20) < 2
    assert layer.weights(0).dtype == layer.lse.dtype


def test_what_does_not_belong_together_is_seen(tmp_path: Path) -> None:
    layer = Layer.of("first", Q, K, causal=True)
    for name, x, total in (
        ("options", {}, r"row 0 of head \d sum to \d\d?\.\d+"),
        ("key", layer.key[:, :, ::-1], r"row \d+ of head \d sum to [\d.]+"),
        ("lse", layer.lse + 1e-6, r"row \d+ of head \d sum to 1 - 1e-06"),
    ):
        wrong = regard.Capture([Layer(**vars(layer) | {name: x})])
        message = f"the weights of layer 'first' do not sum to 1: those of {total}; its queries, keys, rules and lse do"
        with pytest.raises(ValueError, match=message):
            wrong.check()
        wrong.save(tmp_path / "wrong")
        with pytest.raises(ValueError, match=f"wrong is no sound capture: {message}"):
            regard.Capture.load(tmp_path / "wrong")
    regard.Capture([layer]).check()
    one = kept(layer, (5, 1))
    with pytest.raises(ValueError, match=r"of row 7 of head 1 sum to 0\.36"):
        regard.Capture([replace(one, lse=one.lse + (np.arange(20) == 7) * [[[0.0], [1.0]]])]).check(rows=20)


def test_an_lse_of_another_call_makes_no_layer() -> None:
    lse = regard.attention(Q, K, K, observe=["lse"])[1].lse
    Layer.of("x", Q, K, lse=lse)
    regard.Capture.of_arrays(Q[0, 0], K[0, 0], lse=lse[0, 0])
    message = r"^lse does not belong to this query, key and options: with it, the weights"
    with pytest.raises(ValueError, match=message):
        Layer.of("x", Q, K, lse=lse, causal=True)
    with pytest.raises(ValueError, match=message):
        regard.Capture.of_arrays(Q, K, lse=lse + 1)
    with pytest.raises(ValueError, match=r"^lse must have shape \(2, 6, 20\), got \(2, 5, 20\)$"):
        Layer.of("x", Q, K, lse=lse[:, :5])


def test_the_example_model(tmp_path: Path) -> None:
    model = ExampleModel.load()
    ids = repeated_bytes(40)[0]
    seen = regard.Capture.of_trace(model.run(ids), model.labels(ids))
    seen.check()
    assert seen.labels("layers.1") == tuple(model.labels(ids))
    heads = seen.measure()
    trace = model.run(ids)
    for layer in range(3):
        expected = insight.head_statistics(trace.weights(layer), ids, layer=layer)
        for head, other in zip(heads[4 * layer :], expected, strict=False):
            assert (head.layer, head.head) == (other.layer, other.head)
            np.testing.assert_allclose(list(head.scores.values()), list(other.scores.values()), atol=1e-5)
    seen.save(tmp_path / "x")
    assert regard.Capture.load(tmp_path / "x").measure() == heads


def test_what_has_no_meaning_is_nan() -> None:
    ids = np.arange(25) % 7
    tokens = {"text": Tokens(ids[None])}
    heads = regard.Capture([Layer.of("x", Q, K, causal=True, key_tokens="text", query_tokens="other")], tokens)
    assert not any(np.isnan(list(head.scores.values())).any() for head in heads.measure())
    crossed = regard.Capture([Layer.of("x", Q, K, key_tokens="text", cross=True)], tokens).measure()
    kinds = ("previous token", "duplicate token", "induction", "current token")
    assert all(np.isnan(head.scores[kind]) for head in crossed for kind in kinds)
    assert all(0 < head.sink < 1 and 0 < head.normalized_entropy < 1 for head in crossed)
    silent = regard.Capture([Layer.of("x", Q, K)]).measure()
    assert all(np.isnan(head.induction) and not np.isnan(head.previous) for head in silent)


def test_the_last_queries_of_a_sequence_are_measured_as_such() -> None:
    q, k = RNG.standard_normal((2, 1, 2, 30, 8))
    ids = np.arange(30) % 6
    rows = slice(20, None)
    weights = regard.weights(q, k, causal=True)
    (first, _) = insight.measure_heads(q[:, :, rows], k, ids, causal=True)
    expected = insight.head_statistics(weights, ids)[0]
    copies = [[j for j in range(i) if ids[j] == ids[i]] for i in range(20, 30)]
    duplicate = np.mean([weights[0, 0, i, js].sum() for i, js in zip(range(20, 30), copies, strict=True)])
    assert first.duplicate == pytest.approx(duplicate)
    assert first.previous == pytest.approx(weights[0, 0].diagonal(-1)[19:].mean())
    assert expected.duplicate != pytest.approx(duplicate)


def test_arrays_are_mapped_from_the_file(tmp_path: Path) -> None:
    layer = Layer.of("attention", Q, K)
    regard.Capture([layer]).save(tmp_path / "x")
    key = regard.Capture.load(tmp_path / "x")[0].key
    base: Any = key
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap)
    assert not key.flags.writeable


def test_what_layers_share_is_written_once(tmp_path: Path) -> None:
    bias = RNG.standard_normal((6, 20, 25))
    rule = regard.documents(np.arange(64) // 9)
    layers = [Layer.of(str(n), Q, K, bias=bias, mask=rule) for n in range(3)]
    regard.Capture(layers).save(tmp_path / "x")
    names = safetensors.numpy.load_file(tmp_path / "x").keys()
    assert sum(name.startswith("bias") for name in names) == 1
    assert sum(name.startswith("table") for name in names) == len(regard.rules.Program.of([rule.node]).tables)
    seen = regard.Capture.load(tmp_path / "x")
    assert seen[0].options["mask"] is seen[2].options["mask"]
    assert seen[0].options["bias"] is seen[1].options["bias"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    regard.Capture([Layer.of("first", Q, K)]).save(path)
    before = path.read_bytes()

    def full(x: Any) -> Any:
        yield x[0, 0]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrayfile, "_pieces", full)
    with pytest.raises(OSError, match="No space left"):
        regard.Capture([Layer.of("second", Q, K)]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_parts_are_one_array(tmp_path: Path) -> None:
    whole = RNG.standard_normal((2, 3, 10, 4)).astype(np.float32)
    parts = arrayfile.Parts([whole[:, :, :7], whole[:, :, 7:7], whole[:, :, 7:]])
    arrayfile.write(
        tmp_path / "x", {"x": parts, "flags": np.array([True, False]), "one": np.float64(2) * np.ones(())}, {}
    )
    found = safetensors.numpy.load_file(tmp_path / "x")
    np.testing.assert_array_equal(found["x"], whole)
    assert (found["flags"].tolist(), found["one"].shape) == ([True, False], ())
    mapped, _ = arrayfile.read(tmp_path / "x")
    np.testing.assert_array_equal(mapped["x"], whole)
    assert all(x.flags.aligned for x in mapped.values())


def damaged(path: Path, change: Any) -> None:
    """The capture at `path` with its metadata changed."""
    arrays, metadata = arrayfile.read(path)
    content = json.loads(metadata["capture"])
    change(content)
    whole = {name: np.array(x) for name, x in arrays.items()}
    arrayfile.write(path, whole, metadata | {"capture": json.dumps(content)})


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    load = regard.Capture.load
    with pytest.raises(FileNotFoundError):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="x is not a whole safetensors file: "):
        load(path)
    safetensors.numpy.save_file({"query": np.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"x is a safetensors file, but not a capture of regard \(regard.capture/2\)"):
        load(path)
    regard.Capture([Layer.of("first", Q, K, mask=regard.window(3))]).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="x is not a whole safetensors file: "):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["layers"][0].pop("name"), "x is damaged: TypeError: "),
        (lambda x: x["layers"][0].update(lse=x["layers"][0]["key"]), "the arrays of layer 'first' do not fit each"),
        (lambda x: x["layers"][0].update(query="nowhere"), "x is damaged: KeyError: 'nowhere'"),
        (lambda x: x["layers"][0]["options"].update(value=1), "unknown option 'value' of a layer"),
        (lambda x: x["layers"][0]["options"]["mask"].update(expression='[[["evil", "bool", [], null]], 0]'),
         "unknown operation 'evil' in a rule"),
        (lambda x: x.pop("tokens"), "x is damaged: KeyError: 'tokens'"),
    ],
)  # fmt: skip
def test_files_that_are_damaged(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    regard.Capture([Layer.of("first", Q, K, mask=regard.window(3))]).save(path)
    damaged(path, change)
    with pytest.raises(ValueError, match=message):
        regard.Capture.load(path)


def test_heads_and_layers_have_the_numbers_of_the_model_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of layers 2 and 5 some heads: in tables, in what is drawn, on the page, by what they are chosen, and in files."""
    layers = [
        replace(kept(Layer.of(f"l{n}", Q, K, causal=True), heads), number=n) for n, heads in ((2, (5, 1)), (5, (4, 3)))
    ]
    seen = regard.Capture(layers, model="some")
    path = tmp_path / "seen"
    seen.save(path)
    for one in (seen, regard.Capture.load(path)):
        found = [(x.layer, x.head, x.kv_head) for x in one.measure()]
        assert found == [(2, 5, 2), (2, 1, 0), (5, 4, 2), (5, 3, 1)]
    (scene,) = sources.captured(seen)
    assert [(x["number"], x["numbers"]) for x in scene.described("x")["layers"]] == [(2, [5, 1]), (5, [4, 3])]
    rows = Answers([scene], patience=None).get("capture/heads").content["rows"]
    assert [(x["layer"], x["head"], x["kv_head"]) for x in rows] == [(0, 0, 2), (0, 1, 0), (1, 0, 2), (1, 1, 1)]
    names = [f"L{layer} H{head}" for layer, head, _ in found]
    assert cli.main(["insight", "--capture", str(path)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in names)
    assert cli.main(["insight", "--capture", str(path), "--csv"]) == 0
    assert [line.split(",")[:4] for line in capsys.readouterr().out.split()[1:]] == [
        ["2", "l2", "5", "2"], ["2", "l2", "1", "0"], ["5", "l5", "4", "2"], ["5", "l5", "3", "1"],
    ]  # fmt: skip
    assert cli.main(["look", "--capture", str(path), "--terminal", "--layer", "5", "--head", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Map of L5 H3" in printed
    captions = [line.split() for line in printed.splitlines() if re.match(r" +H\d", line)]
    assert [[word for word in line if re.fullmatch(r"H\d", word)] for line in captions] == [["H5", "H1"], ["H4", "H3"]]
    assert re.findall(r"^ +(L\d) +[^H ]", printed, re.M) == ["L2", "L5"]
    for wrong, message in (
        (["--layer", "1"], "layer 1 does not exist: this model has layers 2, 5"),
        (["--layer", "2", "--head", "4"], "head 4 does not exist: layer 2 has heads 1, 5"),
        (["--head", "2"], "head 2 does not exist: this model has heads 1, 3, 4, 5"),
    ):
        assert cli.main(["look", "--capture", str(path), "--terminal", *wrong]) == 2
        assert message in capsys.readouterr().err
    data = summary.look_data(scene)
    assert data.choose(head=4) == data.choose(layer=5, head=4) == summary.Choice(1, 0, 19)
    with np.load(BytesIO(saving.archive(scene))) as archive:
        assert archive["5.heads"].tolist() == [4, 3]
        np.testing.assert_array_equal(archive["2.lse"], seen[0].lse)


def rich() -> regard.Capture:
    """A capture with everything that a file can hold."""
    given = WISHES["arrays"] | {"score": WISHES["rules"]["score"], "query_tokens": "text"}
    layers = [Layer.of("first", Q, K, **given), Layer.of("second", Q, K, causal=True)]
    tokens = {"text": Tokens(np.arange(40).reshape(2, 20), (tuple("abcdefghijklmnopqrst"),) * 2)}
    return regard.Capture(layers, tokens, "a model", {"third": "too large"})


def regions(path: Path) -> dict[str, tuple[int, int]]:
    """Where in a file its parts are: the length, the keys and values of the header, each array."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    metadata = content.index(b"__metadata__"), content.index(b"}", content.index(b'"format"'))
    found = {"length": (0, 8), "metadata": metadata, "entries": (metadata[1], end)}
    for text in (b"crc32", b"00000000", b"regard.capture/2", b"expression", b"dropped"):
        at = content.find(text)
        found |= {text.decode(): (at, at + len(text))} if at > 0 else {}
    for name, entry in header.items():
        if name != "__metadata__":
            found[name] = tuple(end + at for at in entry["data_offsets"])
    return found


def test_no_damaged_file_is_read(tmp_path: Path) -> None:
    """Bytes changed in every part of the file, one bit or all, cut off, added, swapped: one error that says so."""
    path = tmp_path / "x"
    rich().save(path)
    regard.Capture.load(path)
    whole = path.read_bytes()
    found = regions(path)
    assert len(found) > 12
    changed: dict[str, bytes] = {}
    for name, (begin, end) in found.items():
        for at in np.unique(np.linspace(begin, end - 1, 9).astype(int)).tolist():
            for byte in (whole[at] ^ 1, whole[at] ^ 128, 255 - whole[at], ord("1")):
                changed[f"{name} at {at}: {byte}"] = whole[:at] + bytes([byte]) + whole[at + 1 :]
    changed = {name: content for name, content in changed.items() if content != whole}
    for length in (0, 1, 7, 8, 9, *np.linspace(10, len(whole) - 1, 40).astype(int).tolist()):
        changed[f"the first {length} bytes"] = whole[:length]
    begin, end = found["query.0"]
    changed |= {
        "more": whole + b"\0",
        "swapped": whole[:begin] + whole[begin + 8 : begin + 16] + whole[begin : begin + 8] + whole[begin + 16 :],
        "no checksum": whole.replace(b"crc32", b"crc33", 1),
        "before": whole.replace(b"regard.capture/2", b"regard.capture/1", 1),
        "the key as the query": whole.replace(b'\\"query\\": \\"query.0', b'\\"query\\": \\"lse.0', 1),
    }
    for name, content in changed.items():
        assert content != whole, name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x is (damaged: |not a whole safetensors file: )"):
            pytest.fail(f"{name} is read as {regard.Capture.load(path)}")


def test_a_file_without_a_checksum_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "x"
    rich().save(path)
    arrays, metadata = arrayfile.read(path)
    old = {"format": "regard.capture/1", "capture": metadata["capture"]}
    safetensors.numpy.save_file({name: np.array(x) for name, x in arrays.items()}, path, old)
    assert repr(regard.Capture.load(path)) == repr(rich())


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"__metadata__":null}', b'{"__metadata__":{"crc32":"sha"}}'])
def test_foreign_files_are_no_captures(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ValueError, match=r"x is (not a whole|a safetensors file, but not a capture|damaged)"):
        regard.Capture.load(tmp_path / "x")


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="dropout is not an option that a layer keeps; those are mask, causal, score"):
        Layer.of("x", Q, K, dropout=0.1)
    with pytest.raises(ValueError, match=r"query and key of a layer have at most \(b, h, n, d\), got"):
        Layer.of("x", Q[None], K)
    with pytest.raises(ValueError, match="tokens must be one for each query, 20, got 2"):
        regard.Capture.of_arrays(Q, K, tokens=["a", "b"])
    layer = Layer.of("x", Q, K)
    with pytest.raises(IndexError, match="head 6 does not exist: there are 6"):
        layer.weights(6)
    with pytest.raises(KeyError, match="no layer 'y'; layers: \\['x'\\]"):
        regard.Capture([layer])["y"]
