"""Named arrays in a safetensors file, mapped into memory when read.

The library itself writes only arrays in memory, and reads copies. It still validates every file that is opened here.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "I64": np.dtype("<i8"), "U64": np.dtype("<u8"),
    "F32": np.dtype("<f4"), "I32": np.dtype("<i4"), "U32": np.dtype("<u4"),
    "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16), "I16": np.dtype("<i2"), "U16": np.dtype("<u2"),
    "I8": np.dtype("i1"), "U8": np.dtype("u1"), "BOOL": np.dtype(bool),
}  # fmt: skip
"""Dtypes by their safetensors names, the largest first, so that each is aligned."""

CHECKSUM = "crc32"
MARK, ZEROS = f'"{CHECKSUM}":"'.encode(), b"00000000"
"""The place of the checksum in the header, and its value while it is computed.

The header is written without spaces.
"""

READ = 2**22
"""Bytes to read at once for the checksum."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Parts:
    """Arrays (..., n, d) concatenated along their last axis but one, without a copy."""

    def __init__(self, parts: Sequence[Array]):
        self.parts = tuple(parts)
        first = parts[0]
        rows = sum(part.shape[-2] for part in parts)
        self.shape = (*first.shape[:-2], rows, first.shape[-1])
        self.dtype = first.dtype

    def pieces(self) -> Iterator[Array]:
        for index in np.ndindex(self.shape[:-2]):
            for part in self.parts:
                yield part[index]


def _pieces(x: Array | Parts) -> Iterator[Array]:
    """Iterate over the matrices of an array in memory order."""
    if isinstance(x, Parts):
        yield from x.pieces()
        return
    for index in np.ndindex(x.shape[:-2]):
        yield x[index]


def write(path: Path, arrays: Mapping[str, Array | Parts], metadata: Mapping[str, str]) -> None:
    """Write a file whole or not at all; an older one stays until it is complete.

    The metadata has a checksum, the CRC-32 of all bytes with its own digits as zeros. Raises TypeError for a dtype that
    the format lacks.
    """
    for name, x in arrays.items():
        if x.dtype not in NAMES:
            raise TypeError(f"{name} has dtype {x.dtype}, which a safetensors file cannot hold")
    ranks = {dtype: rank for rank, dtype in enumerate(NAMES)}
    order = sorted(arrays, key=lambda name: ranks[arrays[name].dtype])
    entries = {name: x for name, x in metadata.items() if name != CHECKSUM}
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: ZEROS.decode(), **entries}}
    end = 0
    for name in order:
        x = arrays[name]
        begin, end = end, end + int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize
        header[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "xb") as file:
            file.write(text)
            checksum = crc32(text)
            for name in order:
                for piece in _pieces(arrays[name]):
                    content = np.ascontiguousarray(piece).view(np.uint8).data
                    file.write(content)
                    checksum = crc32(content, checksum)
            file.seek(text.index(MARK) + len(MARK))
            file.write(b"%08x" % checksum)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _verify(path: Path, checksum: str, text: bytes, file: BinaryIO) -> None:
    """Raise ValueError unless the file matches its checksum.

    text: the bytes that were already read from it.
    """
    digest = crc32(text.replace(MARK + checksum.encode(), MARK + ZEROS, 1))
    while piece := file.read(READ):
        digest = crc32(piece, digest)
    if checksum != f"{digest:08x}":
        raise ValueError(f"{path} is damaged: its checksum is {checksum}, and that of its content {digest:08x}")


def read(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays, mapped into memory and read-only, and the metadata.

    A file with a checksum is read once as a whole. Raises OSError if the file cannot be read. Raises ValueError if it
    is not a whole safetensors file, or does not match its checksum.
    """
    from safetensors import SafetensorError, safe_open  # writing needs none of it

    with open(path, "rb") as file:  # safe_open's own errors do not say which file, or why
        start = file.read(8)
        size = int.from_bytes(start, "little")
        try:
            with safe_open(path, framework="np"):
                pass
        except (SafetensorError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        text = file.read(size)
        header = json.loads(text)
        metadata = header.pop("__metadata__", None) or {}
        if CHECKSUM in metadata:
            _verify(path, metadata[CHECKSUM], start + text, file)
    data: Array = np.asarray(np.memmap(path, np.uint8, "r"))[8 + size :] if header else np.empty(0, np.uint8)
    arrays = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which NumPy does not have")
        begin, end = entry["data_offsets"]
        arrays[name] = data[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata
