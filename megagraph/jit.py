"""Compiled functions that are kept on disk until any source they are made of changes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_here = Path(__file__).parent
# compiled functions of these are in functions of other files: a change of one is a change of all
_TAKEN_IN = (*sorted(_here.glob("attention/cpu/[!.]*.py")), _here / "attention" / "packing.py", _here / "simd.py")
_sources = hashlib.sha256(b"".join(path.read_bytes() for path in _TAKEN_IN)).hexdigest()


class _Files(IndexDataCacheFile):
    """A file for each signature and CPU, named after them.

    Numba numbers its files in an index, and processes that compile at the same time take the same number: a third one
    then runs the machine code of one signature on arguments of another.
    """

    def save(self, key: tuple, data: Any) -> None:
        content = self._dump((self._origin(key), data))
        with suppress(OSError), self._open_for_write(self._path(key)) as file:  # else it is compiled again next time
            file.write(xxhash.xxh3_128_digest(content) + content)

    def load(self, key: tuple) -> Any:
        """What was saved, or None: nothing was, or it is damaged or of other sources."""
        try:
            content = Path(self._path(key)).read_bytes()
        except OSError:
            return None
        if content[:16] != xxhash.xxh3_128_digest(content[16:]):
            return None
        try:
            origin, data = pickle.loads(content[16:])
        except (ImportError, AttributeError):  # of sources with names that are no more
            return None
        return data if origin == self._origin(key) else None

    def _path(self, key: tuple) -> str:
        signature, target, *_ = key
        name = xxhash.xxh3_64_hexdigest(repr((signature, target)).encode())
        return self._data_path(self._data_name_pattern.replace("{number:d}", name))

    def _origin(self, key: tuple) -> str:
        return repr((self._version, self._source_stamp, key))


class _Cache(FunctionCache):
    """Numba itself looks at the file of a function only, and would go on with old code of all that it calls."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def _index_key(self, *signature: Any) -> tuple:
        return *super()._index_key(*signature), _sources


_locked: set[Path] = set()  # by this process: a function may contain itself, or another with its name


@contextmanager
def _alone(cache: _Cache) -> Iterator[None]:
    """No other process compiles this function in the meantime, where the file system has locks."""
    path = Path(cache.cache_path, f"{cache._impl.filename_base}.lock")
    if fcntl is None or path in _locked:
        yield
        return
    try:
        cache._impl.locator.ensure_cache_path()
        file = path.open("w")
    except OSError:  # then nothing is kept either
        yield
        return
    with file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX)  # of this process, and of none that it forks
        _locked.add(path)
        try:
            yield
        finally:
            _locked.remove(path)


def _compile(whole: Callable[[Any], Any], cache: _Cache, signature: Any) -> Any:
    """Compile a function once: of processes that need it at the same time, as all ranks of a machine do, one does; the
    others wait and read it."""
    # the lock of all threads first: one of them may hold it and wait for a file that another has locked
    with global_compiler_lock, _alone(cache):  # what a function contains is locked after it, never before it
        return whole(signature)


def jit(**options: bool) -> Callable[[Callable], Any]:
    """``numba.njit(cache=True, **options)``, for processes that start at the same time, too."""

    def compiled(function: Callable) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher._cache = cache = _Cache(function)
        dispatcher.compile = partial(_compile, dispatcher.compile, cache)
        return dispatcher

    return compiled
