"""One process at a time writes a folder."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from megagraph import files
from megagraph.progress import log

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BEAT_SECONDS = 5.0  # where the file system has no locks, the holder writes its file so often
DEAD_SECONDS = 30.0  # a holder that has not written for so long is gone
_POLL_SECONDS = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Lock:
    """FOLDER/lock, held by this process until ``release`` or its end, however it ends; by none of its children.

    The file says who holds it: host, process and since when. Where the file system knows no locks, it is written anew
    every few seconds, and a warning says so.

    Args:
        folder: must be there.
        wait_seconds: for another process to let go, as one that a scheduler is about to end.

    Raises:
        TimeoutError: somebody else holds it still; names the holder.
    """

    def __init__(self, folder: Path, wait_seconds: float = 0.0) -> None:
        self.path = folder / "lock"
        self._descriptor: int | None = None
        self._released = threading.Event()
        self._holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        deadline = time.monotonic() + wait_seconds
        told = seen = None
        while not self._acquire(seen):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{folder} is in use by {_holder(self.path)}; wait for its end, or pass a longer --lock-wait"
                )
            if told is None:
                told = f"{folder} is in use by {_holder(self.path)}; waiting up to {wait_seconds:g} s for its end"
                log.warning(told)
            seen = self._look(seen)
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let go, and remove the file."""
        if self._released.is_set():
            return
        self._released.set()
        with suppress(OSError):
            self.path.unlink()
        if self._descriptor is not None:
            _held.discard(self)
            os.close(self._descriptor)
            self._descriptor = None

    def _acquire(self, seen: tuple[float, bytes] | None) -> bool:
        if fcntl is None:
            return self._acquire_by_beats(seen)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return self._acquire_by_beats(seen)
            return False
        if not self._is_the_file(descriptor):  # who held it has removed it
            os.close(descriptor)
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(self._holder).encode())
        self._descriptor = descriptor
        _held.add(self)
        return True

    def _is_the_file(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _acquire_by_beats(self, seen: tuple[float, bytes] | None) -> bool:
        content = _read(self.path)
        if content and not (seen is not None and seen[1] == content and time.monotonic() - seen[0] > DEAD_SECONDS):
            return False
        beat = self._beat()
        try:
            files.write(self.path, beat)
        except (FileExistsError, FileNotFoundError):  # another writes the same partial file now
            return False
        time.sleep(2 * _POLL_SECONDS)  # two may have found it free: the last one has it
        if _read(self.path) != beat.encode():
            return False
        log.warning(
            f"the file system of {self.path.parent} has no locks; two runs in it may be noticed only after "
            f"{BEAT_SECONDS:g} s"
        )
        threading.Thread(target=self._go_on, name="megagraph-lock", daemon=True).start()
        return True

    def _beat(self) -> str:
        return json.dumps(self._holder | {"beat": time.time()})

    def _go_on(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with suppress(OSError):
                files.write(self.path, self._beat())

    def _look(self, seen: tuple[float, bytes] | None) -> tuple[float, bytes]:
        """When the file was seen to change last, by this machine's clock, and its content."""
        content = _read(self.path)
        return seen if seen is not None and seen[1] == content else (time.monotonic(), content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _holder(path: Path) -> str:
    try:
        who: dict[str, Any] = json.loads(_read(path))
        return f"process {who['pid']} on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A child that outlives this process, such as a loader worker, must not hold its locks."""
    for lock in _held:
        if lock._descriptor is not None:
            os.close(lock._descriptor)
            lock._descriptor = None
            lock._released.set()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
