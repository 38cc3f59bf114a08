"""`regard.look` in a running JupyterLab: no server of ours, nothing from elsewhere, a notebook that stays usable.

JupyterLab is too large to be a dependency of tests; where it is not installed this is skipped (see CONTRIBUTING.md).
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import regard
from in_browser import READY, Tab

pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: pip install jupyterlab")
pytest.importorskip("anywidget", reason="anywidget is not installed: pip install 'regard[notebook]'")

ARRAYS = """
import numpy as np
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 1000, 16)).astype(np.float32)
"""
CELLS = (
    # Whatever a kernel asks of another machine is an error of its cell, and of the page's.
    """
import socket
connect = socket.socket.connect
def home(self, address):
    assert not isinstance(address, tuple) or address[0] in ("127.0.0.1", "localhost", "::1"), address
    return connect(self, address)
socket.socket.connect = home
""",
    ARRAYS + "import regard\nregard.look(q, k, v, causal=True)",
    "regard.look(text='One two three. One two three.')",
)
SPAN_S = 60


@pytest.fixture(scope="module")
def lab(needed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a notebook in a JupyterLab of its own."""
    root = tmp_path_factory.mktemp("lab")
    cells = [
        {"cell_type": "code", "id": f"c{n}", "metadata": {}, "source": cell, "outputs": [], "execution_count": None}
        for n, cell in enumerate(CELLS)
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (root / "look.ipynb").write_text(json.dumps(book), "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    places += ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    log = (root / "log").open("w")
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1",
            f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=secret",
            f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None",
        ],
        env=os.environ | {name: str(root / "own" / name) for name in places}, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        for _ in range(10 * SPAN_S):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, (root / "log").read_text()
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/lab/tree/look.ipynb?token=secret"
    finally:
        server.terminate()
        server.wait(30)
        log.close()


KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"


class Notebook:
    """A notebook that is open in a tab."""

    def __init__(self, tab: Tab, address: str):
        self.page = tab.page
        self.page.set_default_timeout(1000 * SPAN_S)
        self.page.goto(address)
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel")
        self.kernel("idle")

    def kernel(self, status: str) -> None:
        """Wait until the kernel is so."""
        self.page.wait_for_function(f"status => {KERNEL}.status === status", arg=status)

    def do(self, command: str, **arguments: Any) -> None:
        """Run one of Jupyter's commands."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [command, arguments])

    def of(self, expression: str) -> Any:
        """Something of the notebook."""
        return self.page.evaluate(f"window.jupyterapp.shell.currentWidget.content.{expression}")


def shown(widget: Any) -> np.float32:
    output = widget.locator(".readout output")
    output.wait_for()
    return np.float32(output.get_attribute("data-weight"))


@pytest.mark.parametrize("tab", [{"viewport": {"width": 1280, "height": 900}}], indirect=True)
def test_look_in_jupyter(tab: Tab, lab: str) -> None:
    tab.origins += (lab.split("/lab/")[0] + "/", "ws:" + lab.split("/lab/")[0].removeprefix("http:") + "/")
    tab.expected = ("to activate", "Connection lost")  # Jupyter's own
    book = Notebook(tab, lab)
    page = book.page
    book.do("notebook:run-all-cells")
    widget, other = page.locator(".regard.cell").first, page.locator(".regard.cell").nth(1)
    widget.locator(READY["overview"].removeprefix(".overview ")).first.wait_for()
    other.locator(".gridhead").first.wait_for()  # pictures come when they are in sight
    assert not any("/thumbs/" in url or "/heads" in url for url in tab.asked)  # all by the notebook's own connection
    assert page.locator(".jp-RenderedText[data-mime-type='application/vnd.jupyter.error']").count() == 0

    called: dict[str, Any] = {}
    exec(ARRAYS, called)
    weights = regard.weights(called["q"], called["k"], causal=True)
    for view, sign in READY.items():
        widget.locator(f"nav [data-view={view}]").click()
        widget.locator(sign if view != "ablation" else ".ablation .empty:not(:empty)").first.wait_for()  # no model
        assert widget.locator(".banner").is_hidden()
    widget.locator("nav [data-view=map]").click()
    head = int(widget.locator("header select").nth(2).input_value())
    np.testing.assert_allclose(shown(widget), weights[head, 999].max(), rtol=1e-6)  # of another engine

    # Weights are computed in the page, also while the kernel runs a cell.
    page.evaluate(f"() => void {KERNEL}.requestExecute({{ code: 'import time; time.sleep(60)' }})")
    book.kernel("busy")
    start = widget.locator(".readout").inner_text()
    widget.locator(".stage").focus()
    page.keyboard.press("Shift+ArrowUp")
    page.wait_for_function("start => document.querySelector('.readout').innerText !== start", arg=start)
    assert page.evaluate(f"{KERNEL}.status") == "busy"
    page.evaluate(f"() => void {KERNEL}.interrupt()")
    book.kernel("idle")

    # Keys that are typed in the map are the map's, and none is the notebook's, whose commands they are.
    widget.locator(".stage").click(position={"x": 300, "y": 200})
    cells, active = book.of("widgets.length"), book.of("activeCellIndex")
    start = widget.locator(".readout").inner_text()
    for key in ("ArrowUp", "ArrowRight", "Enter", "d", "d", "x", "b", "m", "0", "0", "y"):
        page.keyboard.press(key)
    page.wait_for_function("start => document.querySelector('.readout').innerText !== start", arg=start)
    assert (book.of("widgets.length"), book.of("activeCellIndex"), book.of("mode")) == (cells, active, "command")
    page.keyboard.press("[" if head else "]")
    page.wait_for_function(
        "to => document.querySelector('.regard').querySelectorAll('header select')[2].value === to",
        arg=str(head - 1 if head else 1),
    )
    assert other.locator("nav [aria-current]").get_attribute("data-view") == "overview"  # each has a state of its own

    # The wheel scrolls the notebook, until a map is clicked.
    scrolled = "() => document.querySelector('.jp-WindowedPanel-outer').scrollTop"
    page.locator(".jp-CodeCell .jp-InputArea").nth(1).click()
    widget.locator(".stage").hover(position={"x": 300, "y": 200})
    before = page.evaluate(scrolled)
    page.mouse.wheel(0, 60)
    page.wait_for_function(f"before => ({scrolled})() > before", arg=before)
    widget.locator(".stage").click(position={"x": 300, "y": 200})
    before, levels = page.evaluate(scrolled), widget.locator(".legend").inner_text()
    for _ in range(4):
        page.mouse.wheel(0, -120)
        page.wait_for_timeout(100)
    page.wait_for_function("levels => document.querySelector('.legend').innerText !== levels", arg=levels)
    assert page.evaluate(scrolled) == before

    book.do("apputils:change-theme", theme="JupyterLab Dark")
    page.wait_for_function("() => [...document.querySelectorAll('.regard')].every(e => e.dataset.theme === 'dark')")
    book.do("apputils:change-theme", theme="JupyterLab Light")
    page.wait_for_function("() => [...document.querySelectorAll('.regard')].every(e => e.dataset.theme === 'light')")

    # Where a cell runs again there is one page, at its start.
    page.evaluate("() => (window.jupyterapp.shell.currentWidget.content.activeCellIndex = 1)")
    book.do("notebook:run-cell")
    page.wait_for_selector(".regard.cell nav [aria-current][data-view=overview]")
    widget.locator(".gridhead canvas").first.wait_for()
    assert page.locator(".regard.cell").count() == 2

    # A page whose kernel is gone says so; its cell makes it anew.
    page.evaluate(f"() => void {KERNEL}.restart()")
    page.wait_for_timeout(3000)
    book.kernel("idle")
    widget.locator("nav [data-view=profiles]").click()
    widget.locator(".banner, .working").filter(has_text="kernel").first.wait_for()
    book.do("notebook:run-all-cells")
    widget.locator(".gridhead canvas").first.wait_for()
    widget.locator("nav [data-view=map]").click()
    head = int(widget.locator("header select").nth(2).input_value())
    np.testing.assert_allclose(shown(widget), weights[head, 999].max(), rtol=1e-6)  # of another engine
