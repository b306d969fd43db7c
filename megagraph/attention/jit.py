"""Compiled functions that are kept on disk until any source they are made of changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

_SHARED = ("arrays.py", "compiled.py", "lanes.py", "packing.py")  # what functions of other files contain
_sources = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in _SHARED)).hexdigest()


class _Cache(FunctionCache):
    """Numba itself looks at the file of a function only, and would go on with old code of all that it calls."""

    def _index_key(self, *signature: Any) -> tuple:
        return *super()._index_key(*signature), _sources


def jit(**options: bool) -> Callable[[Callable], Any]:
    """``numba.njit(cache=True, **options)``."""

    def compiled(function: Callable) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher._cache = _Cache(function)
        return dispatcher

    return compiled
