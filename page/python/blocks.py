"""Blocks of a page, run one after another in one set of names, as a notebook runs its cells.

A page's Python imports this module. It needs the standard library alone, so that tests run it too.
"""

import ast
import linecache
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from io import TextIOBase
from pathlib import Path
from time import monotonic
from traceback import TracebackException
from types import CodeType, ModuleType
from typing import Any

MOST = 100_000
"""Characters that a block may print: more would stop the page, not only the block."""

INTERVAL = 0.05
"""Seconds between messages to the page while a block prints."""

Post = Callable[[str, str], object]
"""A message to the page: its kind (text, picture or error) and its content."""


class SVG:
    """A picture, from a file or from its text; the same name as in IPython, which runs these blocks in the build."""

    def __init__(self, data: str | Path) -> None:
        text = str(data)
        self.data = text if text.lstrip().startswith("<") else Path(text).read_text("utf-8")

    def _repr_svg_(self) -> str:
        return self.data


class Printed(TextIOBase):
    """What a block prints, sent in pieces. Raises RuntimeError for more than the page can show."""

    def __init__(self, post: Post) -> None:
        self.post, self.held, self.left, self.sent = post, "", MOST, monotonic()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.held += text[: self.left]
        self.left -= len(text)
        if self.left < 0:
            raise RuntimeError(f"a block may print {MOST:,} characters on a page")
        if monotonic() > self.sent + INTERVAL:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self.held:
            self.post("text", self.held)
        self.held, self.sent = "", monotonic()


class Blocks:
    """The names that the blocks of a page share, and what they say to it."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.files: set[str] = set()
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, name: str, source: str) -> bool:
        """Run a block and show the value of its last expression; return False after an error."""
        self.files.add(name)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        printed, error = Printed(self.post), None
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                statements, last = compiled(name, source)
                exec(statements, self.names)
                if last is not None:
                    self.show(eval(last, self.names))
        except BaseException as raised:
            error = raised
        printed.flush()
        if error is not None:
            self.post("error", described(error, self.files))
        return error is None

    def show(self, value: Any) -> None:
        """Show a value as IPython does: a picture where it has one, else its `repr`, and nothing of None."""
        if value is None:
            return
        picture = getattr(value, "_repr_svg_", None)
        if picture is None:
            print(repr(value))
        else:
            sys.stdout.flush()
            self.post("picture", picture())

    def provide_display(self) -> None:
        """Let `from IPython.display import SVG, display` work where IPython is not."""
        package, module = ModuleType("IPython"), ModuleType("IPython.display")
        vars(module).update(SVG=SVG, display=self.show)
        vars(package).update(display=module)
        sys.modules.update({"IPython": package, "IPython.display": module})


def compiled(name: str, source: str) -> tuple[CodeType, CodeType | None]:
    """Return the code of a block, and that of the expression it ends with, if it does."""
    tree = ast.parse(source, name)
    last = None
    if tree.body and isinstance(expression := tree.body[-1], ast.Expr):
        del tree.body[-1]
        last = compile(ast.Expression(expression.value), name, "eval")
    return compile(tree, name, "exec"), last


def described(error: BaseException, files: Collection[str]) -> str:
    """Return Python's traceback with the frames of these files alone, the blocks."""
    found = TracebackException.from_exception(error)
    shown: TracebackException | None = found
    while shown is not None:
        shown.stack[:] = [frame for frame in shown.stack if frame.filename in files]
        shown = shown.__cause__ or shown.__context__
    return "".join(found.format() if found.stack else found.format_exception_only())
