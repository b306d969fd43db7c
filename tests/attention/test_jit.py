"""Compiled functions on disk."""

from __future__ import annotations

import numba
import pytest

from megagraph.attention import jit


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
