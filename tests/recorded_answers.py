"""Every answer of the page's routes, byte for byte: `python tests/recorded_answers.py FILE` records or compares them.

A recording is made on one machine, before a change, and compared on it after.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

import regard
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.layers import Layer
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.sources import Settings, arrays, captured, example, for_page
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.notebook import answered
from regard.viewer.serve.server import application

HOME = "http://127.0.0.1:4000"
OF_SCENE = (
    "heads", "finding", "tour", "tokens", "tokens?axis=query&start=1&stop=3", "tokens?axis=x", "tokens?start=x", "page",
    "ablations", "ablations?how=mean", "ablations?how=x", "token/0", "token/3", "token/9999",
)  # fmt: skip
OF_LAYER = ("claims/{0}", "thumbs/{0}", "thumbs/{0}?size=16&kind=max", "thumbs/{0}?size=1000", "thumbs/{0}?kind=sum")
OF_HEAD = (
    "map/{0}/{1}", "tile/{0}/{1}/0/0/0", "tile/{0}/{1}/1/1/0?kind=max", "tile/{0}/{1}/2/2/1?kind=mass",
    "tile/{0}/{1}/0/0/0?kind=x", "tile/{0}/{1}/9/0/0", "values/{0}/{1}?rows=1:4&cols=0:3", "values/{0}/{1}",
    "values/{0}/{1}?rows=3:3", "row/{0}/{1}/2", "row/{0}/{1}/99999", "column/{0}/{1}/2", "column/{0}/{1}/99999",
    "stored/{0}/{1}", "profiles/{0}/{1}", "step/{0}/{1}/3/2", "step/{0}/{1}/1/4", "matrices/{0}/{1}",
    "scores/{0}/{1}/3", "dots/{0}/{1}?rows=1:4&cols=0:3", "earlier/{0}/{1}/3/2",
    "dots/{0}/{1}", "variance/{0}/{1}", "norms/{0}/{1}",
    "ablation/{0}/{1}", "ablation/{0}/{1}?i=2&how=mean", "ablation/{0}/{1}?i=x", "row/{0}/{1}/2?b=1", "map/{0}/{1}?b=9",
)  # fmt: skip
ELSEWHERE = ("scenes", "words", "nothing", "other/heads", "example/map/9/0", "example/map/0/99", "example-7/heads")
BODIES: tuple[tuple[str, Any], ...] = (
    ("example", {"text": "hello hello", "temperature": 2, "scaled": False, "causal": False}),
    ("example", {"text": "hello", "replaces": "", "keeps": ""}),
    ("example", {"text": "hello h", "replaces": "example-3", "keeps": "example-2"}),
    ("example", {"text": "hello h"}),
    ("example", {"text": ""}), ("example", {"temperature": 0}), ("example", {"causal": 1}), ("example", {"speed": 1}),
    ("example", []), ("example", {"text": "a", "replaces": 3}), ("arrays", {}), ("cross", {}), ("other", {}),
)  # fmt: skip


def scenes() -> tuple[Scene, ...]:
    """Self-attention and cross-attention of texts and arrays, with rules, sinks, batches and levels."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((4, 300, 8)), rng.standard_normal((2, 500, 8)), rng.standard_normal((2, 500, 3))
    x, y = rng.standard_normal((2, 2, 3, 40, 8))
    rules = regard.window(100, 5) & regard.documents(np.arange(500) // 90)
    some = {"mask": rng.random((4, 300, 500)) < 0.7, "bias": rng.standard_normal((4, 1, 500))}
    seen = Capture.of_arrays(x, y, tokens=[f"t{n % 7}" for n in range(40)], causal=True, model="made up")
    seen.layers.append(Layer.of("cross", x, y[:, :, :25], mask=regard.window(3, 3), cross=True))
    return (
        *for_page([example(Settings("to be or not to be"))]),
        arrays(q, k, v, causal=True, sink=rng.standard_normal(4), scale=0.7),
        arrays(q, k, mask=rules, score=[regard.softcap(3.0), regard.alibi(rng.random(4))]),
        arrays(q, k, v, **some, sink=rng.standard_normal(4)),
        arrays(x, y, y, tokens=list("abcdefgh" * 5), mask=regard.mask(lambda b, h, i, j: (i % 3 != 0) & (j < i))),
        arrays(*rng.standard_normal((3, 1, 2200, 4)).astype(np.float32), causal=True),
        *captured(seen),
    )


def paths(answers: Answers) -> Iterator[str]:
    """Every route, with and without parameters, about two heads of each scene."""
    yield from ELSEWHERE
    for name, scene in answers.scenes.items():
        yield from (f"{name}/{what}" for what in OF_SCENE)
        for layer in {0, len(scene.layers) - 1}:
            yield from (f"{name}/{what.format(layer)}" for what in OF_LAYER)
            for head in {0, scene.layers[layer].heads - 1}:
                yield from (f"{name}/{what.format(layer, head)}" for what in OF_HEAD)


def told(status: int, headers: Any, content: bytes) -> list[Any]:
    names = "content-type", "x-regard-exact", "x-regard-type"
    digest = hashlib.sha256(content).hexdigest()
    return [status, {name: headers[name] for name in names if name in headers}, len(content), digest]


def recorded() -> dict[str, list[Any]]:
    """The answers over HTTP and to a notebook, by what was asked."""
    answers = Answers(scenes(), patience=None)
    client = TestClient(application(answers, "secret", 4000), base_url=HOME)
    found = {}

    def ask(path: str, body: Any = None) -> None:
        name = path if body is None else f"{path} {json.dumps(body)}"
        over = {"GET": client.get, "POST": lambda url: client.post(url, json=body)}
        method = "GET" if body is None else "POST"
        answer = over[method](f"/secret/api/{path}")
        found[f"http {name}"] = told(answer.status_code, answer.headers, answer.content)
        content, buffers = answered(answers, {"id": 1, "path": f"api/{path}", "method": method, "body": body})
        found[f"notebook {name}"] = told(0, {}, b"\n".join([json.dumps(content).encode(), *buffers]))

    for path in paths(answers):
        ask(path)
    for scene, body in BODIES:
        ask(f"{scene}/run", body)
    for path in paths(answers):
        if path.startswith("example-"):
            ask(path)
    ask("scenes")
    return found


def main(file: Path) -> int:
    found = recorded()
    if not file.exists():
        file.write_text(json.dumps(found, indent=0), "utf-8")
        print(len(found), "answers recorded")
        return 0
    before = json.loads(file.read_text("utf-8"))
    other = [name for name in before | found if before.get(name) != found.get(name)]
    for name in other:
        print(name, before.get(name), found.get(name), sep="\n    ")
    print(len(before), "answers,", len(other), "differ")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
