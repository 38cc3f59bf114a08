"""Inputs of commands: texts, captures, and query, key and value in files."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile, is_zipfile

import numpy as np

from regard.arguments.packages import require
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.pictures import opened
from regard.loaders import loaders
from regard.runtime.progress import Stage

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

OPERANDS = ("query", "key", "value")


class NoTokenizerError(ValueError):
    """A model has no tokenizer that can be loaded, so it cannot read a text."""


def operands(paths: Sequence[Path], needed: Sequence[str] = OPERANDS, instead: str | None = None) -> dict[str, Array]:
    """Read query, key and value from files, and any other array, by name.

    needed: the required names, instead: a name that stands for all of them. Raises ValueError for files that cannot be
    read, or lack them.
    """
    if [path.suffix for path in paths] == [".npy"] * len(paths) and len(needed) <= len(paths) <= len(OPERANDS):
        loaded = [_read(path, lambda path: np.load(path, allow_pickle=False)) for path in paths]
        return dict(zip(OPERANDS, loaded, strict=False))
    if len(paths) != 1 or paths[0].suffix not in (".npz", ".safetensors"):
        files = ", ".join(f"{path}{'' if path.exists() else ' (no such file)'}" for path in paths)
        raise ValueError(f"files must be three .npy for query, key and value, or one .npz or .safetensors, got {files}")
    (path,) = paths
    by_name = _read(path, _npz if path.suffix == ".npz" else _safetensors)
    named = {name[0]: name for name in OPERANDS}
    arrays = {named.get(name, name): x for name, x in by_name.items()} if "query" not in by_name else by_name
    if instead not in arrays and not set(needed) <= arrays.keys():
        full, short = (f"{', '.join(names[:-1])} and {names[-1]}" for names in (needed, [name[0] for name in needed]))
        raise ValueError(f"{path} must hold arrays {full} (or {short}), got {', '.join(by_name) or 'none'}")
    return arrays


def text(given: str | None, file: Path | None = None) -> str | None:
    """Return a text argument: itself, standard input for "-", or a file.

    A final line end is removed. Raises ValueError for both a text and a file, and for a text that
    is empty, cannot be read, or is not UTF-8.
    """
    if given is not None and file is not None:
        raise ValueError("give --text or --file, not both")
    source, content = "text", given
    try:
        if file is not None:
            source = str(file)
            content = file.read_bytes().decode("utf-8").removesuffix("\n")
        elif given == "-":
            source = "standard input"
            content = sys.stdin.read().removesuffix("\n")
        if content is not None:
            content.encode()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None
    except UnicodeError:
        raise ValueError(f"{source} is not valid UTF-8") from None
    if content == "":
        raise ValueError("text is empty: give at least one character")
    return content


def capture(path: Path) -> "Capture":
    """Load a capture from a file. Raises ValueError if it cannot be read."""
    try:
        return Capture.load(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


def model(name: str, given: str | None, progress: Callable[[Stage], object], dtype: str | None = None) -> "Capture":
    """Capture a model of transformers.

    dtype: in which it runs, by default that of its files. Raises ValueError if it does not exist, or cannot run.
    """
    require_local(name)
    progress(Stage("loading PyTorch and transformers"))
    seen: Capture = loaders["torch.pretrained"]().read(name, given, dtype=dtype or "auto", progress=progress)
    return seen


def pictured(
    name: str, image: Path, given: str | None, progress: Callable[[Stage], object], dtype: str | None = None
) -> "Capture":
    """Capture a model of transformers that reads a picture, and a text if it reads both.

    dtype: in which it runs, by default that of its files. Raises ValueError if the model or the picture does not exist,
    or cannot be read.
    """
    require_local(name)
    picture = opened(image)
    progress(Stage("loading PyTorch and transformers"))
    read = loaders["torch.pretrained"]().read_picture
    seen: Capture = read(name, picture, given, dtype=dtype or "auto", progress=progress)
    return seen


def running(name: str, progress: Callable[[Stage], object], dtype: str | None = None) -> tuple[Any, Any]:
    """Load a model of transformers and its tokenizer, to run it on typed texts.

    dtype: in which it runs, by default that of its files. Raises ValueError if it does not exist,
    `NoTokenizerError` if it has no tokenizer.
    """
    require_local(name)
    progress(Stage("loading PyTorch and transformers"))
    loaded: tuple[Any, Any] = loaders["torch.pretrained"]().load(name, dtype or "auto", progress)
    return loaded


def require_local(name: str) -> None:
    """Raise ValueError for a model that is not on this machine, and without PyTorch and transformers.

    Neither package is loaded, which would take seconds.
    """
    if not all(map(find_spec, ("torch", "transformers"))):
        raise ValueError("a model needs PyTorch and transformers: pip install 'regard[transformers]'")
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # no name of a model
        if Path(name).exists() or isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    raise ValueError(
        f"no such model: {name} is neither a folder nor in the local cache of transformers; nothing is fetched"
    )


def require_model(dtype: str | None) -> None:
    """Raise ValueError for --dtype without --model."""
    if dtype is not None:
        raise ValueError("--dtype goes with --model: it is the dtype in which a model runs")


def _npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file:
        if not is_zipfile(file):
            raise ValueError("it is no archive")
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _safetensors(path: Path) -> dict[str, Array]:
    require(f"{path}", "safetensors")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        arrays: dict[str, Array] = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return arrays


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, BadZipFile) as error:
        raise ValueError(f"cannot read {path}: not a valid {path.suffix} file ({error})") from error
