"""Launchers of the attention kernels: arguments, tiles and grids of one ring step, forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import backward, forward, narrow_forward, tiles
from megagraph.kernels import narrow as narrow_kernels
from megagraph.kernels.forward import Softmax
from megagraph.kernels.launch import Recorder, planned
from megagraph.kernels.learned import learned_pass
from megagraph.kernels.narrow import Narrow
from megagraph.kernels.operands import fits_lanes, operands_of, padded_table, row_delta, saved_of, strided
from megagraph.kernels.tile import TABLE_SIZE, Operands, Strided

if TYPE_CHECKING:
    from megagraph.attention.step import DeltaOf, Gradients, State, Step


PARTS_BYTES = 1 << 28  # of partial sums of dq at a time, at most, where one key tile takes less


def pad_table(table: Tensor, q: Tensor) -> Tensor:
    """A bucket table [H, R] with an entry for every uint8 index, [H, TABLE_SIZE]: NaN beyond R, -inf at 255, the masked
    bucket; as it is, where kernels read it so. In memory, entries of the heads that share programs stand side by
    side."""
    (H, _), heads = table.shape, _heads_of_forward("bucket", q, table)
    if not heads and fits_lanes(q, table):
        return table
    padded: Tensor = _pad_table(q, table)
    return padded.view(-1, heads)[:, :H].T if heads else padded.view(H, -1)


@planned
def _pad_table(recorder: Recorder, q: Tensor, table: Tensor) -> Tensor:
    return padded_table(recorder, q, table, _heads_of_forward("bucket", q, table) or 1, base_2=False)


def _heads_of_forward(form: str, q: Tensor, learned: Tensor | None) -> int:
    """H padded to whole programs of several narrow heads, 0 where a program of forward has one head. Several share
    channels, and what a table costs that has to be gathered; else one is faster, but for fp32 (measured on an H200)."""
    gathered = form == "bucket" and learned is not None and not fits_lanes(q, learned)
    several = gathered or form == "projected" or q.element_size() > 2
    return tiles.padded_heads(q.shape[1], q.element_size(), q.shape[3]) if several else 0


def _table(recorder: Recorder, step: Step, q: Tensor, heads: int = 0) -> Tensor | None:
    """The learned part as kernels of one head a program read it, or of several; a table may be as :func:`pad_table`
    returns it."""
    table = step.learned
    if step.form != "bucket" or table is None or (not heads and fits_lanes(q, table)):
        return table
    if table.shape[1] == TABLE_SIZE.value and table.stride() == ((1, heads) if heads else (TABLE_SIZE.value, 1)):
        return table
    return padded_table(recorder, q, table, heads or 1, base_2=False)


def _longest(step: Step) -> int:
    return max((length for _, _, length in step.segments), default=0)


def _tiles(kernel: tiles.Kernel, step: Step, q: Tensor) -> dict[str, int]:
    arch = tiles.architecture()
    return tiles.choose(kernel, step.form, q.element_size(), q.shape[3], q.shape[2], _longest(step), arch)


def _plain(step: Step) -> bool:
    """Without dropout, padding and mask, which take registers."""
    return step.dropout_p == 0.0 and step.key_padding_mask is None and step.bias_mask is None


@planned
def launch_step_fwd(recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State) -> None:
    """Fold one visiting block of keys into the softmax state, or into ``out`` and ``lse`` at the last step.

    q: [B, H, M, D], D <= 256; k, v: [B, H, Nk, D] in its dtype; any strides. A table of the step's may be as
    :func:`pad_table` returns it.
    """
    B, H, M, D = q.shape
    heads = _heads_of_forward(step.form, q, step.learned)
    operands = operands_of(recorder, step, _table(recorder, step, q, heads), q, k, v, state.out)
    if heads:
        kernel, blocks = narrow_forward.narrow_fwd, tiles.choose_narrow_fwd(H, q.element_size(), M, _longest(step))
        groups = heads // blocks["GROUP"]
    else:
        kernel, blocks, groups = forward.step_fwd, _tiles("fwd", step, q), H
        if D > 32 and not _plain(step):  # 128 rows would spill
            blocks = blocks | {"BLOCK_M": min(64, blocks["BLOCK_M"])}
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    softmax = Softmax(state.m, state.l, state.acc, strided(state.out), state.lse)
    recorder.launch(
        kernel, B * num_tiles * groups, operands, softmax, num_tiles, FIRST=state.first, LAST=state.last, **blocks
    )


@planned
def launch_row_delta(recorder: Recorder, d_out: Tensor, delta: Tensor, of: DeltaOf) -> None:
    """delta [B, H, M] = sum(d_out * out) - d_lse: d_out, out [B, H, M, D], any strides; the others contiguous."""
    row_delta(recorder, d_out, delta, of)


def launch_step_bwd(
    q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None = None
) -> None:
    """One visiting block's gradients, with delta made first if ``of`` says of what; two calls give the same bits."""
    if not q.numel() or not any(length for _, _, length in step.segments):
        for x in (gradients.dq, gradients.dk, gradients.dv):
            if not gradients.accumulate:
                x.zero_()
        return
    partials, d_learned = _launch_bwd(q, k, v, step, gradients, of), gradients.d_learned
    if partials is not None and d_learned is not None:  # [B, tiles, groups, GROUP, entries or channels]
        H, num_learned = d_learned.shape
        d_learned += partials.sum(dim=(0, 1)).flatten(0, 1)[:H, :num_learned]


