"""A ring: keys and values of every rank go round, past the queries of all (arXiv:2310.01889, paper Sec. 3.2).

    step 0      every rank attends from its rows to its own block and to the super nodes
    step s      the block of rank i - s is here; k and v of step s + 1 are on their way from rank i - 1
    backward    the blocks go round again; the gradient of a block's k and v follows one step behind it, and is
                home after the last step

Whatever travels does so while a step computes, but for the gradients' way home. Super nodes never travel and enter
every softmax once; the gradient of a block's own step stays where it is. A rank sends (P - 1) * 2 * R * d elements
forward, and backward as many of k and v and as many of their gradients, R that of the largest block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megagraph.attention.exchange import Exchange
from megagraph.attention.rank import Rank, fold, fold_back, wait
from megagraph.attention.step import Gradients, State, Step


@dataclass(frozen=True)
class Ring:
    """The way of keys and values in ``rank.RankAttention``."""

    exchange: Exchange

    def forward(self, ranks: list[Rank]) -> tuple[list[State], list[Tensor]]:
        world_size, states = ranks[0].layout.world_size, [rank.state() for rank in ranks]
        blocks = [_message(rank, rank.k, rank.v) for rank in ranks]
        free = [torch.empty_like(block) for block in blocks]
        for s in range(world_size):
            first, last = s == 0, s == world_size - 1
            arriving = None if last else self.exchange.shift(blocks, free)
            for rank, block, state in zip(ranks, blocks, states, strict=True):
                k, v = (rank.k, rank.v) if first else block
                fold(rank, _steps(rank, s), k, v, state, first=first, last=last)
            if arriving is not None:
                blocks, free = wait(arriving), blocks
        return states, []

    def backward(self, ranks: list[Rank], own: list[Gradients], kept: tuple[Tensor, ...]) -> None:
        """dk and dv are those of a rank's own block."""
        world_size = ranks[0].layout.world_size
        blocks = [_message(rank, rank.k, rank.v) for rank in ranks]
        free = [torch.empty_like(block) for block in blocks]

        def visiting_sums() -> list[Tensor]:
            return [torch.empty_like(block, dtype=sums.dk.dtype) for block, sums in zip(blocks, own, strict=True)]

        # dk and dv [2, B, H, R, D] of the visiting blocks: computed in one buffer while the other one is sent
        buffers, received = [visiting_sums() for _ in range(min(world_size - 1, 2))], visiting_sums()
        following: Callable[[], list[Tensor]] | None = (
            None  # what the ranks before this one added to the visiting block
        )
        for s in range(world_size):
            first, last = s == 0, s == world_size - 1
            arriving = None if last else self.exchange.shift(blocks, free)
            visiting = [] if first else buffers[s % len(buffers)]
            for i, (rank, block, sums) in enumerate(zip(ranks, blocks, own, strict=True)):
                k, v = (rank.k, rank.v) if first else block
                if not first:
                    dk, dv = visiting[i].zero_()
                    sums = sums.but(dk=dk, dv=dv)
                fold_back(rank, _steps(rank, s), k, v, sums)
            if following is not None:
                torch._foreach_add_(visiting, wait(following))
            if not first:
                following = self.exchange.shift(visiting, received)
            if arriving is not None:
                blocks, free = wait(arriving), blocks
        if following is not None:  # home
            for rank, sums, (dk, dv) in zip(ranks, own, wait(following), strict=True):
                rows = rank.layout.block_size
                sums.dk[:, :, :rows] += dk[:, :, :rows]
                sums.dv[:, :, :rows] += dv[:, :, :rows]


def _message(rank: Rank, x: Tensor, y: Tensor) -> Tensor:
    """The rows that travel, of two tensors [B, H, S, D], as one message [2, B, H, R, D]."""
    layout = rank.layout
    if layout.block_size == layout.largest_block:
        return torch.stack([x[:, :, : layout.block_size], y[:, :, : layout.block_size]])
    return torch.stack([layout.padded(x, 2), layout.padded(y, 2)])


def _steps(rank: Rank, s: int) -> tuple[Step, ...]:
    """Steps of a rank's rows against the block that visits in the s-th step of the ring; its own at s = 0."""
    if s == 0:
        return rank.steps
    block = rank.layout.block((rank.layout.rank - s) % rank.layout.world_size)
    return rank.visited([(0, block.start, len(block))])
