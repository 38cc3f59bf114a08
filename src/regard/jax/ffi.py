"""The handler that XLA calls, through the C interface of its foreign functions.

The structures are those of xla/ffi/api/c_api.h, version 0, in ctypes. Buffers become NumPy views without a copy. Errors
become the status of the program, never a crash.
"""

import ctypes
import json
import math
import threading
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import numpy as np

import jax
from regard.jax import parts
from regard.jax.task import PreparedTask, PrimitiveTask, Shape, named, run
from regard.runtime.bounded import insert
from regard.runtime.threads import num_threads

Array = np.ndarray[Any, np.dtype[Any]]

TARGET = "regard"
METADATA, EXECUTE, INTERNAL = 1, 3, 13


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
        ("items", c_void_p),
    )


class ByteSpan(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t))


class Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("items", POINTER(POINTER(ByteSpan))),
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


class CallFrame(Structure):
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


Arrays = list[tuple[Shape, np.dtype[Any]]]
CACHED = 256  # prepared calls of a thread
DATA = Buffer.data.offset
_mine = threading.local()


class Prepared:
    """A call without its addresses, for one thread."""

    def __init__(self, text: bytes):
        head, _, task = text.partition(b"\n")
        self.task = PrimitiveTask.parse(task.decode())
        self.operands, self.results = ([(tuple(s), named(t)) for s, t in each] for each in json.loads(head))
        self.fast: PreparedTask | None = None
        self.threads = 0

    def run(self, operands: list[int], results: list[int]) -> None:
        if self.threads != num_threads():
            self.threads = num_threads()
            self.fast = PreparedTask.of(self.task, views(self.operands, operands))
        if self.fast is not None:
            values = [view(*self.operands[n], operands[n]) for n in self.fast.read]
            if self.fast((*results, *operands), values):
                return
        if self.task.step is not None:
            parts.run(self.task, views(self.operands, operands), views(self.results, results))
        else:
            run(self.task, views(self.operands, operands), views(self.results, results))


def attribute(task: PrimitiveTask, avals_in: Sequence[Any], avals_out: Sequence[Any]) -> str:
    """Return the attribute that describes a call to the handler in a program."""
    every = [[(x.shape, x.dtype.name) for x in avals] for avals in (avals_in, avals_out)]
    return f"{json.dumps(every)}\n{task.text}"


def views(arrays: Arrays, addresses: list[int]) -> list[Array]:
    return [view(shape, dtype, at) for (shape, dtype), at in zip(arrays, addresses, strict=True)]


def view(shape: Shape, dtype: np.dtype[Any], address: int) -> Array:
    size = dtype.itemsize * math.prod(shape)
    if not size:
        return np.empty(shape, dtype)
    memory: Any = (c_char * size).from_address(address)
    return np.ndarray(shape, dtype, memory)


def addresses(buffers: Buffers) -> list[int]:
    """Return the address of each buffer's data.

    Addresses are read as integers: fields of a Structure take longer than small calls.
    """
    if not buffers.size:
        return []
    items = (c_size_t * buffers.size).from_address(buffers.items)
    return [c_size_t.from_address(item + DATA).value for item in items]


def handle(pointer: Any) -> int | None:
    frame = pointer.contents
    if frame.extension and frame.extension.contents.type == METADATA:
        metadata = ctypes.cast(frame.extension, POINTER(MetadataExtension)).contents.metadata.contents
        metadata.version.major, metadata.version.minor = 0, 1
        return None
    try:
        if frame.stage == EXECUTE:
            text = frame.attributes.items[0].contents
            key = ctypes.string_at(text.data, text.size)
            try:
                cached = _mine.cached
            except AttributeError:
                cached = _mine.cached = {}
            prepared = cached.get(key)
            if prepared is None:
                prepared = Prepared(key)
                insert(cached, key, prepared, CACHED)
            prepared.run(addresses(frame.operands), addresses(frame.results))
        return None
    except BaseException as error:
        message = f"{type(error).__name__}: {error}".encode()
        arguments = ErrorArguments(ctypes.sizeof(ErrorArguments), None, message, INTERNAL)
        created: int = frame.api.contents.error(ctypes.byref(arguments))
        return created


handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))(handle)  # XLA keeps its address
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(handler, c_void_p).value), platform="cpu")
