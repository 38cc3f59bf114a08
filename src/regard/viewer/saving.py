"""Scenes as files: the page with what it shows, a picture, the arrays."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from .scene import Scene

Progress = Callable[[str], object]
ENDINGS = (".html", ".png", ".svg", ".npz")


def targets(path: Path) -> list[Path]:
    """The files that a path to save at stands for: itself, or without an ending a page and a picture.

    Raises ValueError for one that cannot be written.
    """
    if path.suffix not in ("", *ENDINGS):
        raise ValueError(
            f"cannot save {path}: the ending must be {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}, got {path.suffix}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"cannot save {path}: {path.parent} is not a directory")
    if path.is_dir():
        raise ValueError(f"cannot save {path}: it is a directory")
    return [path] if path.suffix else [path.with_suffix(".html"), path.with_suffix(".png")]


def save(
    scene: Scene, path: Path, *, layer: int | None = None, head: int | None = None, token: int | str | None = None,
    progress: Progress = lambda stage: None,
) -> None:  # fmt: skip
    """Write one file, of the kind that its ending names. A picture is of one head and token, see `LookData.choose`.

    Raises ValueError for a scene that is too large for a page, and OSError.
    """
    progress(f"writing {path}")
    if path.suffix == ".html":
        from .answers import Answers
        from .export import page

        answers = Answers([scene], patience=None)
        path.write_bytes(page(answers, next(iter(answers.scenes))).encode())
    elif path.suffix == ".npz":
        path.write_bytes(archive(scene))
    else:
        from .model_view import look_data
        from .picture import picture

        data = look_data(scene, progress)
        path.write_bytes(picture(data, data.choose(layer, head, token), "svg" if path.suffix == ".svg" else "png"))


def archive(scene: Scene) -> bytes:
    """An .npz file: query, key, value and lse of every layer (those of layer 3 as 3.query, if there are several), and
    the tokens. The rules are not in it.
    """
    found: dict[str, Any] = {}
    for number, layer in enumerate(scene.layers):
        p, prefix = layer.problem, f"{number}." if len(scene.layers) > 1 else ""
        lse = layer.lse
        if lse is None:
            lse = np.stack([[layer.head(h, b).lse for h in range(layer.heads)] for b in range(p.batch)])
        found |= {f"{prefix}query": p.query, f"{prefix}key": p.key, f"{prefix}lse": lse.reshape(p.shape(p.n_q))}
        if layer.has_values:
            found[f"{prefix}value"] = p.value
    for name, tokens in (("tokens", scene.query_tokens), ("key_tokens", scene.key_tokens)):
        if tokens and not (name == "key_tokens" and tokens == scene.query_tokens):
            found[name] = np.array(tokens)
    content = BytesIO()
    np.savez(content, **found)
    return content.getvalue()


def check(scenes: Sequence[Scene], paths: Sequence[Path]) -> Scene:
    """The one scene that files are made of. Raises ValueError where there are several."""
    if paths and len(scenes) > 1:
        names = ", ".join(scene.name for scene in scenes)
        raise ValueError(
            f"a file shows one sequence, and here are several ({names}); capture the layers of one of them"
        )
    return scenes[0]
