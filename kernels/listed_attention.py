"""Launchers of attention over listed pairs: arguments, tiles and grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import pairs, pairs_backward, tiles
from megagraph.kernels.forward import Softmax
from megagraph.kernels.launch import Recorder, planned
from megagraph.kernels.operands import operands_of, padded_table, row_delta, saved_of, strided, sum_partials
from megagraph.kernels.pair_tiles import Tiles, tiles_of
from megagraph.kernels.pairs import Walk
from megagraph.kernels.tile import Operands

if TYPE_CHECKING:
    from megagraph.attention.step import DeltaOf, Gradients, State, Step

PROGRAMS = 4096  # with partial gradients of their own, at most


def launch_pairs_fwd(q: Tensor, k: Tensor, v: Tensor, step: Step, state: State) -> None:
    """Fold the visiting keys that are listed into the softmax state, or into ``out`` and ``lse`` at the last step.

    q: [B, H, M, D], D <= 256; k, v: [B, H, Nk, D] in its dtype; any strides.
    """
    _launch_fwd(q, k, v, step, state, _row_tiles(step, q))


def launch_pairs_bwd(
    q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None = None
) -> None:
    """The gradients of the visiting keys that are listed, with delta made first if ``of`` says of what; two calls give
    the same bits. What is added to a learned part goes into ``gradients.d_learned``, dense values [P, H], too."""
    if not gradients.accumulate and step.segments != [(0, 0, k.shape[2])]:
        for x in (gradients.dk, gradients.dv):  # keys of no segment
            x.zero_()
    partials = _launch_bwd(q, k, v, step, gradients, of, _row_tiles(step, q), _key_tiles(step, q))
    if partials is not None:
        sum_partials(partials, gradients)


def _blocks(step: Step, q: Tensor) -> dict[str, int]:
    return tiles.choose_pairs(step.form, q.shape[1], q.element_size(), q.shape[3])


def _size(step: Step, q: Tensor) -> tuple[int, int]:
    """BLOCK_M, BLOCK_N."""
    blocks = _blocks(step, q)
    return blocks["BLOCK_M"], blocks["BLOCK_N"]


def _row_tiles(step: Step, q: Tensor) -> Tiles:
    assert step.row_starts is not None and step.columns is not None
    size, buckets = _size(step, q), step.data if step.form == "bucket" else None
    return tiles_of(step.row_starts, step.columns, None, _num_columns(step, q), q.shape[2], size, buckets)


def _key_tiles(step: Step, q: Tensor) -> Tiles:
    assert step.key_starts is not None and step.key_rows is not None
    size, buckets = _size(step, q), step.data if step.form == "bucket" else None
    return tiles_of(step.key_starts, step.key_rows, step.key_pairs, q.shape[2], _num_columns(step, q), size, buckets)


def _has_own(step: Step, q: Tensor) -> bool:
    """Whether every sequence has a relation of its own."""
    assert step.row_starts is not None
    return len(step.row_starts) - 1 > q.shape[2]


def _num_columns(step: Step, q: Tensor) -> int:
    assert step.key_starts is not None
    return (len(step.key_starts) - 1) // (q.shape[0] if _has_own(step, q) else 1)


def _operands(
    recorder: Recorder, step: Step, group: int, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
) -> Operands:
    """``operands_of``, with heads in groups, and rows that may be anywhere."""
    heads, learned = triton.cdiv(q.shape[1], group) * group, step.learned
    if step.form == "bucket" and learned is not None:
        learned = padded_table(recorder, q, learned, heads)
    operands = operands_of(recorder, step, learned, q, k, v, *rows)
    far = max(x.shape[2] * x.stride(2) for x in (q, k, v, *rows) if x is not None) >= 1 << 31
    offsets = tl.constexpr(tl.int64) if far else operands.OFFSETS
    return operands._replace(HEADS=tl.constexpr(heads), OFFSETS=offsets)


def _walk(step: Step, q: Tensor, of: Tiles, own: int) -> Walk:
    """The walk over tiles ``of`` rows or of columns; ``own``: how many of these a sequence has."""
    columns, blocks = _num_columns(step, q), triton.cdiv(own, _size(step, q)[0])
    return Walk(
        starts=of.starts,
        others=of.others,
        numbers=of.numbers,
        column_ids=step.column_ids if step.dropout_key is not None else None,
        blocks=blocks,
        apart=blocks if _has_own(step, q) else 0,
        B=q.shape[0],
        halvings=columns.bit_length(),
        WHOLE=tl.constexpr(step.segments == [(0, 0, columns)]),
    )


@planned
def _launch_fwd(recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State, of_rows: Tiles) -> None:
    B, H, M, _ = q.shape
    blocks = _blocks(step, q)
    operands = _operands(recorder, step, blocks["GROUP"], q, k, v, state.out)
    walk = _walk(step, q, of_rows, M)
    softmax = Softmax(state.m, state.l, state.acc, strided(state.out), state.lse)
    recorder.launch(
        pairs.pairs_fwd, B * walk.blocks * triton.cdiv(H, blocks["GROUP"]),
        operands, walk, softmax, FIRST=state.first, LAST=state.last, **blocks,
    )  # fmt: skip


@planned
def _launch_bwd(
    recorder: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    gradients: Gradients,
    of: DeltaOf | None,
    of_rows: Tiles,
    of_keys: Tiles,
) -> Tensor | None:
    """Launch backward but for the last sum over partial gradients of a table or a projection, which are returned."""
    if of is not None:
        row_delta(recorder, gradients.d_out, gradients.delta, of)
    others = (gradients.d_out, gradients.dq, gradients.dk, gradients.dv)
    operands = _operands(recorder, step, _blocks(step, q)["GROUP"], q, k, v, *others)
    _keys(recorder, operands, step, q, gradients, of_keys)
    return _rows(recorder, operands, step, q, gradients, of_rows)


def _keys(recorder: Recorder, operands: Operands, step: Step, q: Tensor, gradients: Gradients, of_keys: Tiles) -> None:
    B, H, _, _ = q.shape
    blocks = _blocks(step, q)
    block = blocks["BLOCK_M"]
    ends = ((column // block, (column + length - 1) // block) for _, column, length in step.segments if length)
    num_blocks = sum(last - first + 1 for first, last in ends)
    if num_blocks:
        recorder.launch(
            pairs_backward.keys_bwd, B * num_blocks * triton.cdiv(H, blocks["GROUP"]),
            operands, _walk(step, q, of_keys, _num_columns(step, q)), saved_of(gradients),
            strided(gradients.dk), strided(gradients.dv), num_blocks,
            ACCUMULATE=gradients.accumulate, **blocks,
        )  # fmt: skip


def _rows(
    recorder: Recorder, operands: Operands, step: Step, q: Tensor, gradients: Gradients, of_rows: Tiles
) -> Tensor | None:
    B, H, M, _ = q.shape
    d_learned = gradients.d_learned
    blocks = _blocks(step, q)
    group = blocks["GROUP"]
    groups = triton.cdiv(H, group)
    walk, d_pairs, partials, block_r = _walk(step, q, of_rows, M), None, None, 0
    # the blocks of a program: all sequences of the same rows, as these may add to the same pairs
    at_once = B * triton.cdiv(walk.blocks, PROGRAMS)
    programs = triton.cdiv(walk.blocks * B, at_once)
    if d_learned is not None and step.form == "dense":
        d_pairs = strided(d_learned)
    elif d_learned is not None:
        block_r = max(16, triton.next_power_of_2(d_learned.shape[1]))
        partials = recorder.empty(programs, groups, group, block_r, dtype=gradients.lse.dtype)
    recorder.launch(
        pairs_backward.rows_bwd, programs * groups,
        operands, walk, saved_of(gradients), strided(gradients.dq), d_pairs, partials, at_once,
        BLOCK_R=block_r, WARPS=blocks["num_warps"], ACCUMULATE=gradients.accumulate,
        **blocks,
    )  # fmt: skip
    return partials
