"""The page over HTTP: to this machine, to the page itself and to who knows the token; with the answers as they are."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from starlette.testclient import TestClient

import regard
from regard.interpret.capture.grids import PatchGrid
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve import built
from regard.viewer.serve.answers import ROUTES, Answers
from regard.viewer.serve.codecs import raw
from regard.viewer.serve.preparing import Preparing
from regard.viewer.serve.routes import Route
from regard.viewer.serve.server import HEADERS, LARGEST_BODY, Viewer, application, bound

RNG = np.random.default_rng(1)
Q, K, V = RNG.standard_normal((3, 2, 300, 8)).astype(np.float32)
HOME = "http://127.0.0.1:4000"
LOOK = "import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    text = example(Settings("to be or not to be"))
    grid = PatchGrid(1, 2, np.array([0, 1]), picture=np.zeros((2, 4, 3), np.uint8))
    made = Answers([arrays(Q, K, V, causal=True), replace(text, grids=(grid,))], patience=None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(answers: Answers) -> TestClient:
    return TestClient(application(answers, "secret", 4000), base_url=HOME)


def test_the_page_is_served(client: TestClient) -> None:
    for name, kind in built.FILES.items():
        for path in [f"/secret/{name}", "/secret/"] if name == "index.html" else [f"/secret/{name}"]:
            found = client.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"].startswith(kind.split(";")[0])
            assert found.text == built.page()[name]
    assert client.get("/secret/other.js").status_code == 404
    assert client.get("/secret/../secret/page.js").status_code in (200, 404)
    assert client.get("/secret/%2e%2e/pyproject.toml").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "arrays/row/0/1/77",
        "arrays/column/0/1/7",
        "arrays/values/0/0?rows=3:9&cols=10:20",
        "arrays/tile/0/1/0/0/0?kind=max",
        "arrays/tile/0/1/1/1/0?kind=mass",
        "arrays/thumbs/0?size=16&kind=mass",
    ],
)
def test_numbers_arrive_as_they_are(client: TestClient, answers: Answers, path: str) -> None:
    bare, _, query = path.partition("?")
    expected = answers.get(bare, dict(part.split("=") for part in query.split("&") if part)).content
    assert isinstance(expected, np.ndarray)
    found = client.get(f"/secret/api/{path}")
    assert found.status_code == 200
    assert found.headers["x-regard-type"] == {2: "f16", 4: "f32"}[expected.itemsize]
    assert found.headers["x-regard-exact"] == "1"
    numbers = np.frombuffer(found.content, f"<f{expected.itemsize}").reshape(expected.shape)
    np.testing.assert_array_equal(numbers, expected)


def test_a_row_is_that_of_regard_weights(client: TestClient) -> None:
    row = np.frombuffer(client.get("/secret/api/arrays/row/0/1/77").content, "<f4")
    np.testing.assert_allclose(np.nan_to_num(row), regard.weights(Q, K, causal=True)[1, 77], atol=1e-7)
    assert np.isnan(row[78:]).all()


@pytest.mark.parametrize(
    "path",
    [
        "scenes",
        "arrays/heads",
        "example/tokens?axis=query",
        "arrays/map/0/0",
        "arrays/profiles/0/0",
        "arrays/step/0/0/9/8",
    ],
)
def test_json_arrives_as_it_is(client: TestClient, answers: Answers, path: str) -> None:
    bare, _, query = path.partition("?")
    found = client.get(f"/secret/api/{path}")
    assert found.status_code == 200
    assert found.json() == answers.get(bare, dict(part.split("=") for part in query.split("&") if part)).content
    assert "NaN" not in found.text
    assert "Infinity" not in found.text


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_every_route_is_the_same_with_and_without_starlette(client: TestClient, answers: Answers, route: Route) -> None:
    path = re.sub(r"\{\w+\}", "0", route.path.replace("{scene}", "example"))
    if route.method == "POST":
        found, expected = client.post(f"/secret/api/{path}", json={"text": "abc"}), answers.post(path, {"text": "abc"})
    else:
        found, expected = client.get(f"/secret/api/{path}"), answers.get(path)
    assert found.status_code == expected.status == 200
    if isinstance(expected.content, dict):
        assert found.json() == expected.content
    else:
        assert found.content == raw(expected.content)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:4000"}, 200),
        ({"host": "127.0.0.1"}, 403),
        ({"host": "127.0.0.1:4001"}, 403),
        ({"host": "attacker.example:4000"}, 403),  # a name of another site that leads here: DNS rebinding
        ({"origin": HOME}, 200),
        ({"origin": "http://localhost:4000"}, 200),
        ({"origin": "http://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "https://127.0.0.1:4000"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_others_are_refused(client: TestClient, headers: dict[str, str], status: int) -> None:
    for path in ("/secret/", "/secret/api/scenes"):
        found = client.get(path, headers=headers)
        assert found.status_code == status
        assert (status == 200) == ("regard" in found.text)
        for name, value in HEADERS.items():
            assert found.headers[name] == value
        assert not [name for name in found.headers if name.startswith("access-control")]
    assert client.post("/secret/api/example/run", json={}, headers=headers).status_code == status


@pytest.mark.parametrize("start", ["", "Secret/", "secret2/", "secre/", "%73ecre/", "é/"])
def test_nobody_gets_in_without_the_token(client: TestClient, start: str) -> None:
    for path in ("", "api/scenes", "page.js"):
        found = client.get(f"/{start}{path}")
        assert (found.status_code, found.text) == (404, "there is nothing here")


def test_the_policy_allows_the_page_alone() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    page = built.page()["index.html"]
    assert not re.findall(r"https?:", page)
    assert page.count("<script") == 1


def test_typing(client: TestClient) -> None:
    found = client.post("/secret/api/example/run", json={"text": "abab"})
    assert found.status_code == 200
    assert client.get(f"/secret/api/{found.json()['scene']['id']}/tokens").json()["tokens"] == ["⊢", *"abab"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "sentence"),
    [
        (b'{"text": ""}', "application/json", 422, "text is empty: give at least one character"),
        (b"{}", "text/plain", 400, "a question with a body must be application/json"),
        (b"\xff", "application/json", 400, "a question must be UTF-8"),
        (b"{", "application/json", 400, "Expecting property name"),
        (b" " * (LARGEST_BODY + 1), "application/json", 400, f"a question may have {LARGEST_BODY} bytes at most"),
        (b"null", "application/json", 422, "settings must be a JSON object with text, temperature, scaled, causal"),
        (b"[" * 100_000, "application/json", 400, "a question must not be nested so deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "application/json", 400, "a question must not be nested so deeply"),
        (b'{"temperature": ' + b"9" * 5000 + b"}", "application/json", 400, "a number must have 18 digits at most"),
        (b'{"text": "\\ud800"}', "application/json", 422, "text must be Unicode: character 0 is half of a surrogate"),
        (b"3", "application/json", 422, "settings must be a JSON object with text, temperature, scaled, causal"),
    ],
)
def test_bodies_that_cannot_be_read(client: TestClient, content: bytes, kind: str, status: int, sentence: str) -> None:
    found = client.post("/secret/api/example/run", content=content, headers={"content-type": kind})
    assert found.status_code == status
    assert found.json()["error"].startswith(sentence)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("arrays/row/0/0/5000", 404),
        ("nothing", 404),
        ("example/run", 404),  # a body is posted
        ("arrays/tile/0/0/0/0/0?kind=x", 422),
        ("arrays/row/0/0/1?b=9", 422),
    ],
)
def test_questions_that_cannot_be_answered(client: TestClient, path: str, status: int) -> None:
    found = client.get(f"/secret/api/{path}")
    assert found.status_code == status
    assert found.json().keys() == {"error"}
    assert client.delete("/secret/api/scenes").status_code == 405
    found = client.post("/secret/api/arrays/heads", json={})
    assert (found.status_code, found.json()) == (404, {"error": "there is no arrays/heads"})


def test_a_port_that_cannot_be_had() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ValueError, match=f"port {port} is in use; give another one, or 0 for any that is free"),
            bound(port),
        ):
            pass
    for port in (-1, 70_000):
        with pytest.raises(ValueError, match=f"port must be from 0 .* to 65535, got {port}"), bound(port):
            pass


def test_a_viewer_serves_until_it_is_closed() -> None:
    viewer = Viewer(Answers([arrays(Q, K)]))
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", viewer.url)
    ready = threading.Event()
    serving = threading.Thread(target=viewer.run, args=(ready.set,))
    serving.start()
    assert ready.wait(10)
    with urllib.request.urlopen(f"{viewer.url}api/scenes") as found:
        assert json.load(found)["scenes"][0]["id"] == "arrays"
    viewer.close()
    serving.join(10)
    assert not serving.is_alive()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(viewer.url)


def test_the_command_serves_and_ends_when_it_is_interrupted() -> None:
    command = [sys.executable, "-c", LOOK, "look", "abab", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("regard look: ").strip()
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        with urllib.request.urlopen(f"{url}api/example/tokens") as found:
            assert json.load(found)["tokens"] == ["⊢", *"abab"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")


MODEL = """
import sys
from regard.cli import main
from regard.interpret import inputs
from regard.runtime.progress import Stage

