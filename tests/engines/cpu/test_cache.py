"""Object code on disk: found again, rebuilt when corrupt, shared between processes, turned off."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding as llvm

import regard
from regard.engines.cpu.language.kernel import Kernel
from regard.engines.cpu.language.types import I64
from regard.engines.cpu.target import cache
from regard.engines.cpu.target.instructions import chosen
from regard.runtime import diskcache

X = np.random.default_rng(0).standard_normal((1, 20, 8)).astype(np.float32)
CHILD = """
import numpy as np, regard, sys
x = np.load(sys.argv[1])
sys.stdout.write(regard.attention(x, x, x, causal=True, engine="cpu").tobytes().hex())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "objects"))
    monkeypatch.delenv("REGARD_DUMP", raising=False)
    cache.forget()
    return tmp_path / "objects"


def call() -> bytes:
    bits: bytes = regard.attention(X, X, X, causal=True, engine="cpu").tobytes()
    return bits


def compiled() -> list[bool]:
    """For each kernel in memory, whether it came from disk."""
    return [x.from_disk for x in cache._loaded.values()]


def test_a_change_of_any_module_makes_another_key(tmp_path: Path) -> None:
    """In folders below as well, and where a module moves from one to another."""
    without = shutil.ignore_patterns("__pycache__")
    copy = shutil.copytree(Path(cache.__file__).parents[1], tmp_path / "cpu", ignore=without)
    (copy / "kernels" / "parts").mkdir(parents=True)
    (copy / "kernels" / "parts" / "softmax.py").write_text("x = 1\n")
    modules = sorted(copy.rglob("*.py"))
    keys = [cache._sources.__wrapped__(copy)]
    for module in modules:
        code = module.read_bytes()
        module.write_bytes(code.replace(b"\n", b" \n", 1))
        keys.append(cache._sources.__wrapped__(copy))
        module.write_bytes(code)
    (copy / "kernels" / "parts" / "softmax.py").rename(copy / "kernels" / "softmax.py")
    keys.append(cache._sources.__wrapped__(copy))
    assert len(set(keys)) == len(keys) == len(modules) + 2


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    first = call()
    assert compiled() == [False]
    (file,) = folder.iterdir()
    assert file.suffix == ".o"
    cache.forget()
    assert call() == first
    assert compiled() == [True]


@pytest.mark.skipif(os.name == "nt", reason="permissions")
def test_others_cannot_read_it(folder: Path) -> None:
    call()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:100], lambda x: x[:-1] + bytes([x[-1] ^ 1])])
def test_a_corrupt_entry_is_rebuilt(folder: Path, damage: "object") -> None:
    first = call()
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    cache.forget()
    assert call() == first
    assert compiled() == [False]
    cache.forget()
    call()
    assert compiled() == [True]


