"""Files in the cache directory: used only where nobody else could have written them, and never in the way."""

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regard import RegardWarning
from regard.runtime import diskcache

NAME = f"forward-{'0' * 40}.o"
posix = pytest.mark.skipif(os.name == "nt", reason="owners and modes")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(diskcache, "_warned", set())
    return tmp_path / "cache" / NAME


def refused(path: Path, what: Path, reason: str) -> None:
    """Nothing is read, with one warning however often it is asked for."""
    text = f"the cache {what} is not used: {reason}; REGARD_CACHE names another directory, or is off"
    with pytest.warns(RegardWarning, match=f"^{re.escape(text)}$"):
        assert diskcache.read(path) is None
    assert diskcache.read(path) is None  # warnings are errors in these tests


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    assert diskcache.read(path) is None
    for content in (b"first", b"", b"second"):
        diskcache.write(path, content)
        assert diskcache.read(path) == content
    assert os.listdir(path.parent) == [NAME]


@pytest.mark.parametrize("descriptors", [True, False])
def test_a_file_under_the_name_of_another_is_not_used(
    path: Path, descriptors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diskcache, "DESCRIPTORS", descriptors and diskcache.DESCRIPTORS)
    diskcache.write(path, b"machine code")
    other = path.with_name(f"backward-{'0' * 40}.o")
    path.rename(other)
    assert diskcache.read(other) is None


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, 0o777])
def test_a_file_that_others_may_write_to_is_replaced(path: Path, mode: int) -> None:
    diskcache.write(path, b"machine code")
    path.chmod(mode)
    refused(path, path, f"others may write to it (mode {mode:o})")
    diskcache.write(path, b"new")
    assert diskcache.read(path) == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_not_used(path: Path, mode: int) -> None:
    diskcache.write(path, b"machine code")
    path.parent.chmod(mode)
    refused(path, path.parent, f"others may write to it (mode {mode:o})")
    path.unlink()
    diskcache.write(path, b"new")
    assert os.listdir(path.parent) == []


@posix
@pytest.mark.parametrize("of", ["file", "directory"])
def test_the_files_of_another_user_are_not_used(path: Path, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    diskcache.write(path, b"machine code")
    what = path if of == "file" else path.parent
    owner = what.stat().st_uid
    if owner == 0:
        owner = 12345
        os.chown(what, owner, -1)
    else:  # then of another user is what is this one's
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        if of == "file":
            pytest.skip("the directory would be another user's too")
    refused(path, what, f"it belongs to user {owner}")


@posix
def test_the_files_of_root_are_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diskcache.write(path, b"machine code")
    if path.stat().st_uid:
        pytest.skip("only root can make a file of root")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert diskcache.read(path) == b"machine code"


@posix
@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("of", ["file", "directory"])
def test_links_are_not_followed(path: Path, of: str, descriptors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diskcache, "DESCRIPTORS", descriptors and diskcache.DESCRIPTORS)
    diskcache.write(path, b"machine code")
    what = path if of == "file" else path.parent
    there = what.rename(what.with_name("elsewhere"))
    what.symlink_to(there)
    refused(path, what, "it is a link")
    diskcache.write(path, b"new")
    assert diskcache.read(path) == (b"new" if of == "file" else None)
    assert (there if of == "file" else there / NAME).read_bytes().endswith(b"machine code")


@posix
def test_a_link_made_after_the_look_is_refused_by_the_system(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diskcache.write(path, b"machine code")
    path.symlink_to(path.rename(path.with_name("elsewhere")))
    monkeypatch.setattr(Path, "is_symlink", lambda self: False)
    assert diskcache.read(path) is None


@posix
def test_a_directory_exchanged_after_the_check_gives_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read lies in the directory that was checked, and not in one that has its name since."""
    theirs, check = path.parent.with_name("theirs"), diskcache._check
    diskcache.write(path, b"ours")
    diskcache.write(theirs / NAME, b"theirs")

    def exchanged(at: Path, *facts: Any) -> None:
        check(at, *facts)
        if at == path.parent and theirs.exists():
            at.rename(at.with_name("ours"))
            theirs.rename(at)

    monkeypatch.setattr(diskcache, "_check", exchanged)
    assert diskcache.read(path) == b"ours"


@posix
def test_a_pipe_is_not_waited_for(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    os.mkfifo(path)
    refused(path, path, "it is not a file in a directory")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_a_disk_that_takes_nothing_costs_nothing(
    path: Path, call: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, call, fails)
    diskcache.write(path, b"machine code")
    monkeypatch.undo()
    assert diskcache.read(path) is None
    assert not path.parent.exists() or os.listdir(path.parent) == []


FULL = """
import resource, signal, sys
from pathlib import Path
from regard.runtime import diskcache
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # as on a disk with so much left
diskcache.write(Path(sys.argv[1]), b"x" * 5000)
assert diskcache.read(Path(sys.argv[1])) is None
"""


@posix
def test_a_disk_that_is_full_keeps_no_part_of_a_file(path: Path) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FULL, str(path)], check=True)
    assert os.listdir(path.parent) == []


def test_temporary_files_of_killed_processes_are_removed(path: Path) -> None:
    diskcache.write(path, b"machine code")
    stale, fresh = (path.with_name(f"{NAME}.{n:016x}.tmp") for n in range(2))
    others = path.with_name("notes.tmp")
    for file in (stale, fresh, others):
        file.write_bytes(b"half")
    for file in (stale, others):
        os.utime(file, (0, 0))
    diskcache.write(path, b"again")
    assert {file.name for file in path.parent.iterdir()} == {NAME, fresh.name, others.name}


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REGARD_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert diskcache.directory() is None


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the directories of Linux")
def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_CACHE", raising=False)
    for base, folder in {
        "/fast": "/fast/regard",
        "": "/home/someone/.cache/regard",
        "relative": "/home/someone/.cache/regard",  # not used, as the XDG specification asks
    }.items():
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert diskcache.directory() == Path(folder)
    monkeypatch.setenv("HOME", "relative")
    assert diskcache.directory() is None
