"""Dropout of hidden states, from the hash that drops attention weights (megagraph/attention/dropout.py).

    out[b, m, c] = x[b, m, c] / (1 - p) if kept else 0          head 0, row m, column c

The gradient is the same function of d_out: backward launches this kernel again, and nothing is kept for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.launch import Recorder, planned
from megagraph.kernels.operands import strided
from megagraph.kernels.tile import Strided


class Hidden(NamedTuple):
    """What the kernel reads; the names that the hash needs are those of ``tile.Operands``."""

    x: Strided  # [B, M, C]
    dropout_key: Tensor  # int32 [B]
    row_ids: Tensor | None  # int32 [M]
    M: int
    C: int
    first_column: None
    first_head: None
    # compile-time constants, as tl.constexpr
    THRESHOLD: int
    KEEP_SCALE: float
    PRODUCT_DTYPE: tl.dtype  # x is rounded once, after the scale


@triton.jit
def hidden_dropout(hidden, out, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):
    """Grid (B * cdiv(M, BLOCK_M) * cdiv(C, BLOCK_C)); one program owns a tile of one sequence."""
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    col_tiles = tl.cdiv(hidden.C, BLOCK_C)
    row_tiles = tl.cdiv(hidden.M, BLOCK_M)
    b = pid // col_tiles // row_tiles
    rows = pid // col_tiles % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % col_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < hidden.M)[:, None] & (cols < hidden.C)[None, :]

    stride_b, stride_m, stride_c = hidden.x.strides
    offsets = b * stride_b + rows[:, None] * stride_m + cols[None, :] * stride_c
    x = tl.load(hidden.x.ptr + offsets, mask=inside, other=0.0)
    keys = row_keys(hidden, b, b * 0, tl.minimum(rows, hidden.M - 1))
    drop = dropped(hidden, keys[:, None], cols[None, :])
    kept = tl.where(drop, 0.0, x.to(hidden.PRODUCT_DTYPE) * hidden.KEEP_SCALE)

    stride_b, stride_m, stride_c = out.strides
    offsets = b * stride_b + rows[:, None] * stride_m + cols[None, :] * stride_c
    tl.store(out.ptr + offsets, kept, mask=inside)


@planned
def launch_hidden_dropout(recorder: Recorder, x: Tensor, key: Tensor, row_ids: Tensor | None, p: float) -> Tensor:
    """Dropout of x, contiguous.

    Args:
        x: [B, M, C], any strides, floating.
        key: int32 [B], contiguous.
        row_ids: integer [M], contiguous, global row of each row; None: the local row.
        p: probability to drop, in [0, 1).
    """
    B, M, C = x.shape
    product = tl.float64 if x.dtype == torch.float64 else tl.float32
    hidden = Hidden(
        x=strided(x),
        dropout_key=key,
        row_ids=row_ids,
        first_column=None,
        first_head=None,
        M=M,
        C=C,
        THRESHOLD=tl.constexpr(int(p * (1 << 32))),
        KEEP_SCALE=tl.constexpr(1.0 / (1.0 - p)),
        PRODUCT_DTYPE=tl.constexpr(product),
    )
    out = recorder.empty(B, M, C, dtype=x.dtype)
    block_c = min(128, triton.next_power_of_2(C))
    block_m = 4096 // block_c
    recorder.launch(
        hidden_dropout, B * triton.cdiv(M, block_m) * triton.cdiv(C, block_c),
        hidden, strided(out), BLOCK_M=block_m, BLOCK_C=block_c,
    )  # fmt: skip
    return out
