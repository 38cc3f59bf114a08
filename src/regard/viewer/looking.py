"""`regard.look`: attention on a page, in a notebook or a file."""

from __future__ import annotations  # so that `help` shows the names of types

import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from regard.arguments.packages import require
from regard.viewer.scene.scenes import Array, Scene


def look(
    what: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    text: str | None = None,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    lse: Any = None,
    weights: Any = None,
    image: Any = None,
    sequence: int | str | None = None,
    save: str | Path | Sequence[str | Path] | None = None,
    with_model: bool = False,
    port: int = 0,
    open_browser: bool = True,
    block: bool | None = None,
    **options: Any,
) -> Any:
    """Look at attention: every head, and any part of its map exactly, at any length.

    In a notebook the page is returned as a widget. Elsewhere it is served to this machine alone,
    under a secret address, and opened in a browser. With `save` it is written to files instead.

    Args:
        what: query (..., h, n_q, d) as `regard.attention` takes it, with `key` and perhaps `value`;
            or a `regard.Capture`; or a PyTorch model, with its `tokenizer` and a `text`. Without it
            the small trained model that ships with regard reads `text`. Without a text either, the
            page opens on sentences that larger models have read, and lists that model beside them.
        key, value: (..., h_kv, n_k, d) and (..., h_kv, n_k, d_v). Without values all but the
            weighted sum is shown.
        text: the text that a model reads, by default a short sentence.
        tokenizer: the tokenizer of a PyTorch model, with the interface of transformers.
        tokens, key_tokens: pieces of text, one for each query and each key. `tokens` serves both if
            there are as many keys as queries.
        lse: (..., h, n_q), from an earlier call with `observe=["lse"]`. By default it is computed
            when needed.
        weights: attention weights themselves, in place of all the above but tokens: what eager
            models and `return_weights` return, or another tool. An array (heads, n_q, n_k) or
            (layers, heads, n_q, n_k), or arrays (heads, n_q, n_k) or (batch, heads, n_q, n_k) of
            layers in a list, a tuple, or a dict by their numbers. Scores and values are not shown.
        image: a path, a picture of Pillow, or pixels (height, width, 3) of uint8. A PyTorch model
            reads it by `tokenizer`, its processor of transformers, with `text` if it reads both.
            Below the single grid of a capture's patches it is shown as it is. If no configuration
            of a model has `patch_size`, look at `regard.capture(model, grid=(rows, columns))`.
        sequence: the number, or a part of the name, of one sequence of a model that reads several
            (encoder and decoder). The page shows all by default; a file shows one, by default that
            of a text over a picture or a sound.
        save: a path, or several: .html (the page in one file), .svg, .png, .npz. Without an ending:
            .html, .svg and, if matplotlib is installed (the extra `plots`), .png.
        with_model: embed regard's own model in the saved page, which then runs it on typed texts.
        port: the port to serve at, by default any free one.
        open_browser: whether to open the page.
        block: serve until interrupted. By default only scripts wait. At a prompt a `Viewer` is
            returned, and its `close()` ends it.
        options: those of `regard.attention`, such as `causal=True`, `mask` and `score`.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what was expected, before any
            work.

    >>> import numpy as np, regard
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1000, 64))
    >>> page = regard.look(q, k, v, causal=True, block=False, open_browser=False)
    >>> page.url.startswith("http://127.0.0.1:")
    True
    >>> page.close()
    """
    from regard.viewer.serve.saving import Still, single, targets

    files = [save] if isinstance(save, str | Path) else save or []
    paths = [target for path in files for target in targets(Path(path))]
    every = partial(
        scenes_of if paths else scenes_of_page, what, key, value, text=text, tokenizer=tokenizer, tokens=tokens,
        key_tokens=key_tokens, lse=lse, weights=weights, image=image, **options,
    )  # fmt: skip

    def scenes() -> Sequence[Scene]:
        return every() if sequence is None else [single(every(), sequence)]

    if paths:
        still = Still(single(scenes()))
        for path in paths:
            still.save(path, with_model)
        return None
    from regard.viewer.scene.sources import for_page
    from regard.viewer.serve.answers import Answers

    if in_notebook():
        require("look in a notebook", "anywidget")
        from regard.viewer.serve.notebook import PATIENCE, widget

        return widget(Answers(for_page(scenes()), patience=PATIENCE))
    require("a page that is served", "starlette", "uvicorn")
    from regard.viewer.serve.server import Viewer, bound

    with bound(port) as home:
        viewer = Viewer(Answers(for_page(scenes())), home)

    def ready() -> None:
        print(f"regard look: {viewer.url}", flush=True)
        if open_browser:
            viewer.show()

    if block or (block is None and not hasattr(sys, "ps1")):
        viewer.run(ready)
        return None
    threading.Thread(target=viewer.run, args=(ready if open_browser else lambda: None,), daemon=True).start()
    return viewer


