"""What launchers hand to kernels: the arguments of a step as operands, tables padded, delta of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
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


Segments = tuple[tuple[int, int, int, int], ...]  # (key_start, column_start, length, place) of each


@functools.lru_cache(maxsize=256)
def _segment_table(segments: Segments, device: torch.device) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(len(segments), 4)


def cut(segments: list[tuple[int, int, int]], block_n: int, most: int) -> list[Segments]:
    """Segments in pieces of at most ``most`` tiles of block_n keys, whose columns stand in memory tile after tile."""
    pieces: list[list[tuple[int, int, int, int]]] = [[]]
    used = 0
    for key, column, length in segments:
        start = 0
        while start < length:
            if used == most:
                pieces.append([])
                used = 0
            size = min(length - start, (most - used) * block_n)
            pieces[-1].append((key + start, column + start, size, used * block_n))
            start += size
            used += triton.cdiv(size, block_n)
    return [tuple(piece) for piece in pieces]


def on(recorder: Recorder, segments: Segments, x: Operands, Nk: int) -> Operands:
    """The operands of these keys alone."""
    all_keys = segments == ((0, 0, Nk, 0),)
    alignments = [math.gcd(16, *(segment[place] for segment in segments)) for place in (1, 3)]
    return x._replace(
        segments=None if all_keys else recorder.constant(_segment_table(segments, recorder.device)),
        num_segments=len(segments),
        COLUMN_ALIGNMENT=tl.constexpr(alignments[0]),
        PLACE_ALIGNMENT=tl.constexpr(alignments[1]),
    )


def projected(x: Operands, planes: Tensor, *rows: Tensor) -> Operands:
    """Operands whose bias ``project_pass`` has written to ``planes``; ``rows``: all that are like those of q."""
    constants = {
        "NUM_CHANNELS": 0,
        "PAIRED": planes.dtype == torch.bfloat16,
        "OFFSETS": _offsets_dtype(rows),
    }
    constexprs = {name: tl.constexpr(value) for name, value in constants.items()}
    return x._replace(learned=strided(planes), data=None, bias_mask=None, **constexprs)


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


def _offsets_dtype(rows: Iterable[Tensor], *planes: Tensor | None) -> tl.dtype:
    """Integer type of a stride times the edge of a tile, at most 256; of rows also times the number of heads."""
    furthest = [stride * max(256, x.shape[1]) for x in rows for stride in x.stride()[1:]]
    furthest += [stride * 256 for x in planes if x is not None for stride in x.stride()[-2:]]
    return tl.int32 if max(furthest) < 1 << 31 else tl.int64


def _paired(values: Tensor, segments: list[tuple[int, int, int]]) -> bool:
    """Whether values are bf16 whose every tile begins at a 32-bit word."""
    *strides, stride_n = values.stride()
    starts = (*strides, *(column for _, column, _ in segments), values.data_ptr() // 2)
    return values.dtype == torch.bfloat16 and stride_n == 1 and not any(start % 2 for start in starts)


def padded_table(recorder: Recorder, q: Tensor, table: Tensor, group: int) -> Tensor:
    """The entries of :func:`pad_table` as [groups, TABLE_SIZE, group]."""
    H, R = table.shape
    padded = recorder.empty(
        triton.cdiv(H, group), TABLE_SIZE.value, group, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    block = 1024
    recorder.launch(
        forward.pad_table, triton.cdiv(padded.numel(), block), strided(table), padded, H, R, group, BLOCK=block
    )
    return padded


def fits_lanes(q: Tensor, table: Tensor) -> bool:
    """Whether the lanes of a warp can hold the entries of a head, in a table as it is given; AMD's ask otherwise."""
    given = table.ndim == 2 and table.dtype == torch.promote_types(q.dtype, torch.float32)
    return given and table.shape[1] <= LANES.value and (INTERPRET or tiles.architecture().startswith("sm_"))


def operands_of(
    recorder: Recorder, step: Step, learned: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
) -> Operands:
    """What forward and backward share; ``learned`` as the kernel reads it, ``rows``: others like those of q."""
    B, H, M, D = q.shape
    others = [x for x in rows if x is not None]
    form, data = step.form, step.data
    dropout_key = step.dropout_key if step.dropout_p > 0.0 else None
    dropout = dropout_key is not None
    listed = step.columns is not None  # data and dense values are those of pairs
    values = None if listed else {"dense": learned, "projected": data}.get(form)
    code = halves.CODES.get(q.dtype, 0)
    acc_dtype = tl.float64 if q.dtype == torch.float64 else tl.float32
    constants = {
        "FORM": form,
        "NUM_CHANNELS": data.shape[1] if form == "projected" and data is not None else 0,
        "HEADS": tiles.padded_heads(H, q.element_size(), D),
        "ONES": D < 16 and not dropout,
        "BLOCK_V": 8 if D + (not dropout) <= 8 else 16,
        "PAIRED": values is not None and _paired(values, step.segments),
        "THRESHOLD": int(step.dropout_p * (1 << 32)) if dropout else 0,
        "KEEP_SCALE": 1.0 / (1.0 - step.dropout_p) if dropout else 1.0,
        "FOLD": q.element_size() == 2,
        "ALIGNMENT": _row_alignment(q, k, v, *others),
        "OFFSETS": _offsets_dtype((q, k, v, *others), None if listed else data, values),
        "COLUMN_ALIGNMENT": 1,
        "PLACE_ALIGNMENT": 1,
        "ACC_DTYPE": acc_dtype,
        "PRECISION": "tf32" if step.tf32 else "ieee",
        "ASSEMBLY": tiles.has_halves(tiles.architecture()),
        "ENTRIES": learned.shape[1] if form == "bucket" and learned is not None and fits_lanes(q, learned) else 0,
        "CODE": code,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }
    operands = Operands(
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
        first_head=step.first_head if dropout and step.first_head else None,
        codes=recorder.constant(_codes(code, q.device)) if form == "bucket" else None,
        segments=None,
        num_segments=0,
        scale=float(step.scale),
        H=H,
        M=M,
        Nk=k.shape[2],
        **{name: tl.constexpr(value) for name, value in constants.items()},
    )
    segments = [segment for segment in step.segments if segment[2]] or step.segments  # an empty one counts as a block
    places = tuple((int(key), int(column), int(length), int(column)) for key, column, length in segments)
    return on(recorder, places, operands, k.shape[2])


def saved_of(gradients: Gradients) -> Saved:
    return Saved(strided(gradients.d_out), gradients.lse, gradients.delta)


def row_delta(recorder: Recorder, d_out: Tensor, delta: Tensor, of: DeltaOf) -> None:
    B, H, M, D = d_out.shape
    block = 128
    recorder.launch(
        backward.row_delta, triton.cdiv(B * H * M, block),
        strided(d_out), strided(of.out), of.d_lse, delta, B * H * M, H, M, D, block,
    )  # fmt: skip


def sum_partials(partials: Tensor, gradients: Gradients) -> None:
    """The gradient of a table or a weight from its partial sums [..., groups, heads of each, entries or channels]."""
    assert gradients.d_learned is not None
    H, num_learned = gradients.d_learned.shape
    *_, groups, of_group, width = partials.shape
    size = groups * of_group * width
    gradients.sum_of_learned(partials.as_strided((partials.numel() // size, H, num_learned), (size, width, 1)))
