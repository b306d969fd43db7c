"""The CPU path: one attention step in torch operations on tiles, forward and backward.

The same contract as the Triton launchers: scores of the visiting keys are folded into a running max m, sum l and
output acc (FlashAttention, arXiv:2205.14135, Alg. 1; logarithms are natural here), a compact bias is expanded one tile
at a time, and the backward recomputes the scores from lse. Whatever B, H and N are, all score-sized temporaries
together hold at most ``ELEMENTS_PER_THREAD`` elements per thread.

A tile has all heads, which share the data of the bias, and several whole sequences where they are short. Its scores
[b * H, m, n] stay in the cache from the first operation to the last, in buffers that all tiles of a call use in turn:
there a pass over them costs little, and time goes to products, exp2 and the bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megagraph.attention.bias import MASKED_BUCKET, masked_table
from megagraph.attention.dropout import drop_, row_keys, softmax_backward_
from megagraph.attention.step import Step

ELEMENTS_PER_THREAD = 1 << 20
_LOG2E = math.log2(math.e)
_UNDERFLOW = -2000.0  # exp2 gives 0 in every dtype, many times faster than of -inf
_NARROW = 16  # columns; a product with fewer is several times faster transposed


@dataclass(frozen=True, slots=True)
class _Tile:
    """Batch, rows, visiting keys and bias columns of one tile of scores."""

    batch: slice
    rows: slice
    keys: slice
    columns: slice


class _State(NamedTuple):
    """Running max m, sum l [b * H, m] and unnormalised output acc [b * H, m, D] of some rows."""

    m: Tensor
    l: Tensor
    acc: Tensor


def _length(part: slice) -> int:
    return part.stop - part.start


def _chunks(length: int, size: int) -> Iterator[slice]:
    """As few chunks of at most ``size`` as there can be, about equal."""
    count = -(-length // size)
    return (slice(i * length // count, (i + 1) * length // count) for i in range(count))


def _shifted(part: slice, start: int) -> slice:
    return slice(start + part.start, start + part.stop)


def _tile_sizes(step: Step, batch: int, heads: int, rows: int, *, buffers: int) -> tuple[int, int, int]:
    """(sequences, rows, keys) per tile; ``buffers`` planes of scores per head stay alive beside what a step needs."""
    if step.dropout_key is not None:
        buffers += 2  # the hash and its shifted copy, on other devices than a CPU
    # the data of the bias is shared by the heads
    data = {"bucket": 1, "projected": 0 if step.data is None else step.data.shape[1]}.get(step.form, 0)
    area = max(ELEMENTS_PER_THREAD * torch.get_num_threads() // (buffers * heads + data), 1)
    side = 1 << (area.bit_length() - 1) // 2  # square tiles read the fewest rows of q and k per score
    tile_keys = max(min(max(length for _, _, length in step.segments), side), 1)
    tile_rows = max(min(rows, area // tile_keys), 1)
    return max(min(batch, area // (tile_keys * tile_rows)), 1), tile_rows, tile_keys


def _row_tiles(step: Step, q: Tensor, sizes: tuple[int, int, int]) -> Iterator[tuple[slice, slice, list[_Tile]]]:
    """Sequences, query rows and their tiles of keys; a tile never straddles a segment."""
    tile_batch, tile_rows, tile_keys = sizes
    for batch in _chunks(q.shape[0], tile_batch):
        for rows in _chunks(q.shape[2], tile_rows):
            tiles = [
                _Tile(batch, rows, _shifted(part, key_start), _shifted(part, column_start))
                for key_start, column_start, length in step.segments
                for part in _chunks(length, tile_keys)
            ]
            yield batch, rows, tiles


def _part(x: Tensor, batch: slice, rows: slice) -> Tensor:
    """Some rows of x [B, H, N, ...], as [b * H, n, ...]."""
    return x[batch, :, rows].flatten(0, 1)


def _whole(x: Tensor, batch: slice) -> Tensor:
    """[b * H, ...] as [b, H, ...]."""
    return x.unflatten(0, (_length(batch), -1))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for batches of matrices."""
    return torch.bmm(b.mT, a.mT).mT if b.shape[-1] < _NARROW else torch.bmm(a, b)


