"""A saved page holds what it shows; from it, weights are computed as they are."""

import io
import json
import re
import zlib
from base64 import b64decode, b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard import cli
from regard.examplemodel import ExampleModel
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.layers import Layer as CapturedLayer
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve import contents, packed
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.codecs import rounded
from regard.viewer.serve.export import inside
from regard.viewer.serve.saving import archive, single

RNG = np.random.default_rng(2)
Q, K, V = RNG.standard_normal((3, 2, 300, 8)).astype(np.float32)


class Reader(HTMLParser):
    """Elements with their attributes and their text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, Any], list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, dict(attributes), []))

    def handle_data(self, data: str) -> None:
        if self.elements:
            self.elements[-1][2].append(data)

    def text(self, tag: str, **wanted: str) -> str:
        (found,) = (t for name, a, t in self.elements if name == tag and wanted.items() <= a.items())
        return "".join(found)


def embedded(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Reader(text).text("script", id="regard-data"))
    return found | {"answers": json.loads(zlib.decompress(b64decode(found["answers"])))}


def exported(scene: Scene, **options: Any) -> dict[str, Any]:
    answers = Answers([scene], patience=None)
    return embedded(answers.page(next(iter(answers.scenes)), **options))


def numbers(content: dict[str, str]) -> np.ndarray:
    ((kind, text),) = content.items()
    return np.frombuffer(b64decode(text), {"f16": "<f2", "f32": "<f4"}[kind])


@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"causal": True, "offset": 3, "scale": 0.4}, {"causal": True, "sink": np.ones(2)}]
)
def test_weights_follow_from_what_is_embedded(options: dict[str, Any]) -> None:
    q = Q[:, :250] if "offset" in options else Q
    data = exported(arrays(q, K, V, **options))
    weights = regard.weights(q, K, **options)
    for head in range(2):
        kept = data["exact"][f"arrays/0/{head}"]
        n_q, n_k, d = kept["n_q"], kept["n_k"], kept["d"]
        x, k = (np.frombuffer(b64decode(kept[name]), "<f4").reshape(n, d) for name, n in (("q", n_q), ("k", n_k)))
        v = np.frombuffer(b64decode(kept["v"]), "<f4").reshape(n_k, kept["d_v"])
        lse = np.frombuffer(b64decode(kept["lse"]), "<f4")
        P = np.exp(kept["scale"] * (x @ k.T) - lse[:, None])
        if kept["causal"]:
            P[np.arange(n_k) > np.arange(n_q)[:, None] + kept["offset"]] = 0
        np.testing.assert_allclose(P, weights[head], atol=1e-6)
        np.testing.assert_array_equal(v, V[head])


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": RNG.random((300, 300)) < 0.8}])
def test_a_file_holds_the_weights_on_a_learned_sink(options: dict[str, Any]) -> None:
    data = exported(arrays(Q, K, V, sink=np.ones(2), **options))["answers"]
    P = regard.weights(Q, K, sink=np.ones(2), **options)
    np.testing.assert_allclose(numbers(data["api/arrays/sinks/0/1"]), 1 - P[1].sum(-1), atol=2e-6)
    assert "api/arrays/sinks/0/1" not in exported(arrays(Q, K, V, **options))["answers"]


def test_the_coarse_level_and_thumbnails_are_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "ON_PAGE", 256)
    scene = arrays(Q, K, V, causal=True)
    data, answers = exported(scene)["answers"], Answers([scene], patience=None)
    assert (
        numbers(data["api/arrays/tile/0/1/0/0/0?kind=max"]).tobytes()
        == answers.get("arrays/tile/0/1/0/0/0", {"kind": "max"}).content.tobytes()
    )  # type: ignore[union-attr]
    assert "api/arrays/tile/0/1/1/0/0?kind=max" not in data  # exact: computed in the page
    assert numbers(data["api/arrays/thumbs/0?size=64&kind=mass"]).size == 2 * 64 * 64
    for path in ("scenes", "arrays/heads", "arrays/map/0/1", "arrays/profiles/0/0"):
        assert data[f"api/{path}"].keys() == answers.get(path).content.keys()  # type: ignore[union-attr]
    assert data["api/arrays/heads"] == rounded(answers.get("arrays/heads").content)


@pytest.mark.parametrize(
    ("n_q", "n_k", "embedded"), [(31, 31, False), (64, 64, False), (64, 65, True), (1, 5000, True)]
)
def test_no_thumbnail_is_larger_than_its_map(n_q: int, n_k: int, embedded: bool) -> None:
    q, k = RNG.standard_normal((2, n_q, 8)), RNG.standard_normal((2, n_k, 8))
    for options in ({}, {"mask": RNG.random((n_q, n_k)) < 0.8}):  # computed in the page, and held as tiles
        answers = exported(arrays(q, k, **options))["answers"]
        assert [path for path in answers if "/thumbs/" in path] == [
            f"api/arrays/thumbs/0?size=64&kind={kind}" for kind in ("mass", "max") if embedded
        ]


def test_what_the_page_computes_is_not_embedded() -> None:
    """Half of a megabyte for 1,500 tokens of two heads, where coarse tiles took 8 MB."""
    q, k = RNG.standard_normal((2, 2, 1500, 8)).astype(np.float32)
    data = exported(arrays(q, k, causal=True))
    assert not [path for path in data["answers"] if "/tile/" in path]
    assert len(json.dumps(data)) < 1e6
    dense = np.abs(np.arange(300)[:, None] - np.arange(300)) < 40
    tiles = [path for path in exported(arrays(Q, K, V, mask=dense))["answers"] if "/tile/" in path]
    assert sorted(tiles) == [
        f"api/arrays/tile/0/{h}/1/{x}/{y}?kind=mass" for h in (0, 1) for x in (0, 1) for y in (0, 1)
    ]


def test_layers_with_arrays_of_all_pairs_have_all_their_tiles() -> None:
    dense = np.abs(np.arange(300)[:, None] - np.arange(300)) < 40
    data = exported(arrays(Q, K, V, mask=dense))
    assert (data["exact"], data["modules"]) == ({}, [])
    tile = numbers(data["answers"]["api/arrays/tile/0/1/1/1/0?kind=mass"]).reshape(256, 44)
    np.testing.assert_allclose(
        np.nan_to_num(tile), regard.weights(Q, K, mask=dense)[1, :256, 256:], rtol=1e-3, atol=1e-7
    )


def test_layers_with_rules_have_a_module() -> None:
    data = exported(arrays(Q, K, V, mask=regard.window(40, 10), score=regard.alibi([0.5, 0.1])))
    assert [kept["module"] for kept in data["exact"].values()] == [0, 0]
    assert [(kept["ruled"], kept["b"], kept["h"]) for kept in data["exact"].values()] == [(True, 0, 0), (True, 0, 1)]
    rules = {(kept["mask"], kept["score"]) for kept in data["exact"].values()}
    assert rules == {("window(40, 10)", "alibi(array of shape (2,))")}
    (module,) = map(b64decode, data["modules"])
    assert module.startswith(b"\0asm")
    assert not [path for path in data["answers"] if "/tile/" in path]


def test_a_layer_is_asked_for_its_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(contents, "module_of", lambda layer: asked.append(layer))
    scene = arrays(Q, K, V, causal=True)
    exported(scene)
    assert asked == list(scene.layers)


@pytest.mark.filterwarnings("ignore:the engine 'cpu' cannot run here:regard.RegardWarning")
def test_without_a_compiler_rules_have_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.engines.cpu.state", lambda: "llvmlite is missing")
    data = exported(arrays(Q, K, V, mask=regard.window(40, 10)))
    assert (data["exact"], data["modules"]) == ({}, [])
    assert "module" not in exported(arrays(Q, K, V, causal=True))["exact"]["arrays/0/0"]
    policy = Reader(Answers([arrays(Q, K, causal=True)], patience=None).page("arrays")).elements
    assert "wasm" not in str([a["content"] for _, a, _ in policy if a.get("http-equiv")])


def test_a_text_is_embedded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("views", "contents"):
        monkeypatch.setattr(f"regard.viewer.serve.{module}.MOST_TOKENS", 16)
    data = exported(example(Settings("né 🎉\n" * 3)))["answers"]
    pages = [data[f"api/example/tokens?axis=query&start={start}&stop={start + 16}"] for start in (0, 16)]
    assert [page["start"] for page in pages] == [0, 16]
    assert sum(len(page["tokens"]) for page in pages) == pages[0]["total"] == 1 + len("né 🎉\n".encode()) * 3
    assert data["api/scenes"]["scenes"][0]["editable"] is False


def test_without_values_it_is_said_why() -> None:
    kept = exported(arrays(Q, K, causal=True))["exact"]["arrays/0/1"]
    assert "v" not in kept
    assert kept["no_values"] == "no values were given"
    assert exported(arrays(Q, K, V, causal=True))["exact"]["arrays/0/1"]["no_values"] == ""


def test_numbers_are_halved_before_a_file_is_refused() -> None:
    scene = arrays(Q, K, V, causal=True)
    assert exported(scene)["exact"]["arrays/0/0"]["dtype"] == "f32"
    size = contents.SavedLayer(scene.layers[0], None).size(4)
    small = exported(scene, limit=size - 1)["exact"]["arrays/0/0"]
    assert small["dtype"] == "u16"
    assert len(b64decode(small["q"])) == 2 * Q[0].size
    with pytest.raises(ValueError, match=r"at most 0 MiB of numbers; 2 heads over 300 queries and 300 keys"):
        exported(scene, limit=1000)


def held(exact: dict[str, Any], name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a head as a page reads them."""
    head = exact[name]
    keys = exact[head.get("keys_of", name)]
    found = {}
    for x, of in (("q", head), ("k", keys), ("v", keys)):
        if of["dtype"] == "u16":
            codes, scale = np.frombuffer(b64decode(of[x]), "<u2"), np.frombuffer(b64decode(of["scales"][x]), "<f4")
            found[x] = packed.decode(codes.reshape(-1, scale.size // 2), scale.reshape(2, -1))
        else:
            found[x] = np.frombuffer(b64decode(of[x]), "<f4").reshape(-1, of["d_v" if x == "v" else "d"])
    return found


@pytest.mark.parametrize("small", [0, 2**20], ids=["codes", "float32"])
def test_heads_that_share_keys_hold_them_once(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SMALL", small)
    q, (k, v) = RNG.standard_normal((6, 50, 8)), 4 + RNG.standard_normal((2, 2, 70, 8))
    data = exported(arrays(q, k, v))
    exact, dtype = data["exact"], "f32" if small else "u16"
    assert data["format"] == 3
    assert [head.get("keys_of") for head in exact.values()] == [
        None, "arrays/0/0", "arrays/0/0", None, "arrays/0/3", "arrays/0/3",
    ]  # fmt: skip
    for h in range(6):
        head = exact[f"arrays/0/{h}"]
        assert head["dtype"] == dtype
        assert ("k" in head, "v" in head) == (h % 3 == 0,) * 2
        got = held(exact, f"arrays/0/{h}")
        for x, expected in (("q", q[h]), ("k", k[h // 3]), ("v", v[h // 3])):
            step = np.ptp(expected, axis=0).max() / packed.STEPS
            np.testing.assert_allclose(got[x], expected, rtol=1e-6, atol=0.51 * step)
        lse = np.frombuffer(b64decode(head["lse"]), "<f4")
        P = np.exp(head["scale"] * (got["q"] @ got["k"].T) - lse[:, None])
        np.testing.assert_allclose(P, regard.weights(q, k)[h], rtol=packed.TOLERANCE)


def test_keys_that_heads_share_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Any] = []
    encode = packed.encode
    monkeypatch.setattr(packed, "encode", lambda x: (encoded.append(x), encode(x))[1])
    layer = arrays(np.concatenate([Q] * 3), K, V).layers[0]
    assert packed.precise([layer.head(h) for h in range(layer.heads)], layer.problem.group)
    assert len(encoded) == layer.heads + layer.problem.kv_heads


def test_codes_that_would_change_digits_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "SMALL", 0)
    steep, unknown = 3e3 * Q, Q.copy()
    unknown[0, 0, 0] = np.nan
    for q, dtype in ((Q, "u16"), (steep, "f32"), (unknown, "f32")):
        assert exported(arrays(q, K, V, causal=True))["exact"]["arrays/0/0"]["dtype"] == dtype


def test_the_file_needs_nothing_and_runs_nothing_else() -> None:
    answers = Answers([example(Settings("</script><script>alert(1)</script> <!-- \u2028"))], patience=None)
    text = answers.page("example")
    reader = Reader(text)
    assert "alert(1)</script>" not in text
    for _, attributes, _ in reader.elements:
        assert not attributes.keys() & {"src", "srcset", "action"}
        assert attributes.get("href", "data:").startswith("data:")
    (policy,) = (a["content"] for tag, a, _ in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    script = re.search(r'<script type="module">(.*)</script>', text, re.DOTALL)
    assert script is not None
    digest = b64encode(sha256(script[1].encode()).digest()).decode()
    assert directives["script-src"] == f"'sha256-{digest}' 'wasm-unsafe-eval'"
    assert directives["worker-src"] == "blob:"
    assert "connect-src" not in directives  # so none
    tokens = embedded(text)["answers"]["api/example/tokens?axis=key&start=0&stop=4096"]["tokens"]
    assert "".join(tokens[1:10]) == "</script>"


def test_code_cannot_end_its_element() -> None:
    assert inside('a("</script>") + "<!--" + "<b>"', "script") == 'a("\\x3c/script>") + "\\x3c!--" + "<b>"'
    assert inside("a::before { content: '</STYLE>' }", "style") == "a::before { content: '\\3c /STYLE>' }"


def test_files_of_every_kind(tmp_path: Path) -> None:
    paths = [tmp_path / f"x.{ending}" for ending in ("html", "png", "svg", "npz")]
    assert regard.look(Q, K, V, causal=True, tokens=["a", "b", "c"] * 100, save=paths) is None
    contents = [path.read_bytes() for path in paths]
    assert embedded(contents[0].decode())["exact"].keys() == {"arrays/0/0", "arrays/0/1"}
    assert contents[1].startswith(b"\x89PNG")
    assert b"<svg" in contents[2]
    assert b"<dc:date>" not in contents[2]
    with np.load(paths[3]) as found:
        for name, x in (("query", Q), ("key", K), ("value", V)):
            np.testing.assert_array_equal(found[name], x)
        _, seen = regard.attention(Q, K, V, causal=True, observe=["lse"])
        np.testing.assert_allclose(found["lse"], seen.lse, atol=1e-5)
        assert list(found["tokens"][:3]) == ["a", "b", "c"]


def test_a_page_holds_the_model_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.html"
    regard.look(text="abc", save=path, with_model=True)
    data = embedded(path.read_text("utf-8"))
    assert data["answers"]["api/scenes"]["scenes"][0]["editable"] is True
    weights = ExampleModel.from_safetensors(b64decode(data["model"]["weights"]))
    assert weights.parameters == ExampleModel.load().parameters
    with pytest.raises(ValueError, match="with_model goes with a text of that model"):
        regard.look(Q, K, save=path, with_model=True)
    assert cli.main(["look", "--with-model"]) == 2
    assert "--with-model goes with --save" in capsys.readouterr().err


def test_the_archive_of_several_layers() -> None:
    with np.load(io.BytesIO(archive(example(Settings("abc"))))) as found:
        assert {f"{n}.{name}" for n in range(3) for name in ("query", "key", "value", "lse")} <= set(found.files)
        assert found["2.query"].shape == (4, 4, 32)


def test_an_archive_has_the_learned_sink_and_is_read_again(tmp_path: Path) -> None:
    sink = np.array([0.5, -1.0], np.float32)
    (tmp_path / "sunk.npz").write_bytes(archive(arrays(Q[:, :20], K[:, :20], sink=sink)))
    with np.load(tmp_path / "sunk.npz") as found:
        np.testing.assert_array_equal(found["sink"], sink)
    assert cli.main(["look", "--arrays", str(tmp_path / "sunk.npz"), "--terminal"]) == 0
    with np.load(io.BytesIO(archive(arrays(Q, K)))) as found:
        assert "sink" not in found.files


def test_a_file_shows_one_sequence() -> None:
    scene = arrays(Q, K)
    assert single([scene]) is scene
    with pytest.raises(ValueError, match=r"choose one by sequence= or --sequence: 0 arrays; 1 arrays$"):
        single([scene, scene])


def test_one_of_several_sequences_is_chosen_by_its_number_or_name(tmp_path: Path) -> None:
    """An encoder, a decoder, and what the decoder reads of the encoder: on the command line and by `regard.look`."""
    long, short = RNG.standard_normal((2, 1, 2, 30, 8)), RNG.standard_normal((2, 1, 2, 20, 8))
    seen = Capture(
        [
            CapturedLayer.of("encoder.0", *long),
            CapturedLayer.of("decoder.0.self", *short, causal=True),
            CapturedLayer.of("decoder.0.cross", short[0], long[1], cross=True),
        ],
        model="m",
    )
    seen.save(tmp_path / "seen")
    look = ["look", "--capture", str(tmp_path / "seen"), "--save"]
    for name, sequence, lengths in (("a", "1", (20, 20)), ("b", "cross", (20, 30)), ("c", "encoder", (30, 30))):
        path = tmp_path / f"{name}.npz"
        assert cli.main([*look, str(path), "--sequence", sequence]) == 0
        with np.load(path) as found:
            assert (found["query"].shape[2], found["key"].shape[2]) == lengths
        regard.look(seen, sequence=int(sequence) if sequence.isdecimal() else sequence, save=tmp_path / "again.npz")
        assert (tmp_path / "again.npz").read_bytes() == path.read_bytes()
    listed = "0 m, encoder; 1 m, decoder; 2 m, decoder, cross-attention"
    for wrong, message in (
        (None, f"only the page shows several sequences; choose one by sequence= or --sequence: {listed}"),
        (3, f"sequence 3 does not exist: here are {listed}"),
        ("decoder", f"sequence 'decoder' is in the names of several: here are {listed}"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            regard.look(seen, sequence=wrong, save=tmp_path / "x.npz")
