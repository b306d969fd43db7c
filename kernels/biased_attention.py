"""Launchers of the attention kernels: arguments, tiles and grids of one ring step, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from megagraph.kernels import backward, forward, narrow_forward, tiles
from megagraph.kernels.forward import Softmax
from megagraph.kernels.geometry import Geometry
from megagraph.kernels.launch import Recorder, planned
from megagraph.kernels.learned import learned_pass
from megagraph.kernels.operands import (
    Segments,
    cut,
    fits_lanes,
    on,
    operands_of,
    padded_table,
    projected,
    row_delta,
    saved_of,
    strided,
    sum_partials,
)
from megagraph.kernels.projection import project_pass
from megagraph.kernels.tile import TABLE_SIZE, Operands

if TYPE_CHECKING:
    from megagraph.attention.step import DeltaOf, Gradients, State, Step


PIECE_BYTES = 1 << 29  # of what belongs to pairs, at a time, unless that would leave multiprocessors without a program


def pad_table(table: Tensor, q: Tensor) -> Tensor:
    """A bucket table [H, R] with an entry for every uint8 index, [H, TABLE_SIZE]: NaN beyond R, -inf at 255, the masked
    bucket; as it is, where kernels read it so. In memory, entries of the heads that share programs stand side by
    side."""
    (H, _), heads = table.shape, _heads_of_table(q, table)
    if not heads and fits_lanes(q, table):
        return table
    padded: Tensor = _pad_table(q, table)
    return padded.view(-1, heads)[:, :H].T if heads else padded.view(H, -1)


@planned
def _pad_table(recorder: Recorder, q: Tensor, table: Tensor) -> Tensor:
    return padded_table(recorder, q, table, _heads_of_table(q, table) or 1)


def _heads_of_table(q: Tensor, table: Tensor) -> int:
    """H padded to whole programs of several narrow heads, 0 where a program of forward has one head. Several share what
    a table costs that has to be gathered; else one is faster, but for fp32 (measured on an H200)."""
    several = q.element_size() > 2 or not fits_lanes(q, table)
    return tiles.padded_heads(q.shape[1], q.element_size(), q.shape[3]) if several else 0


def _heads_of_forward(step: Step, q: Tensor) -> int:
    """H padded to whole programs of several narrow heads in forward, for any form of bias; 0 for one head a program."""
    if step.form == "bucket" and step.learned is not None:
        return _heads_of_table(q, step.learned)
    several = q.element_size() > 2 and step.form != "projected"
    return tiles.padded_heads(q.shape[1], q.element_size(), q.shape[3]) if several else 0


def _table(recorder: Recorder, step: Step, q: Tensor, heads: int = 0) -> Tensor | None:
    """The learned part as kernels of one head a program read it, or of several; a table may be as :func:`pad_table`
    returns it."""
    table = step.learned
    if step.form != "bucket" or table is None or (not heads and fits_lanes(q, table)):
        return table
    if table.shape[1] == TABLE_SIZE.value and table.stride() == ((1, heads) if heads else (TABLE_SIZE.value, 1)):
        return table
    return padded_table(recorder, q, table, heads or 1)


def _longest(step: Step) -> int:
    return max((length for _, _, length in step.segments), default=0)


def _tiles(kernel: tiles.Kernel, step: Step, q: Tensor) -> dict[str, int]:
    arch = tiles.architecture()
    form = "dense" if step.form == "projected" else step.form  # which is dense by then
    return tiles.choose(kernel, form, q.element_size(), q.shape[3], q.shape[2], _longest(step), arch, step.tf32)


def _plain(step: Step) -> bool:
    """Whether a step has no dropout, padding and mask, which take registers."""
    return step.dropout_p == 0.0 and step.key_padding_mask is None and step.bias_mask is None


@planned
def launch_step_fwd(recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State) -> None:
    """Fold one visiting block of keys into the softmax state, or into ``out`` and ``lse`` at the last step.

    q: [B, H, M, D], D <= 256; k, v: [B, H, Nk, D] in its dtype; any strides. A table of the step's may be as
    :func:`pad_table` returns it.
    """
    heads = _heads_of_forward(step, q)
    x = operands_of(recorder, step, _table(recorder, step, q, heads), q, k, v, state.out)
    softmax = Softmax(state.m, state.l, state.acc, strided(state.out), state.lse)
    if heads:
        blocks = tiles.choose_narrow_fwd(q.shape[1], q.element_size(), q.shape[2], _longest(step))
        num_tiles = triton.cdiv(q.shape[2], blocks["BLOCK_M"])
        recorder.launch(
            narrow_forward.narrow_fwd, q.shape[0] * num_tiles * heads // blocks["GROUP"],
            x, softmax, num_tiles, FIRST=state.first, LAST=state.last, **blocks,
        )  # fmt: skip
    elif step.form == "projected":
        _fwd_projected(recorder, x, q, k, v, step, state, softmax)
    else:
        _launch_fwd(recorder, x, q, step, softmax, state.first, state.last)


def _launch_fwd(
    recorder: Recorder, x: Operands, q: Tensor, step: Step, softmax: Softmax, first: bool, last: bool
) -> None:
    B, H, M, D = q.shape
    blocks = _tiles("fwd", step, q)
    if D > 32 and not _plain(step):  # 128 rows would spill
        blocks = blocks | {"BLOCK_M": min(64, blocks["BLOCK_M"])}
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    recorder.launch(forward.step_fwd, B * num_tiles * H, x, softmax, num_tiles, FIRST=first, LAST=last, **blocks)


def _fwd_projected(
    recorder: Recorder, x: Operands, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State, softmax: Softmax
) -> None:
    """Forward with a projected bias, which is written to memory for some keys at a time."""
    B, H, M, D = q.shape
    block_n = _tiles("fwd", step, q)["BLOCK_N"]
    pieces, planes = _pieces(recorder, q, step, block_n)
    if len(pieces) > 1 and softmax.m is None:  # a call of one step keeps nothing
        dtype = torch.promote_types(q.dtype, torch.float32)
        m, l = (recorder.empty(B, H, M, dtype=dtype) for _ in range(2))
        softmax = softmax._replace(m=m, l=l, acc=recorder.empty(B, H, M, D, dtype=dtype))
    for i, piece in enumerate(pieces):
        of_piece = on(recorder, piece, x, k.shape[2])
        dense = _project(recorder, of_piece, planes, piece, block_n, q, k, v, state.out)
        first, last = state.first and i == 0, state.last and i == len(pieces) - 1
        _launch_fwd(recorder, dense, q, step, softmax, first, last)


def _pieces(recorder: Recorder, q: Tensor, step: Step, block_n: int) -> tuple[list[Segments], Tensor]:
    """The keys in pieces that fill the device, and memory for what belongs to the pairs of one, [B, H, M, .]."""
    B, H, M, _ = q.shape
    num_tiles = max(1, _num_tiles(step.segments, block_n))
    fit = PIECE_BYTES // (max(1, B * H * M) * block_n * q.element_size())
    enough = triton.cdiv(2 * tiles.MULTIPROCESSORS, max(1, B * H))
    most = triton.cdiv(num_tiles, triton.cdiv(num_tiles, max(fit, enough)))
    return cut(step.segments, block_n, most), recorder.empty(B, H, M, most * block_n, dtype=q.dtype)


def _num_tiles(segments: Iterable[tuple[int, ...]], block_n: int) -> int:
    return sum(triton.cdiv(length, block_n) for _, _, length, *_ in segments)


def _project(
    recorder: Recorder, x: Operands, planes: Tensor, piece: Segments, block_n: int, q: Tensor, *rows: Tensor | None
) -> Operands:
    """Operands whose bias is read from ``planes``, once it has been projected into these."""
    B, _, M, _ = q.shape
    block_m = 32
    key_tiles, num_tiles = _num_tiles(piece, block_n), triton.cdiv(M, block_m)
    recorder.launch(
        project_pass, B * num_tiles * key_tiles,
        x, strided(planes), key_tiles, num_tiles, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=8,
    )  # fmt: skip
    return projected(x, planes, q, *(t for t in rows if t is not None))


@planned
def launch_row_delta(recorder: Recorder, d_out: Tensor, delta: Tensor, of: DeltaOf) -> None:
    """delta [B, H, M] = sum(d_out * out) - d_lse: d_out, out [B, H, M, D], any strides; the others contiguous."""
    row_delta(recorder, d_out, delta, of)


def launch_step_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    gradients: Gradients,
    of: DeltaOf | None = None,
    geometry: Geometry | None = None,
) -> None:
    """One visiting block's gradients, with delta made first if ``of`` says of what; two calls give the same bits."""
    partials = _launch_bwd(q, k, v, step, gradients, of, geometry=geometry)
    if partials is not None:
        sum_partials(partials, gradients)