def _per_batch(tensor: Tensor, batch: slice) -> Tensor:
    """These sequences, of a tensor whose batch axis may have size 1."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


def _bias_data(step: Step, tile: _Tile, dtype: torch.dtype) -> Tensor | None:
    """index int64 [b, 1, m * n] or channels [b, C, m * n], without a copy where all sequences share them."""
    if step.data is None:
        return None
    data = _per_batch(step.data, tile.batch)[..., tile.rows, tile.columns].flatten(-2)
    data = data.long().unsqueeze(1) if step.form == "bucket" else data.to(dtype)
    return data.expand(_length(tile.batch), -1, -1)


def _set_to_bias(s: Tensor, step: Step, tile: _Tile, data: Tensor | None, table: Tensor | None) -> None:
    """Write the bias of a tile into s [b, H, m, n]."""
    assert step.learned is not None
    if data is None:
        s.copy_(_per_batch(step.learned, tile.batch)[:, :, tile.rows, tile.columns])
    elif table is None:
        torch.bmm(step.learned.to(s.dtype).expand(len(s), -1, -1), data, out=s.flatten(2))
    else:
        torch.gather(table.expand(len(s), -1, -1), 2, data.expand(-1, len(table), -1), out=s.flatten(2))


def _table(step: Step, dtype: torch.dtype) -> Tensor | None:
    """Of buckets, with a column for masked pairs."""
    return masked_table(step.learned.to(dtype)) if step.form == "bucket" and step.learned is not None else None


def _scores(
    step: Step, tile: _Tile, q: Tensor, k: Tensor, data: Tensor | None, table: Tensor | None, buffer: Tensor
) -> Tensor:
    """scale * q k^T + b of one tile [b * H, m, n] in the buffer, -inf where masked."""
    s = _tile_of(buffer, q, k)
    if step.form != "none":
        _set_to_bias(_whole(s, tile.batch), step, tile, data, table)
    s.baddbmm_(q, k.mT, beta=float(step.form != "none"), alpha=step.scale)
    for mask in _masks(step, tile):
        # adding 0 or -inf is several times faster on a CPU than masked_fill_ over all heads
        _whole(s, tile.batch).add_(s.new_zeros(mask.shape).masked_fill_(mask, -torch.inf))
    return s


def _masks(step: Step, tile: _Tile) -> Iterator[Tensor]:
    """What is masked beside the bias, bool [b or 1, 1, m or 1, n]."""
    if step.bias_mask is not None:
        yield _per_batch(step.bias_mask, tile.batch)[:, None, tile.rows, tile.columns]
    if step.key_padding_mask is not None:
        yield step.key_padding_mask[tile.batch, None, None, tile.columns]


def _tile_of(buffer: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Room for a value per pair of q [b * H, m, D] and k [b * H, n, D]."""
    shape = (*q.shape[:2], k.shape[1])
    return buffer[: math.prod(shape)].view(shape)


def _exp_difference_(s: Tensor, pivot: Tensor) -> Tensor:
    """exp(s - pivot) in place, pivot [b * H, m]; the base changes where numbers are small, which loses no digits."""
    return s.sub_(pivot.unsqueeze(-1)).mul_(_LOG2E).clamp_min_(_UNDERFLOW).exp2_()


