"""Of processes that need the same compiled function at the same time, one compiles it; the others wait and read it.

Importing this does it. Ranks, workers of pytest and commands all start with the same functions: on a machine of few
cores, each of them compiling all of these takes minutes where nothing has been compiled before.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from megagraph.jit import _Cache

_compile = Dispatcher.compile
_locked: set[Path] = set()  # by this process: a function may contain itself, or another with its name


def _compile_once(self: Dispatcher, sig: Any) -> Any:
    # the lock of all threads first: one of them may hold it and wait for a file that another has locked
    with global_compiler_lock:
        if not isinstance(self._cache, _Cache):
            return _compile(self, sig)
        self._cache._impl.locator.ensure_cache_path()
        path = Path(self._cache.cache_path, f"{self._cache._impl.filename_base}.lock")
        if path in _locked:
            return _compile(self, sig)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # what a function contains is locked after it, never before it
            _locked.add(path)
            try:
                return _compile(self, sig)
            finally:
                _locked.remove(path)


Dispatcher.compile = _compile_once
