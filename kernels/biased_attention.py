"""Launchers of the attention kernels: arguments, tiles and grids of one ring step, forward and backward."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import backward, forward, short, tiles
from megagraph.kernels.tile import TABLE_SIZE, Operands, Strided


@functools.lru_cache(maxsize=256)
def _segment_table(segments: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(len(segments), 3)


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


def _arguments(
    q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids, *rows,
):  # fmt: skip
    """The operands that forward and backward share; ``rows``: other tensors with rows like those of q."""
    B, H, M, D = q.shape
    segments = tuple((int(key), int(column), int(length)) for key, column, length in segments)
    dropout = dropout_key is not None and dropout_p > 0.0
    sums_dtype = torch.promote_types(q.dtype, torch.float32)
    if form == "bucket":
        learned = pad_table(learned, sums_dtype)
    values = {"dense": learned, "projected": data}.get(form)
    learned = _strided(learned, B, H) if form == "dense" else _strided(learned)
    constants = {
        "FORM": form,
        "NUM_CHANNELS": data.shape[1] if form == "projected" else 0,
        "PAIRED": values is not None and _paired(values, segments),
        "THRESHOLD": int(dropout_p * (1 << 32)) if dropout else 0,
        "KEEP_SCALE": 1.0 / (1.0 - dropout_p) if dropout else 1.0,
        "FOLD": q.element_size() == 2,
        "ALIGNMENT": _row_alignment(q, k, v, *rows),
        "OFFSETS": _offsets_dtype(q, k, v, data, values, *rows),
        "COLUMN_ALIGNMENT": math.gcd(16, *(column for _, column, _ in segments)),
        "ACC_DTYPE": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }
    operands = Operands(
        q=_strided(q),
        k=_strided(k),
        v=_strided(v),
        learned=learned,
        data=_strided(data, B),
        bias_mask=_strided(bias_mask, B),
        padding=_strided(key_padding_mask),
        dropout_key=dropout_key.contiguous() if dropout else None,
        row_ids=row_ids.contiguous() if dropout and row_ids is not None else None,
        segments=_segment_table(segments, q.device),
        num_segments=len(segments),
        scale=float(scale),
        H=H,
        M=M,
        Nk=k.shape[2],
        **{name: tl.constexpr(value) for name, value in constants.items()},
    )
    return operands, segments


def _tiles(kernel: tiles.Kernel, form: str, q: Tensor, segments) -> dict[str, int]:
    longest = max((length for _, _, length in segments), default=0)
    return tiles.choose(kernel, form, q.element_size(), q.shape[3], q.shape[2], longest, tiles.architecture())


def _is_short(path: str | None, q: Tensor, k: Tensor, segments, whole: bool) -> bool:
    """Whether this step takes the short path: asked for, or all of a short sequence."""
    whole = whole and segments == ((0, 0, k.shape[2]),)
    assert whole or path != "short"
    return path == "short" or (path is None and whole and tiles.short_path(q.shape[2], k.shape[2], q.shape[3]))


def _overruns(M: int, k: Tensor, blocks: dict[str, int]) -> bool:
    return bool(M % blocks["BLOCK_M"] or k.shape[2] % blocks["BLOCK_N"])


def launch_step_fwd(
    q, k, v, *, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids,
    first, last, m, l, acc, out, lse, path=None,
) -> None:  # fmt: skip
    """Fold one visiting block of keys into the softmax state, or into ``out`` and ``lse`` at the last step.

    Args:
        q: [B, H, M, D], any strides, D <= 256.
        k, v: [B, H, Nk, D], any strides, dtype of q.
        form: ``"none"``, ``"dense"``, ``"bucket"`` or ``"projected"``.
        data: bucket: uint8 [B or 1, M, N], 255 = masked; projected: channels [B or 1, C, M, N]; else None.
        learned: dense: values [B or 1, H or 1, M, N], -inf = masked; bucket: table [H, R], or as
            :func:`pad_table` returns it; projected: weight [H, C].
        bias_mask: projected only: bool [B or 1, M, N], True = masked, or None.
        key_padding_mask: bool [B, N], True = ignore, or None.
        segments: (key_start, column_start, length) triples: these keys own these bias columns.
        dropout_p, dropout_key: probability and int32 [B], or None for no dropout.
        row_ids: int32 [M], global row of each query for dropout; None: the local row.
        first: start from the empty state instead of reading m, l, acc.
        last: write out and lse instead of m, l, acc.
        m, l: [B, H, M], running max of the scores and running sum; contiguous, fp32 (fp64 for fp64 q).
        acc: [B, H, M, D], unnormalised output; as m. All three None if first and last.
        out: [B, H, M, D], any strides; 0 for a row that met no valid key. None before the last step.
        lse: contiguous [B, H, M], natural log; -inf for a row that met no valid key. None as out.
        path: ``"short"`` or ``"long"``; None: :func:`tiles.short_path` says.
    """
    rows = () if out is None else (out,)
    operands, segments = _arguments(
        q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
        scale, dropout_p, dropout_key, row_ids, *rows,
    )  # fmt: skip
    B, H, M, _ = q.shape
    assert all(x is None or x.is_contiguous() for x in (m, l, acc, lse))
    if _is_short(path, q, k, segments, first and last):
        blocks = tiles.choose_short(H, q.element_size(), M, k.shape[2])
        num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
        grid = (B * num_tiles * triton.cdiv(H, blocks["GROUP"]),)
        with torch.cuda.device_of(q):
            short.short_fwd[grid](operands, _strided(out), lse, num_tiles, MASKED=_overruns(M, k, blocks), **blocks)
        return
    blocks = _tiles("fwd", form, q, segments)
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    with torch.cuda.device_of(q):
        forward.step_fwd[(B * num_tiles * H,)](
            operands, m, l, acc, _strided(out), lse, num_tiles, FIRST=first, LAST=last, **blocks
        )


def launch_row_delta(d_out, out, d_lse, delta) -> None:
    """delta = sum(d_out * out) - d_lse per row: d_out, out [B, H, M, D], any strides; d_lse, delta contiguous."""
    B, H, M, D = d_out.shape
    block = 128
    with torch.cuda.device_of(d_out):
        backward.row_delta[(B * H * triton.cdiv(M, block),)](
            _strided(d_out), _strided(out), d_lse, delta, H, M, D, triton.next_power_of_2(D), block
        )


def launch_step_bwd(
    q, k, v, *, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids,
    d_out, lse, delta, dq, dk, dv, d_learned, accumulate, path=None,
) -> None:  # fmt: skip
    """One visiting block's gradients; two calls give the same bits.

    Args (else as in :func:`launch_step_fwd`):
        d_out: [B, H, M, D], any strides, dtype of q.
        lse: [B, H, M] of the whole softmax. delta: [B, H, M], sum(d_out * out) - d_lse. Both contiguous.
        dq: [B, H, M, D]. dk, dv: [B, H, Nk, D] of this block. Any strides and floating dtype.
        accumulate: add to dq, dk, dv instead of writing them.
        d_learned: shape of ``learned``; None = not wanted. A dense plane per sequence and head is written, for the
            columns of these keys, in any floating dtype. Whatever is summed, over broadcast axes or over pairs, is
            added, in the dtype of lse.
    """
    operands, segments = _arguments(
        q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
        scale, dropout_p, dropout_key, row_ids, d_out, dq, dk, dv,
    )  # fmt: skip
    B, H, M, _ = q.shape
    assert all(x.is_contiguous() for x in (lse, delta))
    shared = form == "dense" and d_learned is not None and d_learned.shape[:2] != (B, H)
    if not shared and _is_short(path, q, k, segments, not accumulate):
        _short_bwd(operands, q, k, d_out, lse, delta, dq, dk, dv, d_learned, form)
        return
    blocks = _tiles("bwd", form, q, segments)
    query_tiles = triton.cdiv(M, blocks["QUERY_M"])
    key_tiles = sum(triton.cdiv(length, blocks["KEY_N"]) for _, _, length in segments)
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
    key_programs, query_programs = B * key_tiles * H, planes_b * query_tiles * planes_h
    with torch.cuda.device_of(q):
        backward.step_bwd[(key_programs + query_programs + table_programs,)](
            operands, _strided(d_out), lse, delta, _strided(dq), _strided(dk), _strided(dv), grad,
            key_programs, key_tiles, query_programs, query_tiles, table_tiles, B // planes_b, H // planes_h,
            BLOCK_C=max(2, triton.next_power_of_2(num_learned)), BLOCK_R=block_r,
            SHARED=shared, ACCUMULATE=accumulate, WARPS=blocks["num_warps"],
            **blocks,
        )  # fmt: skip
    if partials is not None and form == "projected":
        d_learned += partials.sum(dim=(0, 2))
    elif partials is not None:
        d_learned += partials.sum(dim=(0, 2)).transpose(1, 2).flatten(0, 1)[:H, :num_learned]


def _short_bwd(operands, q, k, d_out, lse, delta, dq, dk, dv, d_learned, form) -> None:
    B, H, M, _ = q.shape
    blocks = tiles.choose_short(H, q.element_size(), M, k.shape[2])
    group = blocks["GROUP"]
    groups = triton.cdiv(H, group)
    one_tile = k.shape[2] <= blocks["BLOCK_N"]
    dq_sums = dq if one_tile else torch.empty_like(dq, dtype=lse.dtype)
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
            operands, _strided(d_out), lse, delta, _strided(dq_sums), _strided(dk), _strided(dv),
            grad if partials is None else _strided(partials), BLOCK_C=block_c, BLOCK_R=block_r,
            MASKED=_overruns(M, k, blocks), ONE_TILE=one_tile, WARPS=blocks["num_warps"], **blocks,
        )  # fmt: skip
    if not one_tile:
        dq.copy_(dq_sums)
    if partials is not None:
        sums = partials.sum(dim=0)
        sums = sums.transpose(1, 2) if form == "bucket" else sums
        d_learned += sums.flatten(0, 1)[:H, : d_learned.shape[1]]
