"""Compiled functions on disk."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
import xxhash
from numba.core.dispatcher import Dispatcher
from numba.extending import _Intrinsic

from megagraph import jit, simd
from megagraph.attention.cpu import dropout, pair, pairs, product, row, rows, tile, tiles, views
from megagraph.data import power_loops, traversal


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


def test_processes_that_compile_at_the_same_time_keep_their_own_code(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """One saves while the other is about to, both for the first time."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    whole, real = jit.jit()(twice), jit.jit()(twice)
    cache, save = whole._cache, type(whole._cache._cache_file)._open_for_write

    def open_late(self, path):
        if self is cache._cache_file and not real.signatures:
            assert real(0.5) == 1.0
        return save(self, path)

    monkeypatch.setattr(type(cache._cache_file), "_open_for_write", open_late)
    assert whole(21) == 42
    later = jit.jit()(twice)
    assert later(0.75) == 1.5 and later(22) == 44
    assert sum(later.stats.cache_hits.values()) == 2


def _compiles(folder: str, barrier: Any, queue: Any) -> None:
    numba.config.CACHE_DIR = folder
    compiled = jit.jit()(twice)
    barrier.wait()
    assert compiled(21) == 42
    queue.put(sum(compiled.stats.cache_misses.values()))


@pytest.mark.slow
def test_of_processes_that_need_a_function_one_compiles_it(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_compiles, args=(str(tmp_path), barrier, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(queue.get(timeout=100) for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()


def test_damaged_code_is_compiled_again(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert jit.jit()(twice)(21) == 42
    (file,) = tmp_path.rglob("*.nbc")
    whole = file.read_bytes()
    moved = b"cmegagraph.attention.cpu.no_more\nVector\n."  # a pickle of a class of a file that is gone
    older = xxhash.xxh3_128_digest(moved) + moved
    for damaged in (b"", whole[:10], whole[:-1], whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:], older):
        file.write_bytes(damaged)
        again = jit.jit()(twice)
        assert again(21) == 42 and sum(again.stats.cache_hits.values()) == 0
        assert file.read_bytes()[16:] and jit.jit()(twice)(21) == 42


def test_every_file_that_compiled_functions_take_in_is_part_of_the_key():
    taken_in = set()
    for module in (dropout, pair, pairs, power_loops, product, row, rows, simd, tile, tiles, traversal, views):
        for value in vars(module).values():
            in_compiled_code = isinstance(value, (Dispatcher, _Intrinsic)) or hasattr(value, "_fields")
            if in_compiled_code and value.__module__ != module.__name__:
                taken_in.add(Path(sys.modules[value.__module__].__file__))
    assert len(taken_in) > 5 and taken_in <= set(jit._TAKEN_IN)
