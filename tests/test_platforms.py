"""Other systems, as far as this one can pretend to be one: what they lack is missed by no call and no command."""

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import regard
from cases import case
from regard.engines.cpu.schedule.forward_spec import spec_of
from regard.engines.cpu.schedule.work import source
from regard.engines.cpu.target import cache
from regard.engines.cpu.target import instructions as target
from regard.ops.normalization import problem_from
from regard.viewer.serve import server

X86 = target.native_triple().startswith("x86_64")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux pretends to be others")
@pytest.mark.parametrize("system", ["windows", "macos"])
def test_calls_and_commands_on_another_system(system: str, tmp_path: Path) -> None:
    if system == "windows" and not X86:
        pytest.skip("its calling convention is that of x86-64")
    root = Path(regard.__file__).parents[1]
    command = [sys.executable, str(Path(__file__).with_name("simulated.py")), system, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def undefined(code: bytes) -> list[str]:
    """The symbols that an object wants from others: of ELF (Linux, and ours on Windows) or of Mach-O (macOS)."""
    found = []
    if code[:4] == b"\x7fELF":
        start, size, count = *struct.unpack_from("<Q", code, 0x28), *struct.unpack_from("<HH", code, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", code, start + n * size) for n in range(count)]
        for _, kind, _, _, at, length, link, *_ in sections:
            for symbol in range(at + 24, at + length, 24) if kind == 2 else ():
                name, _, _, section = struct.unpack_from("<IBBH", code, symbol)
                names = sections[link][4] + name
                found += [code[names : code.index(b"\0", names)].decode()] * (section == 0)
        return found
    assert code[:4] == b"\xcf\xfa\xed\xfe"
    at = 32
    for _ in range(struct.unpack_from("<I", code, 16)[0]):
        command, size = struct.unpack_from("<II", code, at)
        if command == 2:
            table, count, strings = struct.unpack_from("<III", code, at + 8)
            for n in range(count):
                name, kind = struct.unpack_from("<IB", code, table + 16 * n)
                names = strings + name
                found += [code[names : code.index(b"\0", names)].decode()] * (kind & 0x0E == 0)
        at += size
    return found


SYSTEMS = [
    ("avx2", "x86_64-pc-windows-msvc"),
    ("baseline", "x86_64-pc-windows-msvc"),
    ("neon", "aarch64-pc-windows-msvc"),
    ("avx2", "x86_64-apple-darwin23.0.0"),
    ("neon", "arm64-apple-darwin23.0.0"),
    ("neon", "aarch64-unknown-linux-gnu"),
]


@pytest.mark.parametrize(("name", "triple"), SYSTEMS)
def test_kernels_of_other_systems_want_nothing_from_them(
    name: str, triple: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No symbol of a C library, such as memset, and no check of the stack: memory holds the kernel alone."""
    monkeypatch.setattr(target.llvm, "get_process_triple", lambda: triple)
    there = replace(target.targets()[name], triple=target.native_triple.__wrapped__())
    for which in ("plain", "everything"):
        q, k, v, options = case(which).inputs(np.float32)
        for rows in (q.shape[-2], 1):
            spec = spec_of(problem_from(q, k, v, **options), there, rows, entropy=True)
            assert undefined(cache.compile_object(source(spec, there), there, "there")) == []


def test_objects_of_windows_would_want_its_runtime() -> None:
    """Why they are not used; and that the test above can fail."""
    q, k, v, options = case("plain").inputs(np.float32)
    there = replace(target.targets()["avx2"], triple="x86_64-pc-windows-msvc")
    spec = spec_of(problem_from(q, k, v, **options), there, 8, entropy=True)
    assert b"_fltused" in cache.compile_object(source(spec, there), there, "there")
    outside = "declare void @other() define void @kernel() { call void @other() ret void }"
    for triple in ("x86_64-pc-windows-msvc-elf", "x86_64-apple-darwin23.0.0"):
        text = f'target triple = "{triple}" {outside}'
        (symbol,) = undefined(cache.compile_object(text, replace(there, triple=triple), "there"))
        assert symbol.lstrip("_") == "other"


def test_a_port_on_windows_is_served_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """SO_REUSEADDR means something else there."""
    asked: list[int] = []

    class Socket:
        def setsockopt(self, level: int, option: int, value: int) -> None:
            asked.append(option)

        def bind(self, address: tuple[str, int]) -> None: ...

    monkeypatch.setattr(server.socket, "socket", lambda *kind: Socket())
    server._bind(0)
    monkeypatch.setattr(server.socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    server._bind(0)
    assert asked == [server.socket.SO_REUSEADDR, -5]
