"""The CPU path: one attention step in torch operations on tiles, forward and backward.

The same contract as the Triton launchers: scores of the visiting keys are folded into a running max m, sum l and
output acc (FlashAttention, arXiv:2205.14135, Alg. 1; logarithms are natural here), a compact bias is expanded one tile
at a time, and the backward recomputes the scores from lse. Whatever B, H and N are, all score-sized temporaries
together hold at most ``ELEMENTS_PER_THREAD`` elements per thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megagraph.attention.bias import MASKED_BUCKET
from megagraph.attention.dropout import keep_mask, row_keys
from megagraph.attention.step import Step

ELEMENTS_PER_THREAD = 1 << 20
_TEMPORARIES = 4  # alive at a time in backward: p, dp, what dropout keeps, and the bias or a hash


@dataclass(frozen=True, slots=True)
class _Tile:
    """Batch, rows, visiting keys and bias columns of one tile of scores."""

    batch: slice
    rows: slice
    keys: slice
    columns: slice


class _State(NamedTuple):
    """Running max m, sum l [b, H, m] and unnormalised output acc [b, H, m, D] of some rows."""

    m: Tensor
    l: Tensor
    acc: Tensor


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _shifted(part: slice, start: int) -> slice:
    return slice(start + part.start, start + part.stop)


def _tile_sizes(step: Step, batch: int, heads: int, rows: int) -> tuple[int, int, int]:
    """(sequences, rows, keys) per tile; heads stay together because they share the bias data."""
    planes = max(heads, step.data.shape[1]) if step.form == "projected" and step.data is not None else heads
    area = max(ELEMENTS_PER_THREAD * torch.get_num_threads() // (_TEMPORARIES * planes), 1)
    side = 1 << (area.bit_length() - 1) // 2  # square tiles read the fewest rows of q and k per score
    tile_keys = max(min(max(length for _, _, length in step.segments), side), 1)
    tile_rows = max(min(rows, area // tile_keys), 1)
    return max(min(batch, area // (tile_keys * tile_rows)), 1), tile_rows, tile_keys


def _row_tiles(step: Step, q: Tensor) -> Iterator[tuple[slice, slice, list[_Tile]]]:
    """Sequences, query rows and their tiles of keys; a tile never straddles a segment."""
    tile_batch, tile_rows, tile_keys = _tile_sizes(step, *q.shape[:3])
    for batch in _chunks(q.shape[0], tile_batch):
        for rows in _chunks(q.shape[2], tile_rows):
            tiles = [
                _Tile(batch, rows, _shifted(part, key_start), _shifted(part, column_start))
                for key_start, column_start, length in step.segments
                for part in _chunks(length, tile_keys)
            ]
            yield batch, rows, tiles


def _per_batch(tensor: Tensor, batch: slice) -> Tensor:
    """These sequences, of a tensor whose batch axis may have size 1."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


def _bias_data(step: Step, tile: _Tile) -> Tensor:
    """index int32 [b, m * n], or channels [b, C, m * n]; b is 1 where all sequences share them."""
    assert step.data is not None
    data = _per_batch(step.data, tile.batch)[..., tile.rows, tile.columns].flatten(-2)
    return data.int() if step.form == "bucket" else data


