"""The cache/ folder of a graph store: what was computed from the graph, and what was found when it was checked.

    cache/index.json     of every array here its checksum, and the stamps of the store when it was checked
          lock           who changes the index holds it
          NAME.npy

Nothing here has to be there: what is missing or damaged is made again. Several processes may read and write at once.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megagraph import files

_FORMAT = "MegaGraph store cache 1"
_REPLACED = "expected {} as it was, got another one: the store was replaced meanwhile"
_NAME = re.compile(r"[\w-]+\.npy", re.ASCII)


def npy_head(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """What a .npy file of version 2.0 begins with; numpy's own depends on its version."""
    sizes = tuple(int(size) for size in shape)
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {sizes!r}, }}".encode()
    length = -(-(13 + len(text)) // 64) * 64 - 12
    return np.lib.format.magic(2, 0) + struct.pack("<I", length) + text.ljust(length - 1) + b"\n"


def names(store: Path) -> list[str]:
    """The files that we wrote here, relative to the store; none where the index is not as it was written."""
    index, own = _read(store), ["cache/index.json", "cache/lock"]
    if index is None:  # none: there was no room for it, or a process was killed
        return [] if os.path.lexists(store / own[0]) else own
    return [*own, *(f"cache/{name}" for name in index["files"])]


def load(store: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
    """An array as it was saved, mapped from its file, or None; what is written to it stays with this process."""
    index, path = _read(store), store / "cache" / name
    head = npy_head(shape, dtype)
    with suppress(OSError, ValueError):  # an empty file cannot be mapped
        if index is None or name not in index["files"] or not path.is_file():
            return None
        content = np.memmap(path, np.uint8, "c")
        if xxhash.xxh3_128_hexdigest(content.data) != index["files"][name] or content[: len(head)].tobytes() != head:
            return None
        return np.ndarray(shape, dtype, buffer=content, offset=len(head))
    return None


def save(store: Path, arrays: dict[str, np.ndarray], instead_of: str | None = None) -> None:
    """Keep arrays, by name, all or none; others whose names begin with ``instead_of`` go.

    Raises:
        OSError: the folder cannot be written, has no room, or was replaced meanwhile.
    """
    folder = store / "cache"
    with _locked(store) as index:
        gone = [x for x in index["files"] if instead_of and x.startswith(instead_of) and x not in arrays]
        for name in gone:
            (folder / name).unlink(missing_ok=True)
            (folder / f"{name}.partial").unlink(missing_ok=True)  # of a process that was killed
        contents = {name: (npy_head(x.shape, x.dtype), np.ascontiguousarray(x)) for name, x in arrays.items()}
        index["files"] = {name: digest for name, digest in index["files"].items() if name not in gone}
        index["files"] |= {name: _checksum(*parts) for name, parts in contents.items()}
        files.write_json(folder / "index.json", index)  # first: no file is ever there that it does not name
        try:
            for name, (head, array) in contents.items():
                with files.replacing(folder / name) as file:
                    file.writelines((head, array.data))
            if _read(store) != index:  # what we wrote last may be in a folder whose index does not name it
                raise FileNotFoundError(_REPLACED.format(folder))
        except OSError:
            for name in contents:
                (folder / name).unlink(missing_ok=True)
            raise


def _checksum(head: bytes, array: np.ndarray) -> str:
    digest = xxhash.xxh3_128(head)
    digest.update(array.data)
    return digest.hexdigest()


def checked(store: Path) -> dict[str, Any] | None:
    """The stamps that were last given to ``remember``."""
    index = _read(store)
    return None if index is None else index["checked"]


def remember(store: Path, stamps: dict[str, Any]) -> None:
    """Note how the store was stamped when all of it was checked.

    Raises:
        OSError: the folder cannot be written, or was replaced meanwhile.
    """
    with _locked(store) as index:
        index["checked"] = stamps
        files.write_json(store / "cache" / "index.json", index)


def _read(store: Path) -> dict[str, Any] | None:
    path = store / "cache" / "index.json"
    with suppress(OSError, ValueError):
        if path.parent.is_symlink() or not path.is_file():
            return None
        index = files.read_json(path, "the index of a cache")
        kept = index.get("files")
        if index.get("format") == _FORMAT and isinstance(kept, dict) and isinstance(index.get("checked"), dict):
            return index if all(_NAME.fullmatch(name) for name in kept) else None
    return None


@contextmanager
def _locked(store: Path) -> Iterator[dict[str, Any]]:
    """The index, for as long as no other process can change it."""
    folder = store / "cache"
    if folder.is_symlink():
        raise OSError(f"expected a folder of our own, got the link {folder}")
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        with suppress(ImportError):  # Windows
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):  # others hold the one that is there now
            raise FileNotFoundError(_REPLACED.format(folder))
        yield _read(store) or {"format": _FORMAT, "files": {}, "checked": {}}
    finally:
        os.close(lock)