@planned
def _launch_bwd(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None
) -> Tensor | None:
    """Launch backward but for the last sum over partial gradients of a table or a projection, which are returned."""
    d_learned = gradients.d_learned
    if of is not None:
        row_delta(recorder, gradients.d_out, gradients.delta, of)
    rows = (q, k, v, gradients.d_out, gradients.dq, gradients.dk, gradients.dv)
    operands = operands_of(recorder, step, _table(recorder, step, q), *rows)
    blocks = _tiles("key", step, q)
    block_n = blocks["BLOCK_N"]
    if (
        step.form == "dense"
        and d_learned is not None
        and (d_learned.shape[:2], d_learned.dtype) == (q.shape[:2], q.dtype)
    ):
        places = tuple((key, column, length, column) for key, column, length in step.segments)
        pieces, ds = [places], d_learned
    else:
        pieces, ds = _pieces(recorder, q, step, block_n)
    B, H, M, D = q.shape
    of_queries = tiles.choose_query(q.element_size(), D, M, block_n, _longest(step), tiles.architecture())
    num_tiles = triton.cdiv(M, of_queries["BLOCK_M"])
    total = recorder.empty(B, H, M, D, dtype=gradients.lse.dtype) if len(pieces) > 1 else None
    partials = _partials(recorder, step, q, gradients, len(pieces), block_n)
    for i, piece in enumerate(pieces):
        x = scored = on(recorder, piece, operands, k.shape[2])
        if step.form == "projected":
            scored = _project(recorder, x, ds, piece, block_n, *rows)
        key_tiles = _num_tiles(piece, block_n)
        recorder.launch(
            backward.key_pass, B * key_tiles * H,
            scored, saved_of(gradients), strided(gradients.dk), strided(gradients.dv), strided(ds), key_tiles,
            PADDED=ds is not d_learned, ACCUMULATE=gradients.accumulate, **blocks,
        )  # fmt: skip
        recorder.launch(
            backward.query_pass, B * num_tiles * H,
            x, strided(ds), strided(gradients.dq), total, num_tiles,
            FIRST=i == 0, LAST=i == len(pieces) - 1, ACCUMULATE=gradients.accumulate, **of_queries,
        )  # fmt: skip
        if partials is not None:
            _learned_pass(recorder, x, step, q, ds, partials, i, block_n)
        elif d_learned is not None and ds is not d_learned:
            _plane_pass(recorder, x, q, ds, d_learned, key_tiles, block_n)
    return partials


