"""Dropout in one pass over memory, compiled by Numba on its first call and kept on disk.

Arrays are contiguous; row_keys, uint32 [R], and threshold, uint32, are those of ``megagraph.attention.dropout``.
"""

from __future__ import annotations

import numpy as np

from megagraph.jit import jit
from megagraph.simd import LANES, counting, keep_from, load, splat, store

_GOLDEN, _MUL_1, _MUL_2 = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
_16, _13 = np.uint32(16), np.uint32(13)


@jit()
def _fold(h):
    return h ^ (h >> splat(_16))


@jit()
def _mix_folded(h):
    h = h * splat(_MUL_1)
    h = (h ^ (h >> splat(_13))) * splat(_MUL_2)
    return h ^ (h >> splat(_16))


@jit()
def mix32(h):
    """``dropout.mix32`` of eight words."""
    return _mix_folded(_fold(h))


@jit()
def pair_hash(row_key, column):
    """Hash of eight pairs, uint32, from row keys and columns; a pair is dropped where it is below the threshold."""
    # the fold of a sum without carries is that of its parts, of which one stays while the other runs
    return _mix_folded(_fold(row_key) ^ _fold(column * splat(_GOLDEN)))


@jit()
def _mix32(h):
    # Numba computes in 64 bits unless told otherwise
    h = np.uint32((h ^ (h >> _16)) * _MUL_1)
    h = np.uint32((h ^ (h >> _13)) * _MUL_2)
    return np.uint32(h ^ (h >> _16))


@jit(nogil=True)
def head_keys(keys, first_head, heads):
    """uint32 [B * heads] from the key of each sequence, uint32 [B]: the head, of all heads, folded in."""
    out = np.empty(len(keys) * heads, np.uint32)
    for b in range(len(keys)):
        for head in range(heads):
            out[b * heads + head] = _mix32(keys[b] ^ np.uint32(first_head + head))
    return out


@jit(nogil=True)
def drop(x, row_keys, threshold, scale, out):
    """scale * x where kept, 0 where dropped, into out [R, N], which is not x."""
    zero, whole = x.dtype.type(0), x.shape[1] // LANES * LANES
    for row in range(x.shape[0]):
        first = row * x.shape[1]
        for column in range(0, whole, LANES):
            hashed = pair_hash(splat(row_keys[row]), counting(np.uint32(column)))
            scaled = load(x, first + column) * splat(scale)
            store(out, first + column, keep_from(scaled, hashed, splat(threshold)))
        for column in range(whole, x.shape[1]):
            hashed = _mix32(row_keys[row] ^ np.uint32(np.uint32(column) * _GOLDEN))
            out[row, column] = x[row, column] * scale if hashed >= threshold else zero
