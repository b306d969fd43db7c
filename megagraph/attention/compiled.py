"""What torch would do in many passes over memory, compiled by Numba on its first call and kept on disk.

Arrays are contiguous; row_keys, uint32 [R], and threshold, uint32, are those of ``megagraph.attention.dropout``.
"""

from __future__ import annotations

import numpy as np
from numba import njit

GOLDEN = np.uint32(0x9E3779B9)
MUL_1 = np.uint32(0x85EBCA6B)
MUL_2 = np.uint32(0xC2B2AE35)


@njit(cache=True, nogil=True)
def _mix32(h):
    # Numba computes in 64 bits unless told otherwise
    h = np.uint32((h ^ (h >> np.uint32(16))) * MUL_1)
    h = np.uint32((h ^ (h >> np.uint32(13))) * MUL_2)
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(cache=True, nogil=True)
def _hash(row_key, column):
    return _mix32(row_key ^ np.uint32(np.uint32(column) * GOLDEN))


@njit(cache=True, nogil=True)
def mix32_(x):
    """``dropout.mix32`` of x, uint32 [R], in place."""
    for i in range(len(x)):
        x[i] = _mix32(x[i])


@njit(cache=True, nogil=True)
def drop(x, row_keys, threshold, scale, out):
    """scale * x where kept, 0 where dropped, into out [R, N], which is not x."""
    zero = x.dtype.type(0)
    for row in range(x.shape[0]):
        for column in range(x.shape[1]):
            out[row, column] = x[row, column] * scale if _hash(row_keys[row], column) >= threshold else zero