def _learned_tiles(step: Step, q: Tensor, num_rows: int, block_n: int) -> dict[str, int]:
    loaded = num_rows if step.form == "projected" else 0
    return tiles.choose_learned(q.shape[1], q.element_size(), loaded, block_n, _longest(step), tiles.architecture())


def _partials(
    recorder: Recorder, step: Step, q: Tensor, gradients: Gradients, pieces: int, block_n: int
) -> Tensor | None:
    """Memory for partial gradients of a table or weight, [pieces * B, tiles, groups, GROUP, entries or channels]."""
    if gradients.d_learned is None or step.form == "dense":
        return None
    B, H, M, _ = q.shape
    num_rows = max(16, triton.next_power_of_2(gradients.d_learned.shape[1]))
    blocks = _learned_tiles(step, q, num_rows, block_n)
    num_tiles, groups = triton.cdiv(M, blocks["BLOCK_M"]), triton.cdiv(H, blocks["GROUP"])
    return recorder.empty(pieces * B, num_tiles, groups, blocks["GROUP"], num_rows, dtype=gradients.lse.dtype)


def _learned_pass(
    recorder: Recorder, x: Operands, step: Step, q: Tensor, ds: Tensor, partials: Tensor, piece: int, block_n: int
) -> None:
    _, num_tiles, groups, _, num_rows = partials.shape
    blocks, programs = _learned_tiles(step, q, num_rows, block_n), q.shape[0] * num_tiles * groups
    recorder.launch(
        learned_pass, programs,
        x, strided(ds), partials, piece * programs, num_tiles,
        ROWS=num_rows, WARPS=blocks["num_warps"], **blocks,
    )  # fmt: skip


def _plane_pass(
    recorder: Recorder, x: Operands, q: Tensor, ds: Tensor, d_learned: Tensor, key_tiles: int, block_n: int
) -> None:
    """The gradient of planes that sequences or heads share, or that have another dtype."""
    B, H, M, _ = q.shape
    planes_b, planes_h = d_learned.shape[:2]
    block_m = 64
    num_tiles = triton.cdiv(M, block_m)
    recorder.launch(
        backward.plane_pass, planes_b * planes_h * num_tiles * key_tiles,
        x, strided(ds), strided(d_learned), key_tiles, num_tiles, B // planes_b, H // planes_h,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
