"""The command `regard look`."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, NoReturn

from rich.console import Console

from regard.interpret import inputs
from regard.interpret.capture.pictures import opened
from regard.rules import Mask
from regard.viewer.scene import sources, words
from regard.viewer.scene.own import SENTENCE, TextRunner
from regard.viewer.scene.scenes import Scene
from regard.viewer.scene.weights import weights
from regard.viewer.serve import saving
from regard.viewer.serve.answers import Answers
from regard.viewer.serve.links import VIEWS, fragment
from regard.viewer.serve.preparing import Preparing
from regard.viewer.show import drawing

Progress = Callable[[Any], object]


def run(arguments: Namespace, mask: Mask | None, console: Console, progress: AbstractContextManager[Progress]) -> None:
    """Run the command.

    Raises ValueError for invalid arguments, where possible before any work.
    """
    text = _text(arguments)
    paths = [target for path in arguments.save for target in saving.targets(path)]
    if (paths or arguments.terminal) and (arguments.view, arguments.key) != (None, None):
        raise ValueError("--view and --key are for the page")
    if arguments.view not in (None, *VIEWS):
        raise ValueError(f"--view must be {', '.join(VIEWS[:-1])} or {VIEWS[-1]}, got {arguments.view}")
    if arguments.with_model and not paths:
        raise ValueError("--with-model goes with --save")
    chosen = {"layer": arguments.layer, "head": arguments.head, "token": _number(arguments.token)}
    if paths or arguments.terminal:
        with progress as report:
            scenes = _scenes(arguments, text, mask, report)
            still = saving.Still(saving.single(scenes, _number(arguments.sequence)), **chosen, progress=report)
            if arguments.terminal or any(x is not None for x in chosen.values()):
                still.choice  # noqa: B018  before anything is written
            for path in paths:
                try:
                    still.save(path, arguments.with_model)
                except OSError as error:
                    raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
        if arguments.terminal:
            from regard.viewer.show.terminal import show

            show(still.data, still.choice, console)
        for path in paths:
            console.print(f"saved {path}", style="bold", soft_wrap=True)
        if not all(path.suffix for path in arguments.save) and not drawing.has_png():
            console.print(f"no PNG was saved: {drawing.NEEDS}", soft_wrap=True)
        return
    _serve(arguments, text, mask, progress, chosen | {"key": _number(arguments.key)})


def _serve(
    arguments: Namespace,
    text: str | None,
    mask: Mask | None,
    progress: AbstractContextManager[Progress],
    chosen: dict[str, Any],
) -> None:
    """Serve the page until it is interrupted.

    The page opens before a model has run, and says how far the run is. What cannot fail is made meanwhile too.
    """
    from regard.viewer.serve.server import Viewer, bound

    if arguments.model is not None:
        inputs.require_local(arguments.model)
    if arguments.image is not None:
        opened(arguments.image)  # before a browser opens, and PyTorch is loaded
    shown = ExitStack()

    def prepare(tell: Progress) -> Answers:
        with shown:
            report = shown.enter_context(progress)
            scenes = _of_page(arguments, text, mask, lambda stage: (report(stage), tell(stage)))
        if arguments.sequence is not None:
            scenes = [saving.single(scenes, _number(arguments.sequence))]
        scenes = sources.for_page(scenes)
        return Answers(scenes, start=fragment(scenes[0], arguments.view, **chosen))

    later = arguments.model is not None or (_on_words(arguments, text) and not _chooses(arguments, chosen))
    preparing = Preparing(prepare) if later else None
    with bound(arguments.port) as home:
        answers = prepare(lambda stage: None) if preparing is None else preparing
        try:
            viewer = Viewer(answers, home)
        except FileNotFoundError as error:
            raise ValueError(str(error)) from None
    link = answers.registry.start if isinstance(answers, Answers) else ""

    def ready() -> None:
        print(f"regard look: {viewer.url}{link}\nCtrl-C ends it.", flush=True)
        if preparing is not None:
            preparing.start(viewer.close)
        if not arguments.no_open:
            viewer.show(link)

    interrupted = viewer.run(ready)
    if preparing is not None and preparing.error is not None:
        raise preparing.error
    if interrupted:
        shown.close()
        _leave(0 if preparing is None or preparing.ready else 130)


def _of_page(arguments: Namespace, text: str | None, mask: Mask | None, progress: Progress) -> Sequence[Scene]:
    """Return the scenes of a page: a model stays, and reads the texts that are typed."""
    if _on_words(arguments, text):
        return words.page(progress)
    if arguments.model is None or arguments.image is not None:
        return _scenes(arguments, text, mask, progress)
    try:
        runner = TextRunner(*inputs.running(arguments.model, progress, arguments.dtype))
    except inputs.NoTokenizerError:
        if text is None:  # it reads random tokens
            return _scenes(arguments, text, mask, progress)
        raise
    return runner.scenes({"text": SENTENCE if text is None else text}, progress)


def _on_words(arguments: Namespace, text: str | None) -> bool:
    """Return True if the page opens on the sentences that larger models have read."""
    return (text, arguments.capture, arguments.model, arguments.arrays) == (None,) * 4


def _chooses(arguments: Namespace, chosen: dict[str, Any]) -> bool:
    """Return True if the page opens on a choice, which may not exist."""
    return any(x is not None for x in (arguments.view, arguments.sequence, *chosen.values()))


def _leave(status: int) -> NoReturn:
    """End the process at once: the interpreter would wait for threads that compute, or end in the middle of them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _scenes(arguments: Namespace, text: str | None, mask: Mask | None, progress: Progress) -> Sequence[Scene]:
    """Return the scenes to look at."""
    if arguments.capture is not None:
        return sources.captured(inputs.capture(arguments.capture))
    if arguments.image is not None:
        seen = inputs.pictured(arguments.model, arguments.image, text, progress, arguments.dtype)
        return sources.captured(seen, kind="capture")
    if arguments.model is not None:
        return sources.captured(inputs.model(arguments.model, text, progress, arguments.dtype), kind="model")
    if arguments.arrays is not None:
        return [_of_arrays(arguments, mask)]
    return [sources.example(sources.Settings() if text is None else sources.Settings(text), progress=progress)]


