"""Launchers of the attention kernels: arguments, tiles and grids of one ring step, forward and backward."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import backward, forward, short, tiles
from megagraph.kernels.halves import CODES
from megagraph.kernels.tile import TABLE_SIZE, Operands, Programs, Saved, Softmax, Strided

if TYPE_CHECKING:
    from megagraph.attention.step import Gradients, State, Step


@functools.lru_cache(maxsize=256)
def _segment_table(segments: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(len(segments), 3)


@functools.lru_cache(maxsize=16)
def _codes(code: int, device: torch.device) -> Tensor:
    return torch.arange(TABLE_SIZE.value, dtype=torch.int16, device=device) | code


def _strided(x, *batch):
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


def pad_table(table: Tensor, dtype: torch.dtype) -> Tensor:
    """A bucket table [H, R] with an entry for every uint8 index: NaN beyond R, -inf at 255, the masked bucket."""
    if table.shape[1] == TABLE_SIZE:
        return table
    padded = table.new_full((table.shape[0], TABLE_SIZE.value), torch.nan, dtype=dtype)
    padded[:, : table.shape[1]] = table
    padded[:, -1] = -torch.inf
    return padded


def _operands(step: Step, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None) -> Operands:
    """What forward and backward share; ``rows``: other tensors with rows like those of q."""
    B, H, M, D = q.shape
    others = [x for x in rows if x is not None]
    segments = tuple((int(key), int(column), int(length)) for key, column, length in step.segments)
    form, data, learned = step.form, step.data, step.learned
    dropout_key = step.dropout_key if step.dropout_p > 0.0 else None
    dropout = dropout_key is not None
    if form == "bucket" and learned is not None:
        learned = pad_table(learned, torch.promote_types(q.dtype, torch.float32))
    values = {"dense": learned, "projected": data}.get(form)
    code = CODES.get(q.dtype, 0)
    constants = {
        "FORM": form,
        "NUM_CHANNELS": data.shape[1] if form == "projected" and data is not None else 0,
        "PAIRED": values is not None and _paired(values, segments),
        "THRESHOLD": int(step.dropout_p * (1 << 32)) if dropout else 0,
        "KEEP_SCALE": 1.0 / (1.0 - step.dropout_p) if dropout else 1.0,
        "FOLD": q.element_size() == 2,
        "ALIGNMENT": _row_alignment(q, k, v, *others),
        "OFFSETS": _offsets_dtype(q, k, v, data, values, *others),
        "COLUMN_ALIGNMENT": math.gcd(16, *(column for _, column, _ in segments)),
        "ACC_DTYPE": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "ASSEMBLY": tiles.has_halves(tiles.architecture()),
        "CODE": code,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }
    return Operands(
        q=_strided(q),
        k=_strided(k),
        v=_strided(v),
        learned=_strided(learned, B, H) if form == "dense" else _strided(learned),
        data=_strided(data, B),
        bias_mask=_strided(step.bias_mask, B),
        padding=_strided(step.key_padding_mask),
        dropout_key=None if dropout_key is None else dropout_key.contiguous(),
        row_ids=step.row_ids.contiguous() if dropout and step.row_ids is not None else None,
        codes=_codes(code, q.device) if form == "bucket" else None,
        segments=_segment_table(segments, q.device),
        num_segments=len(segments),
        scale=float(step.scale),
        H=H,
        M=M,
        Nk=k.shape[2],
        **{name: tl.constexpr(value) for name, value in constants.items()},
    )


def _tiles(kernel: tiles.Kernel, step: Step, q: Tensor) -> dict[str, int]:
    longest = max((length for _, _, length in step.segments), default=0)
    return tiles.choose(kernel, step.form, q.element_size(), q.shape[3], q.shape[2], longest, tiles.architecture())


def _saved(gradients: Gradients) -> Saved:
    return Saved(_strided(gradients.d_out), gradients.lse, gradients.delta)


def _overruns(M: int, k: Tensor, blocks: dict[str, int]) -> bool:
    return bool(M % blocks["BLOCK_M"] or k.shape[2] % blocks["BLOCK_N"])


def launch_step_fwd(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    """Fold one visiting block of keys into the softmax state, or into ``out`` and ``lse`` at the last step.

    q: [B, H, M, D], D <= 256; k, v: [B, H, Nk, D] in its dtype; any strides. A table of the step's may be as
    :func:`pad_table` returns it.
    """
    operands = _operands(step, q, k, v, state.out)
    B, H, M, _ = q.shape
    out = _strided(state.out)
    if step.short:
        blocks = tiles.choose_short(H, q.element_size(), M, k.shape[2])
        num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
        grid = (B * num_tiles * triton.cdiv(H, blocks["GROUP"]),)
        with torch.cuda.device_of(q):
            short.short_fwd[grid](operands, out, state.lse, num_tiles, MASKED=_overruns(M, k, blocks), **blocks)
        return
    blocks = _tiles("fwd", step, q)
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    softmax = Softmax(state.m, state.l, state.acc, out, state.lse)
    with torch.cuda.device_of(q):
        forward.step_fwd[(B * num_tiles * H,)](
            operands, softmax, num_tiles, FIRST=state.first, LAST=state.last, **blocks
        )


def launch_row_delta(d_out, out, d_lse, delta) -> None:
    """delta = sum(d_out * out) - d_lse per row: d_out, out [B, H, M, D], any strides; d_lse, delta contiguous."""
    B, H, M, D = d_out.shape
    block = 128
    with torch.cuda.device_of(d_out):
        backward.row_delta[(B * H * triton.cdiv(M, block),)](
            _strided(d_out), _strided(out), d_lse, delta, H, M, D, block
        )


def launch_step_bwd(step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients) -> None:
    """One visiting block's gradients; two calls give the same bits."""
    d_out, dq, dk, dv, d_learned = (getattr(gradients, name) for name in ("d_out", "dq", "dk", "dv", "d_learned"))
    operands = _operands(step, q, k, v, d_out, dq, dk, dv)
    B, H, M, _ = q.shape
    form, lse = step.form, gradients.lse
    shared = form == "dense" and d_learned is not None and d_learned.shape[:2] != (B, H)
    if step.short and not shared:
        _short_bwd(operands, step, q, k, gradients)
        return
    blocks = _tiles("bwd", step, q)
    query_tiles = triton.cdiv(M, blocks["QUERY_M"])
    key_tiles = sum(triton.cdiv(length, blocks["KEY_N"]) for _, _, length in step.segments)
    table_tiles, table_programs = 0, 0
    group = blocks["TABLE_H"]
    num_learned = 1 if form == "dense" or d_learned is None else d_learned.shape[1]
    block_r = max(16, triton.next_power_of_2(num_learned))

    planes_b, planes_h, grad, partials = B, H, None, None
    if d_learned is not None and form == "dense":
        planes_b, planes_h = d_learned.shape[:2]
        # expanded: every head of a group addresses the plane it shares
        grad = _strided(d_learned, B, H)
    elif d_learned is not None and form == "projected":
        partials = lse.new_empty(B, H, query_tiles, num_learned)
        grad = _strided(partials)
    elif d_learned is not None:
        table_tiles = triton.cdiv(M, blocks["TABLE_M"])
        groups = triton.cdiv(H, group)
        table_programs = B * groups * table_tiles
        partials = lse.new_empty(B, groups, table_tiles, block_r, group)
        grad = _strided(partials)
    programs = Programs(
        key=B * key_tiles * H,
        key_tiles=key_tiles,
        query=planes_b * query_tiles * planes_h,
        query_tiles=query_tiles,
        table_tiles=table_tiles,
        group_b=B // planes_b,
        group_h=H // planes_h,
    )
    with torch.cuda.device_of(q):
        backward.step_bwd[(programs.key + programs.query + table_programs,)](
            operands, _saved(gradients), _strided(dq), _strided(dk), _strided(dv), grad, programs,
            BLOCK_C=max(2, triton.next_power_of_2(num_learned)), BLOCK_R=block_r,
            SHARED=shared, ACCUMULATE=gradients.accumulate, WARPS=blocks["num_warps"],
            **blocks,
        )  # fmt: skip
    if d_learned is None or partials is None:
        return
    if form == "projected":
        d_learned += partials.sum(dim=(0, 2))
    else:
        d_learned += partials.sum(dim=(0, 2)).transpose(1, 2).flatten(0, 1)[:H, :num_learned]