@planned
def _launch_bwd(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None
) -> Tensor | None:
    """All but the last sum over partial gradients of a table or a projection, which are returned."""
    d_learned = gradients.d_learned
    own = step.form != "dense" or d_learned is None or d_learned.shape[:2] == q.shape[:2]
    if q.shape[3] <= tiles.NARROW and own:
        return _narrow_bwd(recorder, step, q, k, v, gradients, of)
    if of is not None:
        row_delta(recorder, gradients.d_out, gradients.delta, of)
    rows = (q, k, v, gradients.d_out, gradients.dq, gradients.dk, gradients.dv)
    operands = operands_of(recorder, step, _table(recorder, step, q), *rows)
    _key_pass(recorder, operands, step, q, gradients)
    if step.form in ("bucket", "projected") and d_learned is not None:
        return _learned_pass(recorder, operands, step, q, gradients)
    _query_pass(recorder, operands, step, q, gradients)
    return None


def _key_pass(recorder: Recorder, operands: Operands, step: Step, q: Tensor, gradients: Gradients) -> None:
    blocks = _tiles("key", step, q)
    num_tiles = sum(triton.cdiv(length, blocks["BLOCK_N"]) for _, _, length in step.segments)
    recorder.launch(
        backward.key_pass, q.shape[0] * num_tiles * q.shape[1],
        operands, saved_of(gradients), strided(gradients.dk), strided(gradients.dv), num_tiles,
        ACCUMULATE=gradients.accumulate, **blocks,
    )  # fmt: skip


def _query_pass(recorder: Recorder, operands: Operands, step: Step, q: Tensor, gradients: Gradients) -> None:
    B, H, M, _ = q.shape
    planes_b, planes_h, db = B, H, None
    if step.form == "dense" and gradients.d_learned is not None:
        planes_b, planes_h = gradients.d_learned.shape[:2]
        # expanded: every head of a group addresses the plane it shares
        db = strided(gradients.d_learned, B, H)
    blocks = _tiles("query", step, q)
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    recorder.launch(
        backward.query_pass, planes_b * num_tiles * planes_h,
        operands, saved_of(gradients), strided(gradients.dq), db, num_tiles, B // planes_b, H // planes_h,
        SHARED=(planes_b, planes_h) != (B, H), ACCUMULATE=gradients.accumulate, **blocks,
    )  # fmt: skip


def _learned_pass(recorder: Recorder, operands: Operands, step: Step, q: Tensor, gradients: Gradients) -> Tensor:
    B, H, M, D = q.shape
    d_learned, learned = gradients.d_learned, step.learned
    assert d_learned is not None and learned is not None
    num_learned = d_learned.shape[1]
    blocks = _tiles("learned", step, q)
    if D > 32 and not _plain(step):  # 32 keys would spill
        blocks = blocks | {"BLOCK_N": 16}
    group = min(blocks["GROUP"], triton.next_power_of_2(H))
    groups, num_tiles = triton.cdiv(H, group), triton.cdiv(M, blocks["BLOCK_M"])
    rows = max(16, triton.next_power_of_2(num_learned if step.form == "bucket" else 2 * num_learned))
    partials = recorder.empty(B, num_tiles, groups, group, rows, dtype=gradients.lse.dtype)
    if step.form == "bucket":
        operands = operands._replace(learned=strided(padded_table(recorder, q, learned, group, base_2=False)))
    together = H % group == 0 and all(t.strides[1:] == (D, t.strides[2], 1) for t in (operands.k, operands.v))
    recorder.launch(
        learned_pass, B * num_tiles * groups,
        operands, saved_of(gradients), strided(gradients.dq), partials, num_tiles,
        ROWS=rows, WARPS=blocks["num_warps"], TOGETHER=together, ACCUMULATE=gradients.accumulate,
        **(blocks | {"GROUP": group}),
    )  # fmt: skip
    return partials


