"""Files in the user's cache directory, which only their owner may change.

Some are machine code. A directory and a file are opened once, without following a link, and checked by their
descriptors: both belong to this user or to root, and no one else may write to them. A file begins with a hash of its
name and its contents, so that a partial or renamed file is not used. Files are written under a temporary name first. A
file that others could have changed is neither read nor written, and one `RegardWarning` says so; without a writable
directory, nothing is cached.

Windows has no owner or mode in `stat` and opens no directories. There a link is refused and the digest is checked;
write access is left to the directory, which in %LOCALAPPDATA% is the user's alone.

REGARD_CACHE names another directory, or is "off".
"""

import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.warning import RegardWarning

try:  # not by hashlib, which loads OpenSSL: a tenth of a first call
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b

DESCRIPTORS = os.open in os.supports_dir_fd and hasattr(
    os, "geteuid"
)  # Windows has neither descriptors of directories nor owners
FLAGS = 0
for _name in ("O_CLOEXEC", "O_NOINHERIT", "O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"):  # O_NONBLOCK: never wait for a pipe
    FLAGS |= getattr(os, _name, 0)
TEMPORARY = re.compile(r".*-[0-9a-f]{40}\.[a-z]+\.[0-9a-f]{16}\.tmp")
OLD = 3600.0  # seconds after which a temporary file is abandoned
_warned: set[Path] = set()


class _Refused(Exception):
    """Reason why a file or a directory is not used."""


def hash_of(content: bytes = b"") -> blake2b:
    """Return a hash of 32 bytes; `update` adds contents."""
    return blake2b(content, digest_size=32)


def directory() -> Path | None:
    """Return the cache directory; None if there is none, as for a user without a home."""
    chosen = os.environ.get("REGARD_CACHE", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen)
    root = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and os.path.isabs(root):
        return Path(root) / "regard"
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an entry for this user
        return None
    caches = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    return home / caches / "regard" if home.is_absolute() else None


def read(path: Path) -> bytes | None:
    """Return the contents of a cached file.

    The result is None if the file does not exist, is not whole, or could have been changed by others.
    """
    try:
        with _opened(path.parent) as folder, os.fdopen(_open(path, os.O_RDONLY, folder), "rb") as file:
            _check(path, os.fstat(file.fileno()), stat.S_ISREG)
            data = file.read()
    except OSError:
        return None
    except _Refused as refused:
        _warn(path.parent, str(refused))
        return None
    digest, content = data[:32], data[32:]
    return content if _digest(path.name, content) == digest else None


def write(path: Path, content: bytes, first: bool = False) -> None:
    """Write a file for later processes; errors of the disk are ignored.

    first: keep a whole file that another process wrote meanwhile.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _opened(path.parent) as folder:
            _prune(path.parent, folder)
            handle = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_digest(path.name, content) + content)
                if not (first and _linked(temporary, path, folder)):
                    os.replace(_at(temporary, folder), _at(path, folder), src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(_at(temporary, folder), dir_fd=folder)
    except OSError:
        return
    except _Refused as refused:
        _warn(path.parent, str(refused))


def _digest(name: str, content: bytes) -> bytes:
    return hash_of(name.encode() + b"\0" + content).digest()


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Open a directory that no one else may write to.

    Yields None on systems without such descriptors.
    """
    if not DESCRIPTORS:
        _check(path, os.lstat(path), stat.S_ISDIR)
        yield None
        return
    folder = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(path, os.fstat(folder), stat.S_ISDIR)
        yield folder
    finally:
        os.close(folder)


def _open(path: Path, flags: int, folder: int | None = None) -> int:
    """Open a file in an open directory, or a directory, never by a link."""
    if path.is_symlink():  # O_NOFOLLOW refuses a link that is made after this check
        raise _Refused(f"{path} is not used: it is a link")
    return os.open(_at(path, folder), flags | FLAGS, 0o600, dir_fd=folder)


def _at(path: Path, folder: int | None) -> str:
    """Return a path relative to its directory, if that is open."""
    return str(path) if folder is None else path.name


def _check(path: Path, found: os.stat_result, expected: Callable[[int], bool]) -> None:
    """Raise _Refused for a file or directory that others could have changed."""
    mode, reason = stat.S_IMODE(found.st_mode), ""
    if not expected(found.st_mode):
        reason = "it is a link" if stat.S_ISLNK(found.st_mode) else "it is not a file in a directory"
    elif DESCRIPTORS and found.st_uid not in (os.geteuid(), 0):
        reason = f"it belongs to user {found.st_uid}"
    elif DESCRIPTORS and mode & 0o022:
        reason = f"others may write to it (mode {mode:o})"
    if reason:
        raise _Refused(f"{path} is not used: {reason}")


def _warn(folder: Path, reason: str) -> None:
    """Warn once for each directory, even if the warning is an error."""
    if folder not in _warned:
        _warned.add(folder)
        hint = "REGARD_CACHE names another directory, or is off"
        warnings.warn(f"the cache {reason}; {hint}", RegardWarning, stacklevel=2)


def _prune(parent: Path, folder: int | None) -> None:
    """Remove temporary files of processes that were killed."""
    for name in os.listdir(parent if folder is None else folder):
        if TEMPORARY.fullmatch(name):
            with suppress(FileNotFoundError):
                at = _at(parent / name, folder)
                if time.time() - os.stat(at, dir_fd=folder, follow_symlinks=False).st_mtime > OLD:
                    os.unlink(at, dir_fd=folder)


def _linked(temporary: Path, path: Path, folder: int | None) -> bool:
    """Link a file to `path` unless a whole one is there.

    Returns True if `path` now holds a whole file.
    """
    try:
        os.link(_at(temporary, folder), _at(path, folder), src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        return read(path) is not None
    except OSError:  # a file system without links
        return False
    return True