def _bias(step: Step, tile: _Tile, table: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bias of one tile, [b or 1, H or 1, m, n]."""
    assert step.learned is not None
    if step.form == "dense":
        return _per_batch(step.learned, tile.batch)[:, :, tile.rows, tile.columns].to(dtype)
    data = _bias_data(step, tile)
    if step.form == "bucket":
        assert table is not None
        values = table.index_select(1, data.flatten()).view(-1, *data.shape).transpose(0, 1)
    else:
        weight = step.learned.to(dtype).expand(data.shape[0], -1, -1)
        values = torch.bmm(weight, data.to(dtype))  # matmul would fold the batch away, with two copies
    return values.unflatten(-1, (tile.rows.stop - tile.rows.start, -1))


def _masked_table(step: Step, dtype: torch.dtype) -> Tensor | None:
    """The bucket table with -inf in the columns up to 255, so that a masked pair is one more look-up."""
    if step.form != "bucket":
        return None
    assert step.learned is not None
    table = step.learned.new_full((step.learned.shape[0], MASKED_BUCKET + 1), -torch.inf, dtype=dtype)
    table[:, : step.learned.shape[1]] = step.learned
    return table


def _contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast and laid out so that products of its tiles need no copies."""
    return x.to(dtype).contiguous()


def _scaled(x: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """factor * x, as :func:`_contiguous`, in one pass."""
    return torch.mul(x.to(dtype), factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def _scores(step: Step, tile: _Tile, scaled_q: Tensor, k: Tensor, table: Tensor | None) -> Tensor:
    """scale * q k^T + b of one tile [b, H, m, n], -inf where masked."""
    q_t, k_t = scaled_q[tile.batch, :, tile.rows], k[tile.batch, :, tile.keys]
    s = torch.matmul(q_t, k_t.transpose(-1, -2))
    if step.form != "none":
        s += _bias(step, tile, table, s.dtype)
    if step.bias_mask is not None:
        s += _additive(_per_batch(step.bias_mask, tile.batch)[:, None, tile.rows, tile.columns], s.dtype)
    if step.key_padding_mask is not None:
        s += _additive(step.key_padding_mask[tile.batch, None, None, tile.columns], s.dtype)
    return s


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 or -inf; adding it is several times faster on a CPU than masked_fill_ over all heads."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _row_keys(step: Step, q: Tensor) -> Tensor | None:
    """Dropout keys of all rows, int32 [B, H, M]."""
    if step.dropout_key is None:
        return None
    row_ids = torch.arange(q.shape[2], device=q.device) if step.row_ids is None else step.row_ids
    return row_keys(step.dropout_key, q.shape[1], row_ids)


def _kept(step: Step, tile: _Tile, row_key: Tensor, dtype: torch.dtype) -> Tensor:
    """1 where kept, 0 where dropped [b, H, m, n]; multiplying is faster on a CPU than filling by a boolean mask."""
    columns = torch.arange(tile.columns.start, tile.columns.stop, device=row_key.device)
    return keep_mask(row_key, columns, step.dropout_p).to(dtype)


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
    table, row_key = _masked_table(step, compute), _row_keys(step, q)
    scaled_q, k, v = _scaled(q, step.scale, compute), _contiguous(k, compute), _contiguous(v, compute)
    for batch, rows, tiles in _row_tiles(step, q):
        at = (batch, slice(None), rows)
        state = None
        if not first:
            assert m is not None and l is not None and acc is not None
            state = _State(m[at], l[at], acc[at])
        for tile in tiles:
            s = _scores(step, tile, scaled_q, k, table)
            m_new = s.amax(dim=-1) if state is None else torch.maximum(state.m, s.amax(dim=-1))
            # a row that has met no valid key keeps m == -inf; a finite pivot avoids (-inf) - (-inf)
            pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = s.sub_(pivot.unsqueeze(-1)).exp_()
            l_new = p.sum(dim=-1)
            if row_key is not None:
                p *= _kept(step, tile, row_key[at], compute)
            acc_new = torch.matmul(p, v[tile.batch, :, tile.keys])
            if state is not None:
                rescale = (state.m - pivot).exp_()
                l_new += state.l * rescale
                acc_new += state.acc * rescale.unsqueeze(-1)
            state = _State(m_new, l_new, acc_new)
        if state is None:  # the first step brings no keys
            zeros = torch.zeros_like(scaled_q[at])
            state = _State(zeros[..., 0] - torch.inf, zeros[..., 0], zeros)
        if last:
            assert out is not None and lse is not None
            normaliser = state.l if row_key is None else state.l * (1.0 - step.dropout_p)
            out[at] = state.acc / normaliser.masked_fill(state.l == 0.0, 1.0).unsqueeze(-1)
            lse[at] = state.m + state.l.log()
        else:
            assert m is not None and l is not None and acc is not None
            m[at], l[at], acc[at] = state


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
    the shapes of q, k, v and ``step.learned``. ``d_learned`` None: not wanted.
    """
    compute = dq.dtype
    table, row_key = _masked_table(step, compute), _row_keys(step, q)
    scaled_q, k, v = _scaled(q, step.scale, compute), _contiguous(k, compute), _contiguous(v, compute)
    keep_scale = 1.0 if step.dropout_key is None else 1.0 / (1.0 - step.dropout_p)
    d_out = _scaled(d_out, keep_scale, compute)
    for batch, rows, tiles in _row_tiles(step, q):
        at = (batch, slice(None), rows)
        q_t, d_out_t = scaled_q[at], d_out[at]
        pivot = lse[at].masked_fill(lse[at] == -torch.inf, 0.0).unsqueeze(-1)
        delta_t = delta[at].unsqueeze(-1)
        for tile in tiles:
            keys = (tile.batch, slice(None), tile.keys)
            p = _scores(step, tile, scaled_q, k, table).sub_(pivot).exp_()
            dp = torch.matmul(d_out_t, v[keys].transpose(-1, -2))
            p_kept = p
            if row_key is not None:
                kept = _kept(step, tile, row_key[at], compute)
                dp *= kept
                p_kept = kept.mul_(p)
            dv[keys] += torch.matmul(p_kept.transpose(-1, -2), d_out_t)
            ds = dp.sub_(delta_t).mul_(p)
            dq[at].add_(torch.matmul(ds, k[keys]), alpha=step.scale)
            dk[keys] += torch.matmul(ds.transpose(-1, -2), q_t)
            if d_learned is not None:
                _add_bias_gradient(step, tile, ds, d_learned)


def _add_bias_gradient(step: Step, tile: _Tile, ds: Tensor, d_learned: Tensor) -> None:
    """Add one tile's share, from ds [b, H, m, n]."""
    if step.form == "dense":
        region = _per_batch(d_learned, tile.batch)[:, :, tile.rows, tile.columns]
        region += ds.sum_to_size(region.shape)
        return
    data = _bias_data(step, tile)
    ds = ds.flatten(-2)
    if data.shape[0] == 1:
        ds = ds.sum(dim=0, keepdim=True)
    if step.form == "projected":
        d_learned += torch.matmul(ds, data.to(ds.dtype).transpose(-1, -2)).sum(dim=0)
        return
    sums = ds.new_zeros(ds.shape[1], MASKED_BUCKET + 1)
    sums.scatter_add_(1, data.flatten().long().expand(ds.shape[1], -1), ds.transpose(0, 1).flatten(1))
    d_learned += sums[:, : d_learned.shape[1]]
