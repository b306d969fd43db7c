"""Launchers of attention over listed pairs: arguments, tiles and grids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels import pairs, pairs_backward, tiles
from megagraph.kernels.forward import Softmax
from megagraph.kernels.launch import Recorder, planned
from megagraph.kernels.operands import operands_of, padded_table, row_delta, saved_of, strided
from megagraph.kernels.pairs import Lists
from megagraph.kernels.tile import Operands

if TYPE_CHECKING:
    from megagraph.attention.step import DeltaOf, Gradients, State, Step

PROGRAMS = 4096  # with partial gradients of their own, at most


def _arguments(
    recorder: Recorder, step: Step, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor | None
) -> tuple[Operands, Lists, int, int]:
    """Operands, lists, how many heads share a program, and H padded to whole programs; ``rows``: others like q's."""
    B, H, M, D = q.shape
    group, width = tiles.list_heads(H, q.element_size(), D)
    heads = triton.cdiv(H, group) * group
    learned, starts, key_starts = step.learned, step.row_starts, step.key_starts
    assert learned is not None and starts is not None and step.columns is not None
    assert key_starts is not None and step.key_rows is not None and step.key_pairs is not None
    if step.form == "bucket":
        learned = padded_table(recorder, q, learned, heads, base_2=False)
    operands = operands_of(recorder, step, learned, q, k, v, *rows)._replace(HEADS=tl.constexpr(heads))
    own = len(starts) - 1 > M  # every sequence has a relation
    columns = (len(key_starts) - 1) // (B if own else 1)
    tensor = q.element_size() == 2
    spans = max(x.shape[2] * x.stride(2) for x in (q, k, v, *rows) if x is not None)
    lists = Lists(
        row_starts=starts,
        columns=step.columns,
        key_starts=key_starts,
        key_rows=step.key_rows,
        key_pairs=step.key_pairs,
        column_ids=step.column_ids if step.dropout_key is not None else None,
        stats=None,
        rows_apart=M if own else 0,
        columns_apart=columns if own else 0,
        B=B,
        halvings=columns.bit_length(),
        FULL=tl.constexpr(width == D and H % group == 0),
        OFFSETS=tl.constexpr(tl.int32 if spans < 1 << 31 else tl.int64),
        WHOLE=tl.constexpr(step.segments == [(0, 0, columns)]),
        TENSOR=tl.constexpr(tensor),
        WIDTH=tl.constexpr(width),
        SLOTS=tl.constexpr(max(group, 8) if tensor else group),
    )
    return operands, lists, group, heads


def _blocks(kernel: Literal["pairs_fwd", "rows_bwd", "keys_bwd"], q: Tensor, lists: Lists) -> dict[str, int]:
    return tiles.choose_list(kernel, q.element_size(), len(lists.columns) / (len(lists.row_starts) - 1))


@planned
def launch_pairs_fwd(recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State) -> None:
    """Fold the visiting keys that are listed into the softmax state, or into ``out`` and ``lse`` at the last step.

    q: [B, H, M, D], D <= 256; k, v: [B, H, Nk, D] in its dtype; any strides.
    """
    operands, lists, group, heads = _arguments(recorder, step, q, k, v, state.out)
    blocks = _blocks("pairs_fwd", q, lists)
    num_blocks = triton.cdiv(q.shape[2], blocks["BLOCK_M"])
    softmax = Softmax(state.m, state.l, state.acc, strided(state.out), state.lse)
    recorder.launch(
        pairs.pairs_fwd, q.shape[0] * num_blocks * heads // group,
        operands, lists, softmax, num_blocks, GROUP=group, FIRST=state.first, LAST=state.last, **blocks,
    )  # fmt: skip


def launch_pairs_bwd(
    q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None = None
) -> None:
    """The gradients of the visiting keys that are listed, with delta made first if ``of`` says of what; two calls give
    the same bits. What is added to a learned part goes into ``gradients.d_learned``, dense [P, H] values, too."""
    if not gradients.accumulate and step.segments != [(0, 0, k.shape[2])]:
        for x in (gradients.dk, gradients.dv):  # keys of no segment
            x.zero_()
    partials, d_learned = _launch_bwd(q, k, v, step, gradients, of), gradients.d_learned
    if partials is not None and d_learned is not None:  # [programs, groups, GROUP, entries or channels]
        H, num_learned = d_learned.shape
        d_learned += partials.sum(dim=0).flatten(0, 1)[:H, :num_learned]


@planned
def _launch_bwd(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, step: Step, gradients: Gradients, of: DeltaOf | None
) -> Tensor | None:
    """All but the last sum over partial gradients of a table or a projection, which are returned."""
    B, _, M, _ = q.shape
    d_learned = gradients.d_learned
    if of is not None:
        row_delta(recorder, gradients.d_out, gradients.delta, of)
    rows = (gradients.d_out, gradients.dq, gradients.dk, gradients.dv)
    operands, lists, group, heads = _arguments(recorder, step, q, k, v, *rows)
    lists = lists._replace(stats=recorder.empty(B, M, heads, 2, dtype=gradients.lse.dtype))
    block = 1024
    recorder.launch(
        pairs_backward.pack_stats, triton.cdiv(B * M * heads, block),
        operands, lists, gradients.lse, gradients.delta, block,
    )  # fmt: skip
    saved = saved_of(gradients)
    blocks = _blocks("keys_bwd", q, lists)
    num_tiles = sum(triton.cdiv(length, blocks["BLOCK_M"]) for _, _, length in step.segments)
    if num_tiles:
        recorder.launch(
            pairs_backward.keys_bwd, B * num_tiles * heads // group,
            operands, lists, saved, strided(gradients.dk), strided(gradients.dv), num_tiles,
            GROUP=group, ACCUMULATE=gradients.accumulate, **blocks,
        )  # fmt: skip
    blocks = _blocks("rows_bwd", q, lists)
    num_blocks, partials, d_pairs, block_r = triton.cdiv(M, blocks["BLOCK_M"]), None, None, 0
    # the blocks of a program: all sequences of the same rows, as these may add to the same pairs
    at_once = B * triton.cdiv(num_blocks, PROGRAMS)
    programs = triton.cdiv(num_blocks * B, at_once)
    if d_learned is not None and step.form == "dense":
        d_pairs = strided(d_learned)
    elif d_learned is not None:
        block_r = max(16, triton.next_power_of_2(d_learned.shape[1]))
        partials = recorder.empty(programs, heads // group, group, block_r, dtype=gradients.lse.dtype)
    recorder.launch(
        pairs_backward.rows_bwd, programs * heads // group,
        operands, lists, saved, strided(gradients.dq), d_pairs, partials, num_blocks, at_once,
        GROUP=group, BLOCK_R=block_r, ACCUMULATE=gradients.accumulate, **blocks,
    )  # fmt: skip
    return partials
