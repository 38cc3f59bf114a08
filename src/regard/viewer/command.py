"""`regard look`: from the command line to scenes, and from those to the page, the terminal or files."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rich.console import Console

from regard import reading
from regard.rules import Mask

from . import saving, sources
from .scene import Scene

Progress = Callable[[str], object]

GIVEN = {
    "text": "TEXT", "named_text": "--text", "file": "--file", "arrays": "--arrays", "capture": "--capture",
}  # fmt: skip
"""What says what to look at, as a user writes it."""


def run(arguments: Namespace, mask: Mask | None, console: Console, progress: AbstractContextManager[Progress]) -> None:
    """Carry the command out. Raises ValueError for input that cannot be served, before any work where that can be."""
    text = _text(arguments)
    paths = [target for path in arguments.save for target in saving.targets(path)]
    chosen = {"layer": arguments.layer, "head": arguments.head, "token": _token(arguments.token)}
    if paths or arguments.terminal:
        with progress as report:
            scenes = _scenes(arguments, text, mask, report)
            still = saving.Still(saving.single(scenes), **chosen, progress=report)
            if arguments.terminal or any(x is not None for x in chosen.values()):
                still.choice  # noqa: B018  before anything is written
            for path in paths:
                try:
                    still.save(path)
                except OSError as error:
                    raise ValueError(f"cannot write {path}: {error.strerror}") from error
        if arguments.terminal:
            from .terminal import show

            show(still.data, still.choice, console)
        for path in paths:
            console.print(f"saved {path}", style="bold", soft_wrap=True)
        return
    if any(x is not None for x in chosen.values()):
        raise ValueError("--layer, --head and --token are for --terminal and --save; on the page they are a click")
    from .answers import Answers
    from .server import Viewer, bound

    with bound(arguments.port) as home:
        with progress as report:
            scenes = _scenes(arguments, text, mask, report)
        try:
            viewer = Viewer(Answers(scenes), home)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None

    def ready() -> None:
        print(f"regard look: {viewer.url}\nCtrl-C ends it.", flush=True)
        if not arguments.no_open:
            viewer.show()

    viewer.run(ready)


def _scenes(arguments: Namespace, text: str | None, mask: Mask | None, progress: Progress) -> Sequence[Scene]:
    """What is to be looked at."""
    progress("starting")
    if arguments.capture is not None:
        from regard.captured import Capture

        try:
            return sources.captured(Capture.load(arguments.capture))
        except OSError as error:
            raise ValueError(f"cannot read {arguments.capture}: {error.strerror or error}") from error
    if arguments.arrays is not None:
        found = reading.operands(arguments.arrays, needed=("query", "key"))
        return [
            sources.arrays(
                found["query"],
                found["key"],
                found.get("value"),
                lse=found.get("lse"),
                tokens=None if "tokens" not in found else [str(token) for token in found["tokens"]],
                key_tokens=None if "key_tokens" not in found else [str(token) for token in found["key_tokens"]],
                name=", ".join(path.name for path in arguments.arrays),
                causal=arguments.causal,
                mask=mask,
            )
        ]
    return [sources.example(sources.Settings() if text is None else sources.Settings(text), progress=progress)]


def _text(arguments: Namespace) -> str | None:
    """The text to read, from wherever it was given; None if it was not."""
    given = [written for name, written in GIVEN.items() if getattr(arguments, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give {given[0]} or {given[1]}, not both")
    if arguments.arrays is None and (arguments.causal or arguments.window is not None):
        raise ValueError("--causal and --window go with --arrays: models have rules of their own")
    if arguments.file is not None:
        text: str | None = reading.text(arguments.file)
    else:
        text = arguments.text if arguments.named_text is None else arguments.named_text
        text = reading.standard_input() if text == "-" else text
    if text is not None:
        if not text:
            raise ValueError("text is empty: give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("text is not valid UTF-8") from None
    return text


def _token(text: str | None) -> int | str | None:
    try:
        return text if text is None else int(text)
    except ValueError:
        return text