def _narrow_bwd(
    recorder: Recorder, step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients, of: DeltaOf | None
) -> Tensor | None:
    """One pass for heads that share a program; ``gradients`` has a plane of its own for each dense one."""
    B, H, M, D = q.shape
    Nk, form, d_learned, dtype = k.shape[2], step.form, gradients.d_learned, gradients.lse.dtype
    arch = tiles.architecture()
    blocks = tiles.choose_narrow(form, B, H, q.element_size(), D, M, _longest(step), _plain(step), arch)
    group, block_m, block_n = blocks["GROUP"], blocks["BLOCK_M"], blocks["BLOCK_N"]
    heads = tiles.padded_heads(H, q.element_size(), D)
    key_tiles = sum(triton.cdiv(length, block_n) for _, _, length in step.segments)
    query_rows, key_rows = triton.cdiv(M, block_m) * block_m, triton.cdiv(Nk, 16) * 16 + block_n
    # lse / scale leaves the range of fp16, and costs fp32 its last digits
    packed = not step.short and q.dtype in (torch.bfloat16, torch.float64) and abs(step.scale) > 1e-20
    width = max(16, triton.next_power_of_2(D + 3)) if packed else 16

    def rows(x: Tensor, num_rows: int) -> Strided:
        return strided(recorder.empty(B, num_rows, heads, width, dtype=x.dtype).transpose(1, 2) if packed else x)

    learned = step.learned
    if form == "bucket" and learned is not None:
        learned = padded_table(recorder, q, learned, heads, base_2=q.element_size() == 2)
    others = (gradients.d_out, gradients.dq, gradients.dk, gradients.dv, None if of is None else of.out)
    operands = operands_of(recorder, step, learned, q, k, v, *others)
    block_r, grad, partials = 16, None, None
    if d_learned is not None and form == "dense":
        grad = strided(d_learned)
    elif d_learned is not None:
        block_r = max(16 if form == "bucket" else 8, triton.next_power_of_2(d_learned.shape[1]))
        partials = recorder.empty(B, key_tiles, heads // group, group, block_r, dtype=dtype)
        grad = strided(partials)
    at_once = min(key_tiles, max(1, PARTS_BYTES // (B * query_rows * heads * D * dtype.itemsize)))
    parts = recorder.empty(at_once, B, query_rows, heads, D, dtype=dtype) if key_tiles > 1 else None
    total = recorder.empty(B, query_rows, heads, D, dtype=dtype) if key_tiles > at_once else None
    low_d = 8 if D <= 8 else 16
    constants = dict(HEADS=heads, PACKED=packed, WIDTH=width, LOW_D=low_d, ACCUMULATE=gradients.accumulate)
    narrow = Narrow(
        q=rows(q, query_rows),
        k=rows(k, key_rows),
        v=rows(v, key_rows),
        d_out=rows(gradients.d_out, query_rows),
        dq=strided(gradients.dq) if parts is None else None,
        parts=parts,
        dk=strided(gradients.dk),
        dv=strided(gradients.dv),
        d_learned=grad,
        query_rows=query_rows,
        key_rows=key_rows,
        part=B * query_rows * heads * D,
        key_tiles=key_tiles,
        first_tile=0,
        tiles=at_once,
        **{name: tl.constexpr(value) for name, value in constants.items()},
    )
    saved = saved_of(gradients, of)
    if packed:
        block = 16 * group  # divides the rows of all heads
        query_programs = B * query_rows * heads // block
        programs = query_programs + B * key_rows * heads // block
        recorder.launch(narrow_kernels.pack_rows, programs, operands, narrow, saved, query_programs, block)
        saved = saved_of(gradients)
    for first in range(0, key_tiles, at_once):
        now = min(at_once, key_tiles - first)
        part = narrow._replace(first_tile=first, tiles=now)
        recorder.launch(
            narrow_kernels.one_pass, B * now * heads // group, operands, part, saved,
            BLOCK_R=block_r, WARPS=blocks["num_warps"], **blocks,
        )  # fmt: skip
        if parts is not None:
            block = 1024
            recorder.launch(
                narrow_kernels.sum_parts, triton.cdiv(narrow.part, block),
                operands, narrow, strided(gradients.dq), total, now,
                ADD=first > 0, LAST=first + now == key_tiles, BLOCK=block,
            )  # fmt: skip
    return partials
