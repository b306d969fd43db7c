"""Attention over short sequences, forward: one program holds several heads of a sequence.

The equations are those of ``forward``, all keys in one step. Heads of a program share index, channels and masks, and
rows of q, k, v are read whole where projections leave them, [B, N, H, D].
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.tile import (
    Keys,
    Queries,
    add_dot,
    dot,
    dropped,
    heads_ptrs,
    load_heads,
    log_sum_exp,
    loop,
    online_softmax,
    row_keys,
    scores_of_heads,
)


@triton.jit
def short_fwd(
    x, out, lse_ptr, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_tiles * cdiv(H, GROUP)); one program owns BLOCK_M query rows of GROUP heads.

    MASKED: the tiles overrun M or N.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(x.H, GROUP)
    b = pid // groups // num_tiles
    row = pid // groups % num_tiles * BLOCK_M
    offs_h = pid % groups * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, and are not stored
    offs_m = tl.arange(0, BLOCK_M)
    in_rows = offs_m < x.M - row
    q = load_heads(x, x.q, b, heads, row, offs_m, x.M - row, MASKED)
    row_key = row_keys(x, b, heads[:, None], tl.minimum(row + offs_m, x.M - 1)[None, :])
    queries = Queries(b, heads, row, offs_m, in_rows, row_key)
    m = tl.full([GROUP, BLOCK_M, 1], -float("inf"), x.ACC_DTYPE)
    l = tl.zeros([GROUP, BLOCK_M, 1], x.ACC_DTYPE)
    acc = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    for col in loop(0, x.Nk, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N)
        k = load_heads(x, x.k, b, heads, col, offs_n, x.Nk - col, MASKED)
        v = load_heads(x, x.v, b, heads, col, offs_n, x.Nk - col, MASKED)
        qk = dot(x, q, tl.permute(k, (0, 2, 1)))
        in_cols = offs_n < x.Nk - col
        keys = Keys(None, None, col, col, x.Nk - col)
        s = scores_of_heads(x, qk, queries, keys, offs_n, in_cols, MASKED)
        m, l, p, rescale = online_softmax(x, m, l, s)
        if x.THRESHOLD > 0:  # kept p is scaled once, in out
            p = tl.where(dropped(x, row_key[:, :, None], (col + offs_n)[None, None, :]), 0.0, p)
        acc = add_dot(acc * rescale, p, v)
    lse, l_safe = log_sum_exp(x, m, l)
    exists = (offs_h < x.H)[:, None, None] & in_rows[None, :, None]
    stat = (b * x.H + heads)[:, None, None] * x.M + (row + offs_m)[None, :, None]
    tl.store(lse_ptr + stat, lse, mask=exists)
    in_d = (tl.arange(0, x.BLOCK_D) < x.D)[None, None, :]
    ptrs = heads_ptrs(x, out, b, heads, row, offs_m)
    tl.store(ptrs, acc * (x.KEEP_SCALE / l_safe), mask=exists & in_d)