def _of_arrays(arguments: Namespace, mask: Mask | None) -> Scene:
    """Return the scene of queries and keys in files, or of weights."""
    operands = inputs.operands(arguments.arrays, needed=("query", "key"), instead="weights")
    named: dict[str, Any] = {
        name: [str(token) for token in operands[name]] for name in ("tokens", "key_tokens") if name in operands
    }
    named["name"] = ", ".join(path.name for path in arguments.arrays)
    if "query" in operands:
        options: dict[str, Any] = {"lse": operands.get("lse"), "sink": operands.get("sink")}
        options |= {"causal": arguments.causal, "mask": mask}
        return sources.arrays(operands["query"], operands["key"], operands.get("value"), **named, **options)
    if arguments.causal or mask is not None:
        raise ValueError("--causal and --window go with queries and keys: weights follow their rules already")
    return weights(operands["weights"], **named)


def _text(arguments: Namespace) -> str | None:
    """Return the text to read, None if none was given.

    Raises ValueError for conflicting arguments.
    """
    if arguments.given is not None and arguments.text is not None:
        raise ValueError("give TEXT or --text, not both")
    text = arguments.text if arguments.given is None else arguments.given
    what = {"--arrays": arguments.arrays, "--capture": arguments.capture, "--model": arguments.model}
    named = [name for name, value in what.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"give {named[0]} or {named[1]}, not both")
    if (text is not None or arguments.file is not None) and named and named != ["--model"]:
        raise ValueError(f"a text does not go with {named[0]}, where all was read already")
    if arguments.model is None:
        inputs.require_model(arguments.dtype)
        if arguments.image is not None:
            raise ValueError("--image goes with --model: it is a picture for a model to read")
    if arguments.arrays is None and (arguments.causal or arguments.window is not None):
        raise ValueError("--causal and --window go with --arrays: models have rules of their own")
    return inputs.text(text, arguments.file)


def _number(text: str | None) -> int | str | None:
    """Return the text as a number if it is one."""
    try:
        return text if text is None else int(text)
    except ValueError:
        return text
