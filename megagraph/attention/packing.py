"""Rows of padding left out: hidden states [B, S, E] as [T, E], the T rows that are nodes, one after the other.

What treats every row by itself does not notice; attention finds the rows of a sequence by where they start.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.once import differentiable_once


class Rows(NamedTuple):
    """Which rows the sequences have: those of sequence b are ``start[b]`` to ``start[b + 1]`` of the lists."""

    start: np.ndarray  # int64 [B + 1]
    slot: np.ndarray  # int64 [R], place in the sequence: row or column of the bias and of dropout
    at: np.ndarray  # int64 [R], place in the tensor

    @classmethod
    @lru_cache(maxsize=8)  # every call of every layer asks for the same
    def whole(cls, batch: int, length: int) -> Rows:
        slot = np.tile(np.arange(length), batch)
        return cls(np.arange(batch + 1) * length, slot, slot)

    @classmethod
    def unpadded(cls, padding: Tensor) -> Rows:
        """The rows that are not padding, bool [B, N]."""
        kept = ~padding.numpy()
        slot = np.ascontiguousarray(np.nonzero(kept)[1])  # a view would be a type of its own, compiled once more
        return cls(np.concatenate([[0], kept.sum(axis=1).cumsum()]), slot, slot)

    def packed(self) -> Rows:
        """These rows as they stand in a tensor that has them alone, one after the other."""
        return self._replace(at=np.arange(len(self.slot)))


class Packing:
    """Where the T rows stand in B sequences of S slots, on a CPU.

    Args:
        padding: bool [B, S], not True everywhere.
    """

    def __init__(self, padding: Tensor) -> None:
        self.padding = padding
        self.slots = torch.nonzero(~padding.flatten()).squeeze(1)  # int64 [T], b * S + s
        self.rows = Rows.unpadded(padding).packed()
        # in a slot of padding some row, which nothing reads
        self._row_of = ((~padding).flatten().cumsum(0) - 1).clamp_(min=0).view(padding.shape)

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [T, E]."""
        return _Pack.apply(x, self.slots)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, E] -> [B, S, E], 0 in slots of padding."""
        return _Unpack.apply(x, self.slots, self.padding.shape)

    def first_rows(self, x: Tensor, num_rows: int) -> Tensor:
        """The first slots of every sequence, [T, E] -> [B, M, E]; in one of padding stands any row."""
        return torch.nn.functional.embedding(self._row_of[:, :num_rows], x)


class _Pack(torch.autograd.Function):
    """A gradient goes the other way, as every row stands in one slot."""

    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor):
        ctx.slots, ctx.shape = slots, x.shape[:2]
        return x.flatten(0, 1).index_select(0, slots)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_out):
        return _spread(d_out, ctx.slots, ctx.shape), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, slots: Tensor, shape: torch.Size):
        ctx.slots = slots
        return _spread(x, slots, shape)

    @staticmethod
    @differentiable_once
    def backward(ctx, d_out):
        return d_out.flatten(0, 1).index_select(0, ctx.slots), None, None


def _spread(x: Tensor, slots: Tensor, shape: torch.Size) -> Tensor:
    """[T, E] -> [B, S, E]."""
    out = x.new_zeros(*shape, x.shape[-1])
    out.view(-1, x.shape[-1]).index_copy_(0, slots, x)
    return out
