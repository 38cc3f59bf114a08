"""In a notebook the page asks over the notebook's connection, and is told the same."""

import re
import sys
from base64 import b64decode
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import regard
from regard.viewer.looking import in_notebook
from regard.viewer.scene.sources import Settings, arrays, example
from regard.viewer.serve import built
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.notebook import answered, still, widget

RNG = np.random.default_rng(3)
Q, K = RNG.standard_normal((2, 2, 60, 8)).astype(np.float32)


def test_messages_are_answered_as_questions_are() -> None:
    answers = Answers([arrays(Q, K, causal=True), example(Settings("abab"))], patience=None)
    head, buffers = answered(answers, {"id": 7, "path": "api/arrays/row/0/1/5"})
    assert head == {"id": 7, "status": 200, "type": "f32", "exact": True}
    np.testing.assert_allclose(
        np.nan_to_num(np.frombuffer(buffers[0], "<f4")), regard.weights(Q, K, causal=True)[1, 5], atol=1e-7
    )
    head, buffers = answered(answers, {"id": 8, "path": "api/arrays/tile/0/1/0/0/0?kind=max"})
    assert (head["type"], len(buffers[0])) == ("f16", 2 * 60 * 60)
    head, buffers = answered(answers, {"id": 9, "path": "api/example/tokens?axis=query&start=1&stop=3"})
    assert (head["json"]["tokens"], buffers) == (["a", "b"], [])
    head, _ = answered(answers, {"id": 10, "path": "api/example/run", "method": "POST", "body": {"text": "xyx"}})
    assert head["json"]["scene"]["settings"]["text"] == "xyx"
    head, _ = answered(answers, {"id": 11, "path": "api/arrays/row/0/1/500"})
    assert (head["status"], head["json"]) == (404, {"error": "query 500 does not exist: there are 60"})
    head, _ = answered(answers, {"id": 12, "path": f"api/arrays/row/0/1/{'9' * 5000}"})
    assert head["status"] == 404
    head, _ = answered(answers, {"id": 13, "path": "api/example/run", "method": "POST"})
    assert (head["status"], head["json"]["error"][:27]) == (422, "settings must be a JSON obj")
    for wrong in (3, {}, {"path": 1}):
        assert answered(answers, wrong) == (
            {"id": None, "status": 400, "json": {"error": "a question needs a path"}},
            [],
        )


def test_a_widget_holds_the_page_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'regard[notebook]'")
    made = widget(Answers([arrays(Q, K)], patience=None))
    assert made._esm == built.page()["page.js"]
    assert made._css == built.page()["page.css"]
    sent: list[Any] = []
    monkeypatch.setattr(type(made), "send", lambda self, content, buffers=None: sent.append((content, buffers)))
    made._handle_custom_msg({"id": 1, "path": "api/arrays/column/0/0/2"}, [])
    ((head, (buffer,)),) = sent
    assert head["id"] == 1
    np.testing.assert_allclose(np.frombuffer(buffer, "<f4"), regard.weights(Q, K)[0, :, 2], atol=1e-7)
    made._handle_custom_msg({"id": 2, "path": "api/arrays/map/0/0"}, [])
    assert made.answers.results.store.nbytes > 0
    made._handle_custom_msg({"leave": True}, [])  # a cell that ran again or was deleted
    assert (made.answers.results.store.nbytes, len(sent)) == (0, 2)
    made._handle_custom_msg({"id": 3, "path": "api/arrays/map/0/0"}, [])  # shown once more
    assert sent[-1][0]["status"] == 200
    made.close()


def test_without_a_kernel_a_notebook_has_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'regard[notebook]'")
    scene = example(Settings("one two one"))
    published: list[dict[str, str]] = []
    monkeypatch.setattr("regard.viewer.show.drawing.has_png", lambda: False)
    monkeypatch.setattr("IPython.display.publish_display_data", published.append)
    made = widget(Answers([scene], patience=None))
    data, _ = made._repr_mimebundle_()
    # nbconvert takes the widget of an output that has one, and cannot show it offline: the picture is an output before.
    assert data.keys() <= {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert data["application/vnd.jupyter.widget-view+json"]["model_id"] == made.model_id
    (picture,) = published
    assert picture["image/svg+xml"].startswith("<svg")
    assert "attends most to" in picture["image/svg+xml"]
    image = re.fullmatch(
        r'<img data-regard-still="(\w+)" [^>]* src="data:image/svg\+xml;base64,(.*)">', picture["text/html"]
    )
    assert image is not None
    assert (image[1], b64decode(image[2]).decode()) == (made.get_state()["still"], picture["image/svg+xml"])
    made.close()
    if find_spec("matplotlib") is not None:
        monkeypatch.undo()
        assert b64decode(still(scene, "x")["image/png"]).startswith(b"\x89PNG")
    long = np.zeros((1, 4000, 1), np.float32)
    assert still(arrays(long, long), "x") == {}  # a cell does not wait for what takes long


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ZMQInteractiveShell"], True),
        (["ZMQInteractiveShell", "Shell"], True),  # Colab's
        (["TerminalInteractiveShell"], False),
        (["ZMQInteractiveShell", "SpyderShell"], False),
    ],
)
def test_look_returns_a_widget_in_a_notebook(names: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: type = object
    for name in names:
        kind = type(name, (kind,), {})
    python = type("IPython", (), {"get_ipython": staticmethod(kind)})
    monkeypatch.setitem(sys.modules, "IPython", python)
    assert in_notebook() is expected
    if expected:
        pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'regard[notebook]'")
        made = regard.look(Q, K)
        assert type(made).__name__ == "Page"
        assert list(made.answers.scenes) == ["arrays"]
        made.close()


def test_without_anywidget_it_says_what_to_install_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.setattr("regard.viewer.looking.in_notebook", lambda: True)
    monkeypatch.setattr("regard.viewer.looking.scenes_of", lambda *args, **options: pytest.fail("it has begun"))
    message = r"^look in a notebook needs anywidget, which is missing: pip install 'regard\[notebook\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        regard.look(Q, K)


def test_results_as_the_last_line_of_a_cell() -> None:
    class Printer:
        def __init__(self) -> None:
            self.printed = ""

        def text(self, more: str) -> None:
            self.printed += more

    def shown(x: Any) -> str:
        printer = Printer()
        x._repr_pretty_(printer, False)
        return printer.printed

    for table in (regard.plan(n=100, d=16), regard.steps(Q[:1, :3], K[:1, :3], K[:1, :3])):
        assert shown(table) == str(table)
        assert "\n" in str(table)
    head = regard.insight.measure_heads(Q, K, causal=True)[1]
    assert shown(head).startswith(f"layer 0, head 1: previous token {head.previous:.2f}, ")
    assert shown(head).endswith(f"; entropy {head.entropy:.2f}")
