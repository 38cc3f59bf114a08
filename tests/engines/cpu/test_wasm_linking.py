"""The linker of WebAssembly: numbers, data, calls and addresses, what it refuses, and LLVM's own linker beside it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from in_node import run
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import webassembly
from regard.engines.cpu.wasm import module
from regard.engines.cpu.wasm.linking import (
    CODE,
    CUSTOM,
    DATA,
    EXPORT,
    IMPORT,
    Reader,
    linked,
    sections,
    signed,
    unsigned,
)

TARGET = webassembly()
# Two functions, one of which calls the other, a table of data with an address in it, and 32 bytes of stack.
SOURCE = f"""
target triple = "{TARGET.triple}"
@numbers = internal constant [3 x i32] [i32 10, i32 20, i32 30], align 16
@second = internal constant ptr getelementptr (i32, ptr @numbers, i32 1)
declare void @llvm.memset.p0.i32(ptr, i8, i32, i1)
define i32 @at(i32 %n) noinline {{
  %there = getelementptr i32, ptr @numbers, i32 %n
  %found = load i32, ptr %there
  ret i32 %found
}}
define void @forward(ptr %into) {{
  %room = alloca [8 x i32], align 16
  call void @llvm.memset.p0.i32(ptr %room, i8 1, i32 32, i1 true)
  %own = getelementptr i32, ptr %room, i32 7
  %x = load volatile i32, ptr %own
  %address = load volatile ptr, ptr @second
  %y = load i32, ptr %address
  %z = call i32 @at(i32 2)
  %xy = add i32 %x, %y
  %sum = add i32 %xy, %z
  store i32 %sum, ptr %into
  ret void
}}
"""


def compiled(text: str = SOURCE) -> bytes:
    return cache.compile_object(text, TARGET, "test")


@pytest.mark.parametrize("x", [0, 1, 63, 64, 127, 128, 1 << 20, (1 << 31) - 1])
@pytest.mark.parametrize("width", [1, 5])
def test_numbers_are_read_as_written(x: int, width: int) -> None:
    ways = (x, unsigned, Reader.unsigned), (x, signed, Reader.signed), (-x, signed, Reader.signed)
    for number, write, read in ways:
        code = write(number, width)
        assert len(code) >= width
        reader = Reader(code + b"\xff")
        assert (read(reader), reader.at) == (number, len(code))


def test_a_module_runs(tmp_path: Path) -> None:
    (tmp_path / "module.wasm").write_bytes(linked(compiled(), ["forward"]))
    (tmp_path / "memory").write_bytes(bytes(16))
    places = {"start": 2**20, "launches": [2**20], "taken": 2**20 + 8, "from": 2**20, "to": 2**20 + 4}
    run({"image": {"module": "module.wasm", "memory": "memory", "result": "result", **places}}, tmp_path)
    assert int.from_bytes((tmp_path / "result").read_bytes(), "little") == 0x01010101 + 20 + 30


def test_a_module_imports_nothing() -> None:
    code = linked(compiled(), ["forward", "at"])
    found = dict(sections(code))
    assert IMPORT not in found
    assert list(found) == sorted(found)
    reader = Reader(found[EXPORT])
    exported = [(reader.name(), reader.byte(), reader.unsigned()) for _ in range(reader.unsigned())]
    assert exported == [("forward", 0, 1), ("at", 0, 0), ("memory", 2, 0), ("__heap_base", 3, 1)]


def test_what_is_missing_is_named() -> None:
    text = SOURCE.replace("define i32 @at", "declare double @sin(double)\ndefine double @other(double %x) { "
                          "%y = call double @sin(double %x) ret double %y }\ndefine i32 @at")  # fmt: skip
    with pytest.raises(ValueError, match="WebAssembly has no C library, which sin would come from"):
        linked(compiled(text), ["forward"])
    outside = "@elsewhere = external global i32\ndefine ptr @other() { ret ptr @elsewhere }\ndefine i32 @at"
    with pytest.raises(ValueError, match="does not know elsewhere"):
        linked(compiled(SOURCE.replace("define i32 @at", outside)), ["forward"])
    pointer = "define ptr @other() { ret ptr @at }\ndefine i32 @at"
    with pytest.raises(ValueError, match="no relocation of type"):
        linked(compiled(SOURCE.replace("define i32 @at", pointer)), ["forward"])
    with pytest.raises(ValueError, match="this is no WebAssembly"):
        linked(b"\x7fELF", ["forward"])


def initial(body: bytes) -> bytes:
    """The memory that a data section describes, up to its last byte that is not 0."""
    reader, memory = Reader(body), bytearray(2**16)
    for _ in range(reader.unsigned()):
        assert (reader.byte(), reader.byte()) == (0, 0x41)
        address = reader.signed()
        assert reader.byte() == 0x0B
        segment = reader.bytes(reader.unsigned())
        memory[address : address + len(segment)] = segment
    return bytes(memory).rstrip(b"\0")


def reference() -> list[str]:
    """The command of LLVM's linker; skips the test where there is none."""
    for name in ("wasm-ld", "wasm-ld-19"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "wasm-ld", "--no-stack-first"]
    pytest.skip("there is no wasm-ld: apt-get install lld-19, or pip install ziglang")


@pytest.mark.parametrize("which", ["data and calls", "attention"])
def test_code_and_data_are_those_of_wasm_ld(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, objects = reference(), []

    def kept(code: bytes, exports: list[str]) -> bytes:
        objects.append((code, exports))
        return linked(code, exports)

    if which == "attention":
        monkeypatch.setattr(module, "linked", kept)
        regard.export_wasm(tmp_path / "attention", mask=regard.documents([0, 0, 1]), causal=True)
    else:
        objects.append((compiled(), ["forward", "at"]))
    ((code, exports),) = objects
    (tmp_path / "object.o").write_bytes(code)
    options = ["--no-entry", *(f"--export={name}" for name in exports), "--global-base=1024", "-z", "stack-size=65536"]
    theirs = tmp_path / "theirs.wasm"
    subprocess.run([*command, *options, "-o", str(theirs), str(tmp_path / "object.o")], check=True)
    got, expected = (dict(sections(x)) for x in (linked(code, exports), theirs.read_bytes()))
    assert got[CODE] == expected[CODE]
    assert initial(got.get(DATA, b"\0")) == initial(expected.get(DATA, b"\0"))
    assert CUSTOM not in got
