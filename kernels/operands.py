"""What launchers hand to kernels: the arguments of a step as operands, tables padded, delta of rows."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import backward, forward, halves, tiles
from megagraph.kernels.launch import Recorder
from megagraph.kernels.tile import INTERPRET, LANES, TABLE_SIZE, Operands, Saved, Strided

if TYPE_CHECKING:
    from megagraph.attention.step import DeltaOf, Gradients, Step


@functools.lru_cache(maxsize=256)
def _segment_table(segments: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(len(segments), 3)


@functools.lru_cache(maxsize=16)
def _codes(code: int, device: torch.device) -> Tensor:
    return torch.arange(TABLE_SIZE.value, dtype=torch.int16, device=device) | code


def strided(x, *batch):
    """A kernel argument, with the leading axes expanded to ``batch``; bool travels as bytes."""
    if x is None:
        return None
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    x = x.expand(*batch, *x.shape[len(batch) :])
    return Strided(x, x.stride())


def _row_alignment(q: Tensor, *others: Tensor) -> int:
    """The largest power of two, at most 16 bytes, that divides the strides of all rows; in elements."""
    strides = [stride for x in (q, *others) for stride in x.stride()[:-1]]
    return math.gcd(16 // q.element_size(), *strides)


def _offsets_dtype(*tensors: Tensor | None) -> tl.dtype:
    """What holds a stride times the edge of a tile, or the number of heads."""
    strides = [stride for x in tensors if x is not None for stride in x.stride()[1:]]
    return tl.int32 if max(strides) < 1 << 23 else tl.int64


def _paired(values: Tensor, segments: tuple[tuple[int, int, int], ...]) -> bool:
    """bf16 values whose every tile begins at a 32-bit word."""
    *strides, stride_n = values.stride()
    starts = (*strides, *(column for _, column, _ in segments), values.data_ptr() // 2)
    return values.dtype == torch.bfloat16 and stride_n == 1 and not any(start % 2 for start in starts)


def padded_table(recorder: Recorder, q: Tensor, table: Tensor, group: int, *, base_2: bool) -> Tensor:
    """The entries of :func:`pad_table` as [groups, TABLE_SIZE, group]."""
    H, R = table.shape
    padded = recorder.empty(
        triton.cdiv(H, group), TABLE_SIZE.value, group, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    block = 1024
    recorder.launch(
        forward.pad_table, triton.cdiv(padded.numel(), block), strided(table), padded, H, R, group,
        BASE_2=base_2, BLOCK=block,
    )  # fmt: skip
    return padded


def fits_lanes(q: Tensor, table: Tensor) -> bool:
    """Whether the lanes of a warp can hold the entries of a head, in a table as it is given; AMD's ask otherwise."""
    given = table.ndim == 2 and table.dtype == torch.promote_types(q.dtype, torch.float32)
    return given and table.shape[1] <= LANES.value and (INTERPRET or tiles.architecture().startswith("sm_"))


def _bias_dtype(q: Tensor, channels: Tensor | None, acc_dtype: tl.dtype) -> tl.dtype:
    """That the channels of a projected bias are added up in; 16 bits pay where an instruction takes two of them. Not of
    wide heads, whose ``learned_pass`` adds up in fp32, and would not find the scores to which lse belongs. The
    interpreter cuts off what bf16 has to round."""
    if channels is None or channels.shape[1] > halves.MOST_CHANNELS or q.element_size() > 2:
        return acc_dtype
    if q.shape[3] > tiles.NARROW:
        return acc_dtype
    if not INTERPRET and not tiles.has_halves(tiles.architecture()):
        return acc_dtype
    low = {torch.float16: tl.float16} | ({} if INTERPRET else {torch.bfloat16: tl.bfloat16})
    return low.get(channels.dtype, acc_dtype)


def operands_of(
    recorder: Recorder, step: Step, learned: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
) -> Operands:
    """What forward and backward share; ``learned`` as the kernel reads it, ``rows``: others like those of q."""
    B, H, M, D = q.shape
    others = [x for x in rows if x is not None]
    segments = tuple((int(key), int(column), int(length)) for key, column, length in step.segments)
    form, data = step.form, step.data
    dropout_key = step.dropout_key if step.dropout_p > 0.0 else None
    dropout = dropout_key is not None
    listed = step.columns is not None  # data and dense values are those of pairs
    values = None if listed else {"dense": learned, "projected": data}.get(form)
    code = halves.CODES.get(q.dtype, 0)
    acc_dtype = tl.float64 if q.dtype == torch.float64 else tl.float32
    all_keys = segments == ((0, 0, k.shape[2]),)
    constants = {
        "FORM": form,
        "NUM_CHANNELS": data.shape[1] if form == "projected" and data is not None else 0,
        "HEADS": tiles.padded_heads(H, q.element_size(), D),
        "ONES": D < 16 and not dropout,
        "BLOCK_V": 8 if D + (not dropout) <= 8 else 16,
        "BIAS_DTYPE": _bias_dtype(q, data if form == "projected" else None, acc_dtype),
        "PAIRED": values is not None and _paired(values, segments),
        "THRESHOLD": int(step.dropout_p * (1 << 32)) if dropout else 0,
        "KEEP_SCALE": 1.0 / (1.0 - step.dropout_p) if dropout else 1.0,
        "FOLD": q.element_size() == 2,
        "ALIGNMENT": _row_alignment(q, k, v, *others),
        "OFFSETS": _offsets_dtype(q, k, v, None if listed else data, values, *others),
        "COLUMN_ALIGNMENT": math.gcd(16, *(column for _, column, _ in segments)),
        "ACC_DTYPE": acc_dtype,
        "ASSEMBLY": tiles.has_halves(tiles.architecture()),
        "ENTRIES": learned.shape[1] if form == "bucket" and learned is not None and fits_lanes(q, learned) else 0,
        "CODE": code,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }
    return Operands(
        q=strided(q),
        k=strided(k),
        v=strided(v),
        learned=strided(learned, B, H) if form == "dense" and not listed else strided(learned),
        data=strided(data) if listed else strided(data, B),
        bias_mask=strided(step.bias_mask, B),
        padding=strided(step.key_padding_mask),
        dropout_key=dropout_key,
        row_ids=step.row_ids if dropout else None,
        first_column=step.first_column if dropout and step.first_column else None,
        codes=recorder.constant(_codes(code, q.device)) if form == "bucket" else None,
        segments=None if all_keys else recorder.constant(_segment_table(segments, q.device)),
        num_segments=len(segments),
        scale=float(step.scale),
        H=H,
        M=M,
        Nk=k.shape[2],
        **{name: tl.constexpr(value) for name, value in constants.items()},
    )


def saved_of(gradients: Gradients, of: DeltaOf | None = None) -> Saved:
    made_of = (None, None) if of is None else (strided(of.out), of.d_lse)
    return Saved(strided(gradients.d_out), gradients.lse, gradients.delta, *made_of)


def row_delta(recorder: Recorder, d_out: Tensor, delta: Tensor, of: DeltaOf) -> None:
    B, H, M, D = d_out.shape
    block = 128
    recorder.launch(
        backward.row_delta, B * H * triton.cdiv(M, block),
        strided(d_out), strided(of.out), of.d_lse, delta, H, M, D, block,
    )  # fmt: skip