def running(name, progress, dtype=None):
    progress(Stage("layer", 3, 9, 11.7))
    if sys.stdin.readline() == "fail\\n":
        raise ValueError("it has no layers")
    while True:
        sum(range(10**6))

inputs.require_local = lambda name: None
inputs.running = running
sys.exit(main(["look", "--model", "m", "--text", "abab", "--no-open"]))
"""
"""The command with a model that reports a layer, then fails or computes for ever."""


def asked(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url) as found:
            return found.status, json.load(found)
    except HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def model_running(word: str, first: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command up to its first layer, then tell its model this word; yield the process and the address.

    first: a statement that the process runs before the command.
    """
    piped, command = subprocess.PIPE, [sys.executable, "-c", f"{first}\n{MODEL}"]
    with subprocess.Popen(command, stdin=piped, stdout=piped, stderr=piped, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().removeprefix("regard look: ").strip()
        assert process.stderr.readline() == "layer 3 of 9, 12 s left\n"
        stage = {"stage": "layer 3 of 9, 12 s left", "done": 3, "total": 9, "left": 11.7, "progress": 1 / 3}
        assert asked(f"{url}api/scenes") == (202, stage)
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        yield process, url


@pytest.mark.parametrize("first", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_the_page_is_told_how_far_the_model_is_and_ctrl_c_ends_it(first: str) -> None:
    """Also where SIGINT is ignored at first, as in the background of a script."""
    with model_running("compute", first) as (process, _):
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, "")


def test_a_page_that_is_open_is_told_why_the_model_failed() -> None:
    with model_running("fail") as (process, url):
        while (answer := asked(f"{url}api/scenes"))[0] == 202:
            pass
        assert answer == (500, {"error": "it has no layers"})
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (2, "regard: error: it has no layers\n")


WORDS = """
import sys
from regard.cli import main
from regard.viewer.scene import words
read = words.read
words.read = lambda: (sys.stdin.readline(), read())[1]
sys.exit(main(["look", "--no-open"]))
"""


def test_the_page_opens_while_its_sentences_are_read() -> None:
    piped, command = subprocess.PIPE, [sys.executable, "-c", WORDS]
    with subprocess.Popen(command, stdin=piped, stdout=piped, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("regard look: ").strip()
        while (answer := asked(f"{url}api/scenes"))[1]["stage"] == "starting":
            pass
        assert answer == (202, {"stage": "reading the sentences", "done": 0, "total": 0, "left": None, "progress": 0.0})
        process.stdin.write("\n" * 99)
        process.stdin.flush()
        while (answer := asked(f"{url}api/scenes"))[0] == 202:
            pass
        assert answer[0] == 200
        assert answer[1]["scenes"][0]["kind"] == "words"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_answers_that_were_prepared_are_those_of_the_scenes() -> None:
    scene, ended = example(Settings("to be")), threading.Event()
    preparing = Preparing(lambda tell: Answers([scene], start="#view=map"))
    route = next(route for route in ROUTES if route.path == "scenes")
    assert preparing.along(route, {}, {}).status == 202
    preparing.start(ended.set)
    while not preparing.ready:
        time.sleep(0.01)
    assert preparing.along(route, {}, {}).content == Answers([scene]).get("scenes").content | {"start": "#view=map"}
    assert not ended.is_set()
    preparing.close()


def test_look_serves_at_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    viewer = regard.look(Q, K, V, causal=True)
    try:
        with urllib.request.urlopen(f"{viewer.url}api/arrays/row/0/0/9") as found:
            row = np.frombuffer(found.read(), "<f4")
        np.testing.assert_allclose(np.nan_to_num(row), regard.weights(Q, K, causal=True)[0, 9], atol=1e-7)
        deadline = time.monotonic() + 10
        while not opened and time.monotonic() < deadline:
            time.sleep(0.01)
        assert opened == [viewer.url]
    finally:
        viewer.close()


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (
            ("text",),
            {},
            TypeError,
            "look takes query and key, a regard.Capture, a PyTorch model with tokenizer=",
        ),
        ((), {"text": ""}, ValueError, "text is empty: give at least one character"),
        ((), {"causal": True}, TypeError, r"causal goes with query and key: look\(query, key, ...\)"),
        ((Q,), {"value": V}, TypeError, "value was given without key"),
        ((Q, K), {"text": "a"}, TypeError, "text is for models: name what arrays attend to by tokens="),
        ((Q, K[..., :3]), {}, ValueError, "query and key must have the same number of features"),
        ((regard.Capture(), K), {}, TypeError, "a capture has keys and text of its own"),
        ((regard.Capture(),), {}, ValueError, "the capture holds no layer"),
        ((), {"save": "x.pdf"}, ValueError, "the ending must be .html, .png, .svg or .npz, got .pdf"),
        ((), {"port": 70_000}, ValueError, "port must be from 0"),
    ],
)
def test_look_says_what_is_wrong(given: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        regard.look(*given, **options, block=False, open_browser=False)


def test_where_the_page_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("regard.viewer.serve.built.files", lambda package: tmp_path)
    built.page.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"the page of `regard look` is not built; `pip install \.`"):
        built.page()
    built.page.cache_clear()
