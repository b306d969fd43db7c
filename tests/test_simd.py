"""Vectors of eight in compiled loops."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numba import njit

from megagraph import simd
from megagraph.attention.cpu.product import product_8, product_16


@njit
def _exp(x, out):
    for i in range(0, len(x), 8):
        simd.store(out, i, simd.exp(simd.load(x, i)))


@njit
def _look_up_and_add_up(table, index, out, sums):
    x = simd.look_up(table, 9, index, 5)
    simd.store(out, 0, x)
    simd.add_up(sums, index, 5, x)


@njit
def _across(x):
    return simd.largest_of(simd.load(x, 0)), simd.sum_of(simd.load(x, 0))


@njit
def _transposed(x, step, out, out_step):
    simd.transposed(x, 2, step, out, 1, out_step)


@njit
def _words(x, out):
    for i in range(0, len(x), 8):
        a = simd.load(x, i)
        simd.store(out, i, (a ^ (a >> simd.splat(np.uint32(5)))) * simd.splat(np.uint32(0x85EBCA6B)))


@njit
def _fetch(x):
    for i in (0, len(x) - 1, -1, len(x), 1 << 40, -(1 << 40)):
        simd.fetch(x, i)


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.float32, -87.3, 88), (np.float64, -708.3, 709)])
def test_exp(dtype, low, high):
    x = np.concatenate([np.linspace(low, high, 1 << 16, dtype=dtype), dtype([0, -0.0, 1e-30, -87, 1, -1, 2, -2])])
    out = np.empty_like(x)
    _exp(x, out)
    exact = np.exp(x.astype(np.longdouble))
    assert np.abs(out / exact - 1).max() < 1.5 * np.finfo(dtype).eps
    ends = dtype([-np.inf, np.nan, low - 1, 2 * low, -1e30, 0, high, low - 0.5])
    out = np.empty_like(ends)
    _exp(ends, out)
    assert np.isnan(out[1]) and (out[[0, 2, 3, 4, 7]] == 0).all() and out[5] == 1


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_product(dtype, vectors, add):
    """Products are of parts of larger matrices, with columns of a side by side or rows."""
    numbers = np.random.default_rng(0)
    product, width = (product_8, product_16)[vectors - 1], 8 * vectors
    a, b, c = (numbers.integers(-9, 9, shape).astype(dtype) for shape in ((20, 30), (20, 40), (20, 50)))
    run = njit(lambda a, a_row, a_k, b, c, add: product(a, 31, a_row, a_k, 7, b, 42, 40, c, 53, 50, add))
    for a_row, a_k, part in ((30, 1, a[1:7, 1:8]), (1, 30, a[1:8, 1:7].T)):
        want, got = c.copy(), c.copy()
        want[1:7, 3 : 3 + width] = part @ b[1:8, 2 : 2 + width] + add * want[1:7, 3 : 3 + width]
        run(a.reshape(-1), a_row, a_k, b.reshape(-1), got.reshape(-1), add)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tables(dtype):
    numbers = np.random.default_rng(0)
    index, table = numbers.integers(0, 256, 20, dtype=np.uint8), numbers.standard_normal(300).astype(dtype)
    out, sums = np.zeros(8, dtype), np.zeros((256, 8), dtype)
    _look_up_and_add_up(table, index, out, sums.reshape(-1))
    np.testing.assert_array_equal(out, table[9 + index[5:13].astype(int)])
    want = np.zeros_like(sums)
    want[index[5:13], range(8)] = out
    np.testing.assert_array_equal(sums, want)
    assert _across(out) == (out.astype(np.float64).max(), pytest.approx(out.sum(), rel=1e-6))


def test_transposed():
    x = np.arange(100, dtype=np.float32)
    out = np.zeros(100, np.float32)
    _transposed(x, 11, out, 9)
    rows = np.lib.stride_tricks.as_strided(x[2:], (8, 8), (44, 4))
    got = np.lib.stride_tricks.as_strided(out[1:], (8, 8), (36, 4))
    assert (got == rows.T).all() and (out != 0).sum() == 64


def test_words_wrap():
    x = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    out = np.empty_like(x)
    _words(x, out)
    assert out.tolist() == [(a ^ a >> 5) * 0x85EBCA6B % 2**32 for a in x.tolist()]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_fetch_of_what_is_not_there(dtype):
    x = np.arange(100).astype(dtype)
    _fetch(x)
    assert (x == np.arange(100).astype(dtype)).all()
    assert "prefetch" in next(iter(_fetch.inspect_asm().values()))


@njit
def _borrowed_sum(x, pair):
    (y, _), z = simd.borrowed((pair, x))
    return y[0] + z[1]


def test_borrowed_arrays_stay_with_the_caller():
    x, y = np.arange(3.0), np.full(2, 5.0)
    counts = sys.getrefcount(x), sys.getrefcount(y)
    for _ in range(100):
        assert _borrowed_sum(x, (y, 7)) == 6
    assert (sys.getrefcount(x), sys.getrefcount(y)) == counts


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wide(dtype):
    """Sixteen numbers side by side: read, written, made of eight and folded to eight."""

    @njit
    def run(x, out, sums):
        wide = simd.multiply_add(simd.twice(simd.load(x, 0)), simd.load_wide(x, 3), simd.load_wide(x, 5))
        simd.store(out, 1, wide + wide)
        simd.store(sums, 1, simd.folded(wide))

    x, out, sums = np.random.default_rng(0).integers(-9, 9, 21).astype(dtype), np.zeros(18, dtype), np.zeros(10, dtype)
    run(x, out, sums)
    wide = np.tile(x[:8], 2) * x[3:19] + x[5:21]
    np.testing.assert_array_equal(out, [0, *(2 * wide), 0])
    np.testing.assert_array_equal(sums, [0, *(wide[:8] + wide[8:]), 0])
