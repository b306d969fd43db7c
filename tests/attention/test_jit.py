"""Compiled functions on disk."""

from __future__ import annotations

import numba
import pytest
from numba.core.dispatcher import Dispatcher
from numba.extending import _Intrinsic

from megagraph.attention import blocked, compiled, jit, lanes, short


def twice(x: int) -> int:
    return 2 * x


def test_a_function_is_compiled_anew_after_a_change_of_what_it_contains(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def loaded() -> bool:
        compiled = jit.jit()(twice)
        assert compiled(21) == 42
        return sum(compiled.stats.cache_hits.values()) == 1

    assert not loaded() and loaded()
    monkeypatch.setattr(jit, "_sources", "those of the next version")
    assert not loaded() and loaded()


def test_every_file_that_compiled_functions_take_in_is_part_of_the_key():
    taken_in = set()
    for module in (blocked, compiled, lanes, short):
        for value in vars(module).values():
            in_compiled_code = isinstance(value, (Dispatcher, _Intrinsic)) or hasattr(value, "_fields")
            if in_compiled_code and value.__module__ != module.__name__:
                taken_in.add(f"{value.__module__.removeprefix('megagraph.attention.')}.py")
    assert taken_in == set(jit._SHARED)
