"""A projected bias, b[h] = sum_c weight[h, c] * channels[c], in memory.

Programs of one head would read all channels for each of them, and wait for that. So the bias is made for some keys at a
time and all heads, rounded to the dtype of q as a dense one is, and read as such.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.tile import (
    Keys,
    Queries,
    Strided,
    find_keys,
    load_plane,
    loop,
    masked_pairs,
    tile_ptrs,
)


@triton.jit
def project_pass(x, planes, key_tiles, num_tiles, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The bias of BLOCK_M queries of all heads and a key tile, -inf where it is masked, to ``planes`` [B, H, M, .].
    Grid (B * num_tiles * key_tiles)."""
    pid = tl.program_id(0).to(tl.int64)
    start, col, place, left = find_keys(x, pid % key_tiles, BLOCK_N)
    keys = Keys(None, None, start, col, place, left)
    row = pid // key_tiles % num_tiles * BLOCK_M
    b = pid // key_tiles // num_tiles
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    if left < BLOCK_N:
        _project_tile(x, planes, b, row, offs_m, keys, offs_n, True)
    else:
        _project_tile(x, planes, b, row, offs_m, keys, offs_n, False)


@triton.jit
def _project_tile(x, planes, b, row, offs_m, keys, offs_n, MASKED: tl.constexpr):
    """The bias of all heads at one tile; rows beyond M repeat the last one, and are not written."""
    near_m = tl.minimum(offs_m, x.M - 1 - row).to(tl.int32)
    rows = (offs_m < x.M - row)[:, None]
    exists = rows & (offs_n < keys.left)[None, :]
    data_b, data_c, data_m, data_n = x.data.strides
    weight_h, weight_c = x.learned.strides
    queries = Queries(b, None, row, near_m, None, None)
    hidden = tl.zeros([offs_m.shape[0], offs_n.shape[0]], tl.int8)
    if x.bias_mask is not None:
        hidden = masked_pairs(x, queries, keys, offs_n, exists, MASKED)
    for h in loop(0, x.H, 1):
        bias = tl.zeros([offs_m.shape[0], offs_n.shape[0]], x.ACC_DTYPE)
        for c in tl.static_range(x.NUM_CHANNELS):
            plane = Strided(x.data.ptr + b * data_b + c * data_c, (data_m, data_n))
            channel = load_plane(x, plane, queries, keys.col, offs_n, exists, MASKED).to(x.ACC_DTYPE)
            bias += tl.load(x.learned.ptr + h * weight_h + c * weight_c).to(x.ACC_DTYPE) * channel
        if x.bias_mask is not None:
            bias = tl.where(hidden == 0, bias, -float("inf"))
        ptrs = tile_ptrs(x, planes, b, h, row, near_m, keys.place, offs_n)
        tl.store(ptrs, bias, mask=exists if MASKED else rows)
