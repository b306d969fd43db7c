"""One rank of a context-parallel group that lives in this process: its rows, and whom they attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from megagraph.attention.engines import ENGINES, state_dtype
from megagraph.attention.layout import NodeLayout
from megagraph.attention.once import differentiable_once
from megagraph.attention.operator import attention_step_, attention_step_backward_, learned_gradient
from megagraph.attention.step import Gradients, Segments, State, Step


@dataclass(frozen=True)
class Rank:
    """The rows of q [B, H, M, D], the keys k and v [B, H, S, D] that are here, and the steps of the rows' softmax.

    Args:
        steps: against the keys that are here; the last one also meets those of other ranks.
    """

    layout: NodeLayout
    steps: tuple[Step, ...]
    q: Tensor
    k: Tensor
    v: Tensor

    def prepared(self) -> Rank:
        return replace(self, steps=tuple(ENGINES[step.engine].prepare(step, self.q) for step in self.steps))

    def visited(self, segments: Segments) -> tuple[Step, ...]:
        """The step against keys of other ranks, which stand in these columns."""
        return (self.steps[-1].but(segments=segments),)

    def state(self) -> State:
        """A softmax state of the rows, to be filled, with room for its result."""
        q, dtype = self.q, state_dtype(self.q)
        m, l, lse = (q.new_empty(q.shape[:3], dtype=dtype) for _ in range(3))
        acc, out = q.new_empty(q.shape, dtype=dtype), torch.empty_like(q)
        return State(first=False, last=False, m=m, l=l, acc=acc, out=out, lse=lse)

    def gradients(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, learned_grad: bool) -> Gradients:
        """Zeros to add to, those of the learned part if wanted, with what every step reads."""
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (self.q, self.k, self.v))
        step, d_learned = self.steps[-1], None
        if learned_grad and step.learned is not None:
            d_learned = learned_gradient(step, self.q, step.learned, accumulate=True)
        delta = ENGINES[step.engine].delta(step, d_out, out, d_lse)
        return Gradients(d_out=d_out, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=True)


def fold(rank: Rank, steps: tuple[Step, ...], k: Tensor, v: Tensor, state: State, *, first: bool, last: bool) -> None:
    """Take these keys into the softmax, of which they are the first or the last."""
    for i, step in enumerate(steps):
        now = state.at(first=first and i == 0, last=last and i == len(steps) - 1)
        with record_function("ring step"):
            attention_step_(rank.q, k, v, *step.flat(), *now.flat())


def fold_back(rank: Rank, steps: tuple[Step, ...], k: Tensor, v: Tensor, gradients: Gradients) -> None:
    """Add the share of these keys."""
    for step in steps:
        with record_function("ring step"):
            attention_step_backward_(rank.q, k, v, *step.flat(), *gradients.flat())


def wait(arriving: Callable[[], list[Tensor]]) -> list[Tensor]:
    with record_function("exchange wait"):
        return arriving()


class Home:
    """No way to go: all keys and values are here."""

    def forward(self, ranks: list[Rank]) -> tuple[list[State], list[Tensor]]:
        states = [rank.state() for rank in ranks]
        for rank, state in zip(ranks, states, strict=True):
            fold(rank, rank.steps, rank.k, rank.v, state, first=True, last=True)
        return states, []

    def backward(self, ranks: list[Rank], own: list[Gradients], kept: tuple[Tensor, ...]) -> None:
        for rank, sums in zip(ranks, own, strict=True):
            fold_back(rank, rank.steps, rank.k, rank.v, sums)


class RankAttention(torch.autograd.Function):
    """out and lse of every rank that is here, from its q, k, v and the learned part of its bias, or None.

    ``way`` moves keys and values to where they are attended to: its ``forward(ranks)`` gives the states of the ranks
    and what it wants to keep, its ``backward(ranks, own, kept)`` adds to their gradients.
    """

    @staticmethod
    def forward(ctx, way, layouts, steps, *inputs):
        states, kept = way.forward([rank.prepared() for rank in _ranks(layouts, steps, inputs)])
        results = [x for state in states for x in (state.out, state.lse)]
        # the learned part is an input of its own, for autograd's sake
        parts = [[step.but(learned=None).split() for step in of_rank] for of_rank in steps]
        ctx.way, ctx.layouts, ctx.num_kept = way, layouts, len(kept)
        ctx.values = [[values for values, _ in of_rank] for of_rank in parts]
        of_steps = (x for of_rank in parts for _, tensors in of_rank for x in tensors)
        ctx.save_for_backward(*inputs, *results, *kept, *of_steps)
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        tensors = iter(ctx.saved_tensors)  # activation checkpointing lets them be read once
        sizes = 4 * len(ctx.layouts), 2 * len(ctx.layouts), ctx.num_kept
        inputs, results, kept = (tuple(islice(tensors, size)) for size in sizes)
        steps = [[Step.join(values, tensors) for values in of_rank] for of_rank in ctx.values]
        ranks, learned_grad = _ranks(ctx.layouts, steps, inputs), ctx.needs_input_grad[6]
        own = [
            rank.gradients(out, lse, d_out, d_lse, learned_grad)
            for rank, out, lse, d_out, d_lse in zip(
                ranks, results[0::2], results[1::2], grads[0::2], grads[1::2], strict=True
            )
        ]
        ctx.way.backward([rank.prepared() for rank in ranks], own, kept)
        flat = [x for of_rank in own for x in (of_rank.dq, of_rank.dk, of_rank.dv, of_rank.d_learned)]
        return *(None,) * 3, *(None if d is None else d.to(x.dtype) for d, x in zip(flat, inputs, strict=True))


def _ranks(layouts: list[NodeLayout], steps: Sequence[Sequence[Step]], inputs: tuple[Tensor, ...]) -> list[Rank]:
    ranks = []
    for i, (layout, of_rank) in enumerate(zip(layouts, steps, strict=True)):
        q, k, v, learned = inputs[4 * i : 4 * i + 4]
        ranks.append(Rank(layout, tuple(step.but(learned=learned) for step in of_rank), q, k, v))
    return ranks
