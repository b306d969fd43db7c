"""Compiled functions that are kept on disk until any source they are made of changes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

_attention = Path(__file__).with_name("attention")
# compiled functions of these are in functions of other files: a change of one is a change of all
_TAKEN_IN = (*sorted(_attention.glob("cpu/[!.]*.py")), _attention / "packing.py")
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
        origin, data = pickle.loads(content[16:])
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


def jit(**options: bool) -> Callable[[Callable], Any]:
    """``numba.njit(cache=True, **options)``, for processes that start at the same time, too."""

    def compiled(function: Callable) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher._cache = _Cache(function)
        return dispatcher

    return compiled
