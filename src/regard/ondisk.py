"""Files in the user's cache directory, readable by their owner alone.

They are written under another name first, so that processes never see half of one, and begin with a hash of their
contents: what does not match is as good as not there. REGARD_CACHE names another directory, or is "off".
"""

import os
import sys
import tempfile
from pathlib import Path

try:  # without OpenSSL, whose loading by hashlib is a tenth of a first call
    from _blake2 import blake2b
except ImportError:
    from hashlib import blake2b


def hash_of(content: bytes = b"") -> blake2b:
    """32 bytes; more contents may follow by `update`."""
    return blake2b(content, digest_size=32)


def directory() -> Path | None:
    """Where files are kept; None if they are not."""
    chosen = os.environ.get("REGARD_CACHE", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", str(Path.home())))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "regard"


def read(path: Path) -> bytes | None:
    """What was written to `path`; None if there is nothing, if it is not whole, or if it is not ours alone."""
    try:
        if hasattr(os, "getuid") and path.stat().st_uid != os.getuid():
            return None
        data = path.read_bytes()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    return content if hash_of(content).digest() == digest else None


def write(path: Path, content: bytes, first: bool = False) -> None:
    """Leave a file for later processes. A disk that is full or read-only costs no more than time.

    first: what another process has left there in the meantime stays, if it is whole.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hash_of(content).digest() + content)
            if first and _linked(temporary, path):
                os.unlink(temporary)
            else:
                os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


def _linked(temporary: str, path: Path) -> bool:
    """Whether `path` now holds something whole, which this did not replace; of several processes one is the first."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return read(path) is not None
    except OSError:  # a file system without links
        return False
    return True
