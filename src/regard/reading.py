"""What commands are given as files: texts, and query, key and value as arrays."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

OPERANDS = ("query", "key", "value")


def operands(paths: Sequence[Path], needed: Sequence[str] = OPERANDS) -> dict[str, Array]:
    """query, key and value, and what else one file holds beside them, by name; `needed` are those that must be there.

    Raises ValueError for files that cannot be read, or do not hold them.
    """
    if [path.suffix for path in paths] == [".npy"] * len(paths) and len(needed) <= len(paths) <= len(OPERANDS):
        loaded = [_read(path, lambda path: np.load(path, allow_pickle=False)) for path in paths]
        return dict(zip(OPERANDS, loaded, strict=False))
    if len(paths) != 1 or paths[0].suffix not in (".npz", ".safetensors"):
        given = ", ".join(map(str, paths))
        raise ValueError(f"files must be three .npy for query, key and value, or one .npz or .safetensors, got {given}")
    (path,) = paths
    found = _read(path, _npz if path.suffix == ".npz" else _safetensors)
    named = {name[0]: name for name in OPERANDS}
    arrays = {named.get(name, name): x for name, x in found.items()} if "query" not in found else found
    if not set(needed) <= arrays.keys():
        full, short = (f"{', '.join(names[:-1])} and {names[-1]}" for names in (needed, [name[0] for name in needed]))
        raise ValueError(f"{path} must hold arrays {full} (or {short}), got {', '.join(found) or 'none'}")
    return arrays


def text(path: Path) -> str:
    """The text in a file, without the end of its last line. Raises ValueError if it cannot be read."""
    try:
        return path.read_bytes().decode("utf-8").removesuffix("\n")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not valid UTF-8") from None


def standard_input() -> str:
    """The text on standard input, likewise."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError("standard input is not valid UTF-8") from None


def _npz(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _safetensors(path: Path) -> dict[str, Array]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found: dict[str, Array] = load_file(path)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return found


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, EOFError, KeyError, BadZipFile) as error:
        raise ValueError(f"cannot read {path}: not a valid {path.suffix} file ({error})") from error