def _short_bwd(operands: Operands, step: Step, q: Tensor, k: Tensor, gradients: Gradients) -> None:
    B, H, M, _ = q.shape
    form, d_learned, lse = step.form, gradients.d_learned, gradients.lse
    blocks = tiles.choose_short(H, q.element_size(), M, k.shape[2])
    group = blocks["GROUP"]
    groups = triton.cdiv(H, group)
    one_tile = k.shape[2] <= blocks["BLOCK_N"]
    dq_sums = gradients.dq if one_tile else torch.empty_like(gradients.dq, dtype=lse.dtype)
    block_c, block_r, grad, partials = 2, 16, None, None
    if d_learned is not None and form == "dense":
        grad = _strided(d_learned)
    elif d_learned is not None and form == "bucket":
        block_r = max(16, triton.next_power_of_2(d_learned.shape[1]))
        partials = lse.new_empty(B, groups, block_r, group)
    elif d_learned is not None:
        block_c = max(2, triton.next_power_of_2(d_learned.shape[1]))
        partials = lse.new_empty(B, groups, group, block_c)
    with torch.cuda.device_of(q):
        short.short_bwd[(B * groups,)](
            operands, _saved(gradients), _strided(dq_sums), _strided(gradients.dk), _strided(gradients.dv),
            grad if partials is None else _strided(partials), BLOCK_C=block_c, BLOCK_R=block_r,
            MASKED=_overruns(M, k, blocks), ONE_TILE=one_tile, WARPS=blocks["num_warps"], **blocks,
        )  # fmt: skip
    if not one_tile:
        gradients.dq.copy_(dq_sums)
    if d_learned is not None and partials is not None:
        sums = partials.sum(dim=0)
        sums = sums.transpose(1, 2) if form == "bucket" else sums
        d_learned += sums.flatten(0, 1)[:H, : d_learned.shape[1]]
