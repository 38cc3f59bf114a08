"""Compilation of kernels, and object code on disk.

Objects are files in the user's cache directory (`regard.runtime.diskcache`), each named by a hash of all that it
depends on. A file is compiled anew if it is truncated, if others could have changed it, or if LLVM rejects it.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm

from regard.engines.cpu.target.instructions import Target, native_triple
from regard.runtime import diskcache
from regard.runtime.bounded import insert
from regard.runtime.forks import renewed
from regard.version import __version__

# Kernels are written as they should run: after these passes they are as fast as after all of LLVM's usual ones.
PASSES = (
    "sroa", "simplify_cfg", "instruction_combine", "new_gvn", "simplify_cfg", "instruction_combine",
)  # fmt: skip
_lock = renewed(sys.modules[__name__], "_lock", threading.RLock)  # reentrant, as a signal's handler may compile too
_loaded: dict[tuple[str, str], "Compiled"] = {}
_objects: dict[str, bytes] = {}
MOST_OBJECTS = 16  # in memory, each some 10 to 50 kB


SOON = 1.0
"""Seconds of compilation before an announcement."""


@dataclass
class _Busy:
    """A period of compilation without a pause of a second.

    since: its start. until: its end so far.
    """

    since: float = -SOON
    until: float = -SOON
    logged: bool = False


_busy = _Busy()


@dataclass(frozen=True)
class Compiled:
    """Machine code in memory.

    A call takes the address of the fields and runs without the GIL.
    """

    name: str
    call: Any
    library: Any
    from_disk: bool

    @property
    def address(self) -> int:
        return int(self.call.address)

    def __call__(self, fields: int) -> None:
        self.call(fields)


def kernel(key: str, name: str, target: Target, source: Callable[[], str]) -> Compiled:
    """Return the compiled kernel of a key.

    source: writes its IR if it has to be compiled.
    """
    where = (key, target.name)
    compiled = _loaded.get(where)
    if compiled is None:
        with _lock:
            compiled = _loaded.get(where)
            if compiled is None:
                compiled = _loaded[where] = _make(key, name, target, source)
    return compiled


def forget() -> None:
    """Drop every compiled kernel from memory, so that the next call looks on disk."""
    with _lock:
        _loaded.clear()
        _objects.clear()


@cache
def _sources(folder: Path = Path(__file__).parents[1]) -> str:
    """Return a hash of all modules below `engines/cpu`, so that any change recompiles."""
    digest = diskcache.hash_of()
    for file in sorted(folder.rglob("*.py")):
        code = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()} {len(code)}\n".encode() + code)
    return digest.hexdigest()


def identity(key: str, target: Target) -> str:
    """Return the name of an object: a hash of all that it depends on."""
    versions = (__version__, llvmlite.__version__, str(llvm.llvm_version_info))
    parts = (key, repr(target), _sources(), *versions)
    return diskcache.hash_of("\0".join(parts).encode()).hexdigest()


def _make(key: str, name: str, target: Target, source: Callable[[], str]) -> Compiled:
    _initialize(True)
    label = f"{name}-{identity(key, target)[:40]}"
    folder = diskcache.directory()
    path = None if folder is None else folder / f"{label}.o"
    code = None if path is None or os.environ.get("REGARD_DUMP") else diskcache.read(path)
    if code is not None:
        with suppress(RuntimeError):  # from LLVM: a whole file, but no object with this kernel
            return _load(name, label, code, True)
    with announced():
        code = compile_object(source(), target, label)
    if path is not None:
        diskcache.write(path, code)
    return _load(name, label, code, False)


def stored_object(key: str, name: str, target: Target, source: Callable[[], str]) -> bytes:
    """Return object code to run elsewhere, from memory or disk if it is there."""
    label, folder = f"{name}-{identity(key, target)[:40]}", diskcache.directory()
    if label in _objects:
        return _objects[label]
    path = None if folder is None else folder / f"{label}.o"
    code = None if path is None or os.environ.get("REGARD_DUMP") else diskcache.read(path)
    if code is None:
        with _lock, announced():
            code = compile_object(source(), target, label)
        if path is not None:
            diskcache.write(path, code)
    insert(_objects, label, code, MOST_OBJECTS)
    return code


@contextmanager
def announced() -> Iterator[None]:
    """Announce after a second that kernels are being compiled.

    On a terminal, standard error shows the seconds, and is cleared afterwards. Elsewhere it is a log record.
    """
    now = time.monotonic()
    if now - _busy.until > SOON:
        _busy.since, _busy.logged = now, False
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(done,), name="regard-compiling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
        _busy.until = time.monotonic()


def _tell(done: threading.Event) -> None:
    if done.wait(max(0.0, SOON - (time.monotonic() - _busy.since))):
        return
    if sys.stderr is None or not sys.stderr.isatty():
        if not _busy.logged:
            import logging

            _busy.logged = True
            logging.getLogger("regard").info("compiling kernels for this processor, which is done once for each kind")
        return
    shown = False
    while not shown or not done.wait(SOON):
        shown = True
        seconds = time.monotonic() - _busy.since
        print(f"\r\033[Kregard: compiling kernels, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr, flush=True)


def compile_object(text: str, target: Target, label: str) -> bytes:
    """Compile LLVM IR to object code.

    With REGARD_DUMP=directory, IR and assembly are written there.
    """
    _initialize(target.triple == native_triple())
    machine = _machine(target)
    module = llvm.parse_assembly(text)
    if target.wasm:  # kernels never assume 64-bit pointers, and LLVM must not either
        module.data_layout = str(machine.target_data)
    module.verify()
    passes = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    dump = os.environ.get("REGARD_DUMP")
    if dump:
        Path(dump).mkdir(parents=True, exist_ok=True)
        (Path(dump) / f"{label}.{target.name}.ll").write_text(text, "utf-8")
    with _loops_as_written():
        if dump:
            (Path(dump) / f"{label}.{target.name}.s").write_text(machine.emit_assembly(module), "utf-8")
        return bytes(machine.emit_object(module))


@contextmanager
def _loops_as_written() -> Iterator[None]:
    """Disable LLVM's loop strength reduction.

    The pass takes half of LLVM's time, and `values.Count` has done its work.
    """
    llvm.set_option("regard", "-disable-lsr=true")
    try:
        yield
    finally:
        llvm.set_option("regard", "-disable-lsr=false")  # options are shared by every user of LLVM in the process


def _machine(target: Target) -> Any:
    arch = llvm.Target.from_triple(target.triple)
    # The small model reads constants relative to the code, in one piece of memory; WebAssembly reads them at addresses.
    reloc = "static" if target.wasm else "pic"
    return arch.create_target_machine(cpu=target.cpu, features=target.features, opt=2, reloc=reloc, codemodel="small")


@cache
def _initialize(native: bool) -> None:
    """Load LLVM's code generators: this machine's, or all of them, which takes longer."""
    if native:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()


@cache
def _linker() -> Any:
    # The default linker may put code and constants too far apart for the small code model.
    return llvm.create_lljit_compiler(use_jit_link=True)


_names = iter(range(1 << 62))


def _load(name: str, label: str, code: bytes, from_disk: bool) -> Compiled:
    builder = llvm.JITLibraryBuilder().add_object_img(code).add_current_process().export_symbol(name)
    library = builder.link(_linker(), f"{label}-{next(_names)}")
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(library[name])
    call.library, call.address = library, library[name]  # cached calls hold this alone, also after `forget`
    return Compiled(name, call, library, from_disk)
