"""The handler that XLA calls: ctypes over the C interface of its foreign functions (xla/ffi/api/c_api.h, version 0).

Buffers become NumPy views without a copy; what goes wrong becomes the status of the program, never a crash.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

import jax
from regard.jax.task import Task, run

Array = np.ndarray[Any, np.dtype[Any]]

TARGET = "regard"
METADATA, EXECUTE, INTERNAL = 1, 3, 13
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(bool),
    **{n: np.dtype(f"int{8 << n - 2}") for n in range(2, 6)},
    **{n: np.dtype(f"uint{8 << n - 6}") for n in range(6, 10)},
    **{n: np.dtype(f"float{16 << n - 10}") for n in range(10, 13)},
    16: np.dtype(ml_dtypes.bfloat16),
}


class Extension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p))


class Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32), ("state_type", c_int64))


class MetadataExtension(Structure):
    _fields_ = (("base", Extension), ("metadata", POINTER(Metadata)))


class Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class Buffers(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("items", POINTER(POINTER(Buffer))),
    )


class Span(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t))


class Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("items", POINTER(POINTER(Span))),
    )


class ErrorArguments(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int))


class Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error", ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorArguments))),
    )


class Frame(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("operands", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    )


def views(buffers: Buffers) -> Sequence[Array]:
    return [view(buffers.items[n].contents) for n in range(buffers.size)]


def view(buffer: Buffer) -> Array:
    shape, dtype = buffer.dims[: buffer.rank], DTYPES[buffer.dtype]
    size = dtype.itemsize
    for n in shape:
        size *= n
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (c_char * size).from_address(buffer.data)
    found: Array = np.frombuffer(memory, dtype).reshape(shape)
    return found


def handle(pointer: Any) -> int | None:
    frame = pointer.contents
    if frame.extension and frame.extension.contents.type == METADATA:
        metadata = ctypes.cast(frame.extension, POINTER(MetadataExtension)).contents.metadata.contents
        metadata.version.major, metadata.version.minor = 0, 1
        return None
    try:
        if frame.stage == EXECUTE:
            text = frame.attributes.items[0].contents
            task = Task.parse(ctypes.string_at(text.data, text.size).decode())
            run(task, views(frame.operands), views(frame.results))
        return None
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = ErrorArguments(ctypes.sizeof(ErrorArguments), None, message, INTERNAL)
        created: int = frame.api.contents.error(ctypes.byref(arguments))
        return created


handler = ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))(handle)  # XLA keeps its address
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(handler, c_void_p).value), platform="cpu")