def _finite(lse: Tensor) -> Tensor:
    """0 for a row that has met no valid key: a finite pivot avoids (-inf) - (-inf)."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _row_keys(step: Step, q: Tensor) -> Tensor | None:
    """Dropout keys of all rows, int32 [B, H, M]."""
    if step.dropout_key is None:
        return None
    row_ids = torch.arange(q.shape[2], device=q.device) if step.row_ids is None else step.row_ids
    return row_keys(step.dropout_key, q.shape[1], row_ids)


def attention_step(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first: bool,
    last: bool,
    m: Tensor | None,
    l: Tensor | None,
    acc: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    """Fold the visiting keys into the state; the last step writes ``out`` and ``lse`` instead.

    q [B, H, M, D]; k, v [B, H, n, D]; m, l [B, H, M] and acc [B, H, M, D] in fp32 or fp64, read unless ``first``,
    written unless ``last``; out [B, H, M, D] in q's dtype, lse [B, H, M].
    """
    compute = torch.promote_types(q.dtype, torch.float32)
    table, row_key = _table(step, compute), _row_keys(step, q)
    q, k, v = q.to(compute), k.to(compute), v.to(compute)
    sizes = _tile_sizes(step, *q.shape[:3], buffers=1)
    buffer = q.new_empty(q.shape[1] * math.prod(sizes))
    for batch, rows, tiles in _row_tiles(step, q, sizes):
        q_t = _part(q, batch, rows)
        state = None
        if not first:
            assert m is not None and l is not None and acc is not None
            state = _State(*(_part(x, batch, rows).clone() for x in (m, l, acc)))
        for tile in tiles:
            data = _bias_data(step, tile, compute)
            s = _scores(step, tile, q_t, _part(k, batch, tile.keys), data, table, buffer)
            m_new = s.amax(dim=-1) if state is None else torch.maximum(state.m, s.amax(dim=-1))
            pivot = _finite(m_new)
            p = _exp_difference_(s, pivot)
            l_new = p.sum(dim=-1)
            if row_key is not None:
                drop_(p, _part(row_key, batch, rows), step.dropout_p, tile.columns.start)
            acc_new = _matmul(p, _part(v, batch, tile.keys))
            if state is not None:
                rescale = (state.m - pivot).exp_()
                l_new += state.l * rescale
                acc_new += state.acc * rescale.unsqueeze(-1)
            state = _State(m_new, l_new, acc_new)
        if state is None:  # the first step brings no keys
            zeros = torch.zeros_like(q_t)
            state = _State(zeros[..., 0] - torch.inf, zeros[..., 0], zeros)
        at = (batch, slice(None), rows)
        if last:
            assert out is not None and lse is not None
            normaliser = state.l if row_key is None else state.l * (1.0 - step.dropout_p)
            out[at] = _whole(state.acc / normaliser.masked_fill(state.l == 0.0, 1.0).unsqueeze(-1), batch)
            lse[at] = _whole(state.m + state.l.log(), batch)
        else:
            assert m is not None and l is not None and acc is not None
            m[at], l[at], acc[at] = (_whole(x, batch) for x in state)


def attention_step_backward(
    step: Step,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    d_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_learned: Tensor | None,
) -> None:
    """Add this step's share to dq, dk, dv and the gradient of the learned part of the bias.

    d_out [B, H, M, D]; lse, delta = sum(d_out * out) - d_lse: [B, H, M]; the accumulators are fp32 or fp64 and have
    the shapes of q, k, v and ``step.learned``. ``d_learned`` None: not wanted; a dense plane that no sequences and no
    heads share is written instead.
    """
    compute = dq.dtype
    table, row_key = _table(step, compute), _row_keys(step, q)
    q, k, v, d_out = q.to(compute), k.to(compute), v.to(compute), d_out.to(compute)
    keep_scale = 1.0 if step.dropout_key is None else 1.0 / (1.0 - step.dropout_p)
    sizes = _tile_sizes(step, *q.shape[:3], buffers=2)
    buffers = q.new_empty(2, q.shape[1] * math.prod(sizes))
    pivot = _finite(lse)
    for batch, rows, tiles in _row_tiles(step, q, sizes):
        q_t, d_out_t = _part(q, batch, rows), _part(d_out, batch, rows)
        pivot_t, delta_t = _part(pivot, batch, rows), _part(delta, batch, rows)
        for tile in tiles:
            k_t, v_t = _part(k, batch, tile.keys), _part(v, batch, tile.keys)
            data = _bias_data(step, tile, compute)
            p = _exp_difference_(_scores(step, tile, q_t, k_t, data, table, buffers[0]), pivot_t)
            dp = _tile_of(buffers[1], q_t, k_t).baddbmm_(d_out_t, v_t.mT, beta=0.0, alpha=keep_scale)
            if row_key is None:
                ds = dp.sub_(delta_t.unsqueeze(-1)).mul_(p)
            else:
                ds = dp
                softmax_backward_(ds, p, delta_t, _part(row_key, batch, rows), step.dropout_p, tile.columns.start)
            _add(dv, tile.batch, tile.keys, _matmul(p.mT, d_out_t), keep_scale)
            _add(dq, tile.batch, tile.rows, _matmul(ds, k_t), step.scale)
            _add(dk, tile.batch, tile.keys, _matmul(ds.mT, q_t), step.scale)
            if d_learned is not None:
                _add_bias_gradient(step, tile, _whole(ds, tile.batch), data, d_learned, planes=q.shape[:2])


def _add(total: Tensor, batch: slice, rows: slice, share: Tensor, factor: float) -> None:
    """Add factor * share [b * H, n, D] to these rows of total [B, H, N, D]."""
    total[batch, :, rows].add_(_whole(share, batch), alpha=factor)


def _add_bias_gradient(
    step: Step, tile: _Tile, ds: Tensor, data: Tensor | None, d_learned: Tensor, *, planes: torch.Size
) -> None:
    """Add one tile's share, from ds [b, H, m, n]; ``planes``: sequences and heads of all tiles."""
    if data is None:
        region = _per_batch(d_learned, tile.batch)[:, :, tile.rows, tile.columns]
        if d_learned.shape[:2] == planes:  # no other tile has a share in it
            region.copy_(ds)
        else:
            region += ds.sum_to_size(region.shape)
    elif step.form == "projected":
        d_learned += torch.bmm(ds.flatten(2), data.mT).sum(dim=0)
    else:
        sums = ds.new_zeros(*ds.shape[:2], MASKED_BUCKET + 1)
        sums.scatter_add_(2, data.expand(-1, ds.shape[1], -1), ds.flatten(2))
        d_learned += sums[..., : d_learned.shape[1]].sum(dim=0)