def scenes_of(
    what: Any = None,
    key: Any = None,
    value: Any = None,
    *,
    text: str | None = None,
    tokenizer: Any = None,
    image: Any = None,
    **options: Any,
) -> tuple[Scene, ...]:
    """Return the scenes that the arguments of `look` mean."""
    from regard.interpret.capture.captured import Capture
    from regard.viewer.scene import sources

    if (weights := options.pop("weights", None)) is not None:
        others = {"what": what, "key": key, "value": value, "text": text, "tokenizer": tokenizer, "image": image}
        return (_of_weights(weights, others | options),)
    names = {name for name, x in options.items() if x is not None}
    arrays = key is not None
    if arrays and text is not None:
        raise TypeError("text is for models: name what arrays attend to by tokens=")
    if not arrays:
        if names:
            raise TypeError(f"{', '.join(sorted(names))} goes with query and key: look(query, key, ...)")
        if value is not None:
            raise TypeError("value was given without key: look(query, key, value)")
    module = getattr(sys.modules.get("torch.nn"), "Module", ())
    if image is not None and (arrays or not isinstance(what, (Capture, module))):
        raise TypeError("image goes with a capture, or with a PyTorch model and its processor as tokenizer=")
    if what is None and not arrays:
        settings = sources.Settings() if text is None else sources.Settings(text)
        return (sources.example(settings),)
    if isinstance(what, Capture):
        if arrays or text is not None:
            raise TypeError("a capture has keys and text of its own: look(capture)")
        return sources.captured(what if image is None else what.showing(image))
    if isinstance(what, module):
        return of_model(what, text, tokenizer) if image is None else of_picture(what, image, text, tokenizer)
    if not arrays:
        raise TypeError(
            "look takes query and key, a regard.Capture, a PyTorch model with tokenizer=, or nothing but "
            f"text=; got {type(what).__name__}"
        )
    for name, x in (("value", value), ("lse", options.get("lse"))):
        if x is not None:
            options[name] = numpy_of(x)
    return (sources.arrays(numpy_of(what), numpy_of(key), **options),)


def scenes_of_page(what: Any = None, key: Any = None, value: Any = None, **options: Any) -> tuple[Scene, ...]:
    """Return the scenes that a page shows for the arguments of `look`."""
    if all(x is None for x in (what, key, value, *options.values())):
        from regard.viewer.scene.words import page

        return page()
    return scenes_of(what, key, value, **options)


def _of_weights(given: Any, others: dict[str, Any]) -> Scene:
    """Return the scene of weights. others: further arguments of `look`, of which tokens alone go with weights."""
    from regard.viewer.scene.weights import weights

    tokens = {name: others.pop(name, None) for name in ("tokens", "key_tokens")}
    unfit = [name for name, x in others.items() if x is not None]
    if unfit:
        raise TypeError(f"weights go with tokens and key_tokens alone, not with {', '.join(unfit)}")
    return weights(numpy_of_layers(given), **tokens)


def numpy_of_layers(given: Any) -> Any:
    """Return arrays of layers, of any library, as NumPy arrays."""
    if isinstance(given, Mapping):
        return {number: numpy_of_layers(x) for number, x in given.items()}
    if isinstance(given, list | tuple):
        return [numpy_of_layers(x) for x in given]
    return given if given is None or isinstance(given, str | int | float) else numpy_of(given)


def of_model(model: Any, text: str | None, tokenizer: Any) -> tuple[Scene, ...]:
    """Return the scenes of a PyTorch model that reads a text, and then those that are typed."""
    from regard.viewer.scene.own import SENTENCE, TextRunner

    if tokenizer is None:
        raise TypeError("a model needs its tokenizer: look(model, text=..., tokenizer=...)")
    return TextRunner(model, tokenizer).scenes({"text": SENTENCE if text is None else text})


def of_picture(model: Any, image: Any, text: str | None, processor: Any) -> tuple[Scene, ...]:
    """Return the scenes of a PyTorch model that reads a picture, and a text if it reads both."""
    from regard.viewer.scene import sources

    if processor is None:
        raise TypeError("a model needs its processor to read a picture: look(model, image=..., tokenizer=processor)")
    return sources.pictured(model, processor, image, text)


def numpy_of(x: Any) -> Array:
    """Return an array of any library as a NumPy array.

    A tensor is copied, because its storage may be freed.
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is not None and isinstance(x, tensor):
        from regard.core.tensors import array

        return array(x.detach().to("cpu", copy=True))
    return np.asarray(x)


def in_notebook() -> bool:
    """Return whether this is Jupyter's shell or a subclass of it, as in Colab.

    Spyder's is excluded: it cannot show widgets.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    names = [kind.__name__ for kind in type(shell).__mro__]
    return "ZMQInteractiveShell" in names and not names[0].startswith("Spyder")
