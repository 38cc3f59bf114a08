"""Blocks of pages run in forks of Sphinx, which has the packages loaded, instead of a new kernel for each page.

A kernel takes 2 s of processor time to start, and 5 s where it imports PyTorch. Elsewhere than on Linux kernels run.
A page that needs a package which is missing has the stored outputs of `outputs.py`. Then `claims.py` checks sentences.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
from base64 import b64encode
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import Any, NoReturn

import myst_nb.sphinx_
import nbformat
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from myst_nb.core.execute.base import ExecutionError, NotebookClientBase
from nbformat.v4 import new_output
from traitlets.config import Config

from extensions import claims, figures
from extensions import outputs as store

OUTPUTS: list[Any] = []
"""What the block that runs has given so far."""


def rich(kind: str, data: Any, metadata: Any, **more: Any) -> Any:
    text = {name: b64encode(x).decode() if isinstance(x, bytes) else x for name, x in data.items()}
    return new_output(kind, text, metadata=metadata or {}, **more)


class Publisher(DisplayPublisher):
    """What `display` gives."""

    def publish(self, data: Any, metadata: Any = None, **options: Any) -> None:
        OUTPUTS.append(rich("display_data", data, metadata))


class Results(DisplayHook):
    """The value of a block's last line."""

    def start_displayhook(self) -> None: ...
    def write_output_prompt(self) -> None: ...
    def finish_displayhook(self) -> None: ...

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        OUTPUTS.append(rich("execute_result", format_dict, md_dict, execution_count=self.shell.execution_count))


@dataclass
class Run:
    """Outputs of blocks, values of expressions after them, and the traceback of the block that failed."""

    outputs: list[list[Any]]
    values: claims.Values
    failure: str | None = None


def executed(blocks: list[str], codes: list[str]) -> Run:
    """Run blocks in order, then evaluate expressions."""
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    InteractiveShell.display_pub_class, InteractiveShell.displayhook_class = Publisher, Results
    shell, found = InteractiveShell.instance(config=config), []
    for block in blocks:
        OUTPUTS.clear()
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            result = shell.run_cell(block, store_history=True)
        streams = [new_output("stream", name=n, text=x.getvalue()) for n, x in (("stdout", out), ("stderr", err))]
        found.append([x for x in streams if x.text] + OUTPUTS)
        if not result.success:
            return Run(found, {}, f"{block}\n\n{out.getvalue()}\n{err.getvalue()}")
    return Run(found, claims.evaluated(codes, blocks, shell.user_ns))


def child(blocks: list[str], codes: list[str], pipe: int, seconds: int) -> NoReturn:
    try:
        signal.alarm(seconds)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            answer = pickle.dumps(executed(blocks, codes))
            os.chdir("/")
        with os.fdopen(pipe, "wb") as file:
            file.write(answer)
        os._exit(0)
    finally:
        os._exit(1)


def run(blocks: list[str], codes: list[str], seconds: int) -> Run:
    """Run blocks and expressions as `executed` does, in a process of their own and a folder that is then removed."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (process := os.fork()):
        os.close(reading)
        child(blocks, codes, writing, seconds)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(process, 0)
    if status:
        return Run([], {}, f"the process that ran the blocks ended with status {status}, after at most {seconds} s")
    return pickle.loads(answer)


class ForkedClient(NotebookClientBase):
    """Runs a page, or takes its stored outputs where a package is missing."""

    outputs: store.Outputs

    def start_client(self) -> None:
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "code"]
        blocks = [cell.source for cell in cells]
        prose = "\n\n".join(cell.source for cell in self.notebook.cells if cell.cell_type == "markdown")
        stated = claims.claims(prose)
        start = time.perf_counter()
        if packages := store.missing(blocks):
            outputs, values = store.stored(blocks), store.values(blocks)
            if outputs is None:
                raise ExecutionError(f"{self.path} needs {', '.join(packages)}, or outputs in docs/outputs.json")
        else:
            done = run(blocks, [x.code for x in stated], self.nb_config.execution_timeout)
            if done.failure is not None:
                raise ExecutionError(f"{self.path}: {done.failure}")
            outputs, values = done.outputs, done.values
            self.check_figures(cells, outputs)
            volatile = [store.VOLATILE in cell.metadata.get("tags", []) for cell in cells]
            self.outputs.check(self.path, blocks, outputs, volatile, values)
        if false := claims.failures(stated, values):
            raise ExecutionError("\n".join([f"{self.path}:", *false]))
        for number, (cell, given) in enumerate(zip(cells, outputs, strict=True), 1):
            cell.outputs, cell.execution_count = [nbformat.from_dict(x) for x in given], number
        self.notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
        self.exec_metadata = {
            "mtime": time.time(), "runtime": time.perf_counter() - start, "method": "fork", "succeeded": True,
            "error": None, "traceback": None, "missing": packages,
        }  # fmt: skip

    def check_figures(self, cells: list[Any], outputs: list[list[Any]]) -> None:
        """Compare the figures of the page that are committed, and take them out of its outputs."""
        for cell, given in zip(cells, outputs, strict=True):
            if name := cell.metadata.get("figure"):
                try:
                    figures.check(self.path.parent / name, given, self.outputs.writes)
                except ValueError as error:
                    raise ExecutionError(f"{self.path}: {error}") from None
                given.clear()


def client(notebook: Any, source: str, config: Any, logger: Any, *_: Any) -> NotebookClientBase:
    kind = ForkedClient if config.execution_mode == "force" else NotebookClientBase
    return kind(notebook, source, config, logger)


def say_stored(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Say below the title of a page that its outputs are stored ones."""
    if packages := app.env.nb_metadata.get(page, {}).get("exec_data", {}).get("missing"):
        said = f"Its outputs are stored ones: this site was built without {' and '.join(packages)}."
        context["body"] = context["body"].replace("</h1>", f'</h1>\n<p class="stored">{said}</p>', 1)


def begin(app: Any) -> None:
    ForkedClient.outputs = store.Outputs(app)
    app.connect("env-updated", ForkedClient.outputs.collect)


def setup(app: Any) -> dict[str, Any]:
    if sys.platform == "linux":
        if find_spec("torch") is not None:
            import regard.torch  # noqa: F401  for all pages, and the reference

        myst_nb.sphinx_.create_client = client
        app.connect("builder-inited", begin)
        app.connect("html-page-context", say_stored)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