NO_OBJECTS = {
    "empty": b"",
    "text": b"no object",
    "begin": b"\x7fELF",
    "zeros": bytes(5000),
    "half": None,
    "other": None,
}


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_whole_file_that_is_no_object_is_compiled_again(folder: Path, content: str) -> None:
    first = call()
    (file,) = folder.iterdir()
    code = diskcache.read(file)
    assert code is not None
    other = cache.compile_object("define void @other(i8* %x) { ret void }", chosen(), "other")
    diskcache.write(file, {**NO_OBJECTS, "half": code[: len(code) // 2], "other": other}[content])
    for from_disk in (False, True):
        cache.forget()
        assert call() == first
        assert compiled() == [from_disk]


@pytest.mark.skipif(os.name == "nt", reason="permissions")
@pytest.mark.parametrize("of", ["file", "directory"])
def test_code_that_others_could_have_written_does_not_run(
    folder: Path, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call()
    (file,) = folder.iterdir()
    (file if of == "file" else folder).chmod(0o777)
    cache.forget()
    monkeypatch.setattr(diskcache, "_warned", set())
    with pytest.warns(regard.RegardWarning, match="others may write to it"):
        assert call() == first
    assert compiled() == [False]


@pytest.mark.skipif(os.name == "nt", reason="permissions")
def test_a_warning_as_an_error_is_raised_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    monkeypatch.setattr(diskcache, "_warned", set())
    with pytest.raises(regard.RegardWarning, match="others may write to it"):  # warnings are errors in these tests
        call()
    call()
    assert compiled() == [False]


HOMELESS = """
import os, sys
import numpy as np
import regard
from regard.runtime import diskcache
from regard.engines.cpu.target import cache
x = np.load(sys.argv[1])
for name in ("REGARD_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
    os.environ.pop(name, None)
if hasattr(os, "geteuid") and os.geteuid() == 0:  # a user without an entry, as in containers
    os.environ["REGARD_CACHE"] = "off"
    regard.attention(x, x, x, causal=True, engine="cpu")
    del os.environ["REGARD_CACHE"]
    cache.forget()
    os.setuid(54321)
sys.stdout.write(regard.attention(x, x, x, causal=True, engine="cpu").tobytes().hex())
"""


def test_a_user_without_a_home(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-W", "error", "-c", HOMELESS, str(tmp_path / "x.npy")]
    (tmp_path / "x.npy").chmod(0o644)
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert found == call().hex()


def test_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", "off")
    call()
    assert compiled() == [False]
    assert not folder.exists()


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    folder.write_text("a file, not a directory")
    call()
    assert compiled() == [False]


def test_two_processes_at_once(folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    command = [sys.executable, "-c", CHILD, str(tmp_path / "x.npy")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {child.communicate()[0] for child in children} == {call().hex()}
    assert [file.suffix for file in folder.iterdir()] == [".o"]


def test_numbers_in_rules_do_not_compile_again() -> None:
    for left in (3, 5, 11):
        regard.attention(X, X, X, mask=regard.window(left), score=regard.softcap(left + 0.5), engine="cpu")
    assert len(cache._loaded) == 1


def test_a_dump_shows_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_DUMP", str(tmp_path / "dump"))
    call()
    assert sorted(file.suffix for file in (tmp_path / "dump").iterdir()) == [".ll", ".s"]


SCATTERED = """
import mmap
import numpy as np
import regard
from regard.runtime import diskcache
from regard.engines.cpu.schedule import work  # with all that it loads
holes, kept = [], []
for _ in range(64):
    holes.append(mmap.mmap(-1, 4096))
    kept.append(mmap.mmap(-1, 4096))
large = mmap.mmap(-1, 5 << 30)
full = [mmap.mmap(-1, 8 * 4096) for _ in range(12000)]  # no room for code above the next one
lower = mmap.mmap(-1, 5 << 30)
for hole in holes:  # room for constants far from it
    hole.close()
x = np.ones((2, 16, 8), np.float32)
for options in ({}, {"causal": True}, {"score": regard.softcap(1.0)}):
    assert np.allclose(regard.attention(x, x, x, **options), 1)
"""


def test_other_users_of_llvm_compile_as_before() -> None:
    """Options of LLVM are the process's: a loop that they change is compiled the same after a kernel."""
    target = chosen()
    k = Kernel("strided", target, ("y",))
    i = k.variable(k.constant(I64, 0))
    with k.loop_while(lambda: i.value < 1000):
        (k.pointer("y", I64) + i.value * 1001)[i.value * 7] = i.value
        i.value = i.value + 1
    text = k.text()

    def alone() -> bytes:
        machine, module = cache._machine(target), llvm.parse_assembly(text)
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
        return bytes(machine.emit_object(module))

    call()
    before = alone()
    cache.compile_object(text, target, "strided")
    assert alone() == before
    with cache._loops_as_written():
        assert alone() != before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="knows where Linux puts memory")
def test_code_and_constants_lie_together() -> None:
    subprocess.run([sys.executable, "-c", SCATTERED], check=True, capture_output=True)
