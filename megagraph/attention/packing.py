"""Rows of padding left out: hidden states [B, S, E] as [T, E], the T rows that are nodes, one after the other.

What treats every row by itself does not notice; attention gets whole sequences again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Packing:
    """Where the T rows stand in B sequences of S slots.

    Args:
        padding: bool [B, S], not True everywhere.
    """

    def __init__(self, padding: Tensor) -> None:
        self.padding = padding
        self.slots = torch.nonzero(~padding.flatten()).squeeze(1)  # int64 [T], b * S + s
        self._made: dict[int | None, _Maps] = {}

    def pack(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [T, E]."""
        return _Move.apply(x, self._maps(None), _Maps.join, _Maps.split)

    def unpack(self, x: Tensor) -> Tensor:
        """[T, E] -> [B, S, E], 0 in slots of padding."""
        return _Move.apply(x, self._maps(None), _Maps.split, _Maps.join)

    def split_heads(self, x: Tensor, heads: int) -> Tensor:
        """[T, H * D] -> [B, H, S, D], 0 in slots of padding."""
        return _Move.apply(x, self._maps(heads), _Maps.split, _Maps.join)

    def join_heads(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> [T, H * D]."""
        return _Move.apply(x, self._maps(x.shape[1]), _Maps.join, _Maps.split)

    def _maps(self, heads: int | None) -> _Maps:
        if heads not in self._made:
            self._made[heads] = _Maps(self.padding, self.slots, heads)
        return self._made[heads]


class _Maps:
    """For rows of single heads: the row of every slot [B, H, S], and the slot of every row [T, H]."""

    def __init__(self, padding: Tensor, slots: Tensor, heads: int | None) -> None:
        B, S = padding.shape
        self.shape = (B, S) if heads is None else (B, heads, S)
        head = torch.arange(heads or 1, device=padding.device)
        # in a slot of padding any row, which is overwritten
        row = ((~padding).flatten().cumsum(0) - 1).clamp_(min=0).view(B, 1, S)
        self.rows = (row * len(head) + head[:, None]).flatten()
        b, s = slots[:, None] // S, slots[:, None] % S
        self.slots = ((b * len(head) + head) * S + s).flatten()
        self.empty = torch.nonzero(padding[:, None].expand(B, len(head), S).flatten()).squeeze(1)
        self.num_rows = len(slots)

    def split(self, x: Tensor) -> Tensor:
        """[T, H * D] -> [B, H, S, D]."""
        single = x.reshape(len(self.slots), -1)
        # not a view of what is selected: a pipeline's stages detach their results in place
        out = x.new_empty(*self.shape, single.shape[1])
        torch.index_select(single, 0, self.rows, out=out.view(-1, single.shape[1])).index_fill_(0, self.empty, 0)
        return out

    def join(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> [T, H * D]."""
        single = x.reshape(len(self.rows), -1)
        return single.index_select(0, self.slots).view(self.num_rows, -1)


class _Move(torch.autograd.Function):
    """One way; a gradient goes the other way, as every row stands in one slot."""

    @staticmethod
    def forward(ctx, x: Tensor, maps: _Maps, there: Callable, back: Callable):
        ctx.maps, ctx.back = maps, back
        return there(maps, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        return ctx.back(ctx.maps, d_out), None, None, None
