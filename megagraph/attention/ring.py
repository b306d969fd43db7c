"""Ring attention that stays exact with a learnable bias (GA-CP, paper Sec. 3.2; arXiv:2310.01889).

    step 0      every rank attends from its rows to its own block and to the super nodes
    step s      the block of rank i - s is here; k and v of step s + 1 are on their way from rank i - 1
    backward    the blocks go round again; the gradient of a block's k and v follows one step behind it, and is
                home after the last step

Whatever travels does so while a step computes, but for the gradients' way home. Super nodes never travel and enter
every softmax once; the gradient of a block's own step stays where it is. A rank sends (P - 1) * 2 * R * d elements
forward, and backward as many of k and v and as many of their gradients.

``comm="allgather"`` spends memory to save steps: k and v of all ranks are gathered once, one call attends to them, and
backward sums what all ranks have of a block's gradient where the block is at home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh

from megagraph.attention.bias import Bias, BorderedBias
from megagraph.attention.bordered import bordered_attention
from megagraph.attention.checks import check_inputs
from megagraph.attention.engines import ENGINES, Impl, choose, state_dtype
from megagraph.attention.exchange import Exchange, Loopback, make_exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.operator import (
    as_bias,
    attention,
    attention_step_,
    attention_step_backward_,
    learned_gradient,
    make_step,
)
from megagraph.attention.step import Gradients, State, Step

Comm = Literal["ring", "allgather"]


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = ...,
    comm: Comm = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    impl: Impl | None = ...,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = ...,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = ...,
    comm: Comm = ...,
    key_padding_mask: Tensor | None = ...,
    scale: float | None = ...,
    dropout_p: float = ...,
    dropout_key: Tensor | None = ...,
    return_lse: Literal[True],
    impl: Impl | None = ...,
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = None,
    *,
    layout: NodeLayout,
    mesh: DeviceMesh | None = None,
    comm: Comm = "ring",
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    return_lse: bool = False,
    impl: Impl | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`megagraph.biased_attention` with the nodes of a sequence spread over the ranks of a CP group.

    Every rank passes its rows and gets its rows; together they are what one device computes, to rounding, with
    dropout too. Gradients of super rows and of what all ranks hold (a table, a weight) are shares: their sum over the
    group is the gradient. Collective: all ranks of ``mesh`` call it, forward and backward, in the same order.

    Args:
        q: [B, H, M, D], the first M of this rank's S rows; usually M = S.
        k, v: [B, H, S, D], all its rows in the order of ``layout.local_to_global``.
        bias: these M rows, all N columns: a bias class of shape [B or 1, H or 1, M, N] or a float tensor.
        layout: which nodes this rank holds.
        mesh: the CP group, one dim; ``None`` for one rank.
        comm: ``"ring"``: k and v travel in P - 1 steps behind which they hide, and no rank ever holds more than three
            blocks; ``"allgather"``: they are gathered once and kept for backward, which is faster where sequences are
            short. The result is the same, to rounding.
        key_padding_mask: bool [B, N], all columns.
        scale, dropout_p, dropout_key, return_lse, impl: as in ``biased_attention``; ``dropout_key`` must be equal on
            all ranks; ``impl="reference"`` runs on one rank only.

    Returns:
        out [B, H, M, D], and lse [B, H, M] if asked for; padding rows hold numbers of no meaning.

    Raises:
        ValueError: shape, dtype, device or value of an argument; the message gives expected and actual.
        NotImplementedError: ``impl`` cannot run these inputs; every reason is listed.
    """
    given = as_bias(bias)
    check_comm(comm)
    layout.check_mesh(mesh)
    check_inputs(q, k, v, given, key_padding_mask, dropout_p, dropout_key, layout)
    sparse = given is not None and given.relation is not None
    engine, _ = path = choose(impl, q, ring=layout.world_size > 1, sparse=sparse)
    if sparse and layout.world_size > 1:
        raise NotImplementedError(f"a sparse bias needs all nodes on one rank so far, got {layout.world_size} ranks")
    if isinstance(given, BorderedBias) and engine != "reference":
        out, lse = bordered_attention(q, k, v, given, key_padding_mask, scale, dropout_p, dropout_key, engine)
        return (out, lse) if return_lse else out
    step = make_step(q, given, key_padding_mask, scale, dropout_p, dropout_key, *path)
    if mesh is None or layout.world_size == 1:
        out, lse = attention(step, q, k, v, given)
    else:
        out, lse = _attend(comm, make_exchange(mesh, q.device), [layout], [step], [q, k, v, step.learned])
    return (out, lse) if return_lse else out


def loopback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | Tensor | None = None,
    *,
    num_super: int,
    world_size: int,
    comm: Comm = "ring",
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`ring_attention` of ``world_size`` ranks in one process, without communication, for tests and benchmarks.

    Takes and returns whole tensors: q, k, v [B, H, N, D], the last ``num_super`` nodes super nodes, bias
    [B or 1, H or 1, N, N] -> out [B, H, N, D], lse [B, H, N].
    """
    given = as_bias(bias)
    check_inputs(q, k, v, given, key_padding_mask, dropout_p, dropout_key)
    path = choose(impl, q, ring=True)
    num_nodes = q.shape[2] - num_super
    layouts = [NodeLayout(num_nodes, num_super, rank, world_size) for rank in range(world_size)]
    steps, inputs = [], []
    for layout in layouts:
        rows = None if given is None else given.rows(layout.local_to_global.clamp(min=0).to(q.device))
        steps.append(make_step(q, rows, key_padding_mask, scale, dropout_p, dropout_key, *path))
        inputs += [*(layout.shard(x, 2) for x in (q, k, v)), steps[-1].learned]
    flat = _attend(check_comm(comm), Loopback(), layouts, steps, inputs)
    size = layouts[0].block_size
    out, lse = (
        layouts[0].join([x[:, :, :size] for x in parts], parts[0][:, :, size:], dim=2)
        for parts in (flat[0::2], flat[1::2])
    )
    return out, lse


def check_comm(comm: Comm) -> Comm:
    """``comm``, or a ValueError where there is no such way."""
    if comm not in get_args(Comm):
        raise ValueError(f"comm must be {' or '.join(map(repr, get_args(Comm)))}, got {comm!r}")
    return comm


def _attend(
    comm: Comm,
    exchange: Exchange,
    layouts: list[NodeLayout],
    steps: list[Step],
    inputs: list[Any],
) -> Sequence[Tensor]:
    """out and lse of every rank here; ``inputs`` are q, k, v and the learned part of the bias, or None, of each."""
    if comm == "ring":
        return _RingAttention.apply(exchange, layouts, steps, *inputs)
    q, k, v = inputs[0::4], inputs[1::4], inputs[2::4]
    gathered = _Gather.apply(exchange, layouts, *(x for pair in zip(k, v, strict=True) for x in pair))
    results: list[Tensor] = []
    for layout, step, rows, keys, values in zip(layouts, steps, q, gathered[0::2], gathered[1::2], strict=True):
        with record_function("ring step"):
            results += attention(_with_rows(step, layout, rows), rows, keys, values, None)
    return results


def _with_rows(step: Step, layout: NodeLayout, q: Tensor) -> Step:
    """The step with the global rows of q, which dropout needs."""
    rows = None if step.dropout_key is None else layout.row_ids(q.device)[: q.shape[2]].int()
    return replace(step, row_ids=rows)


class _Gather(torch.autograd.Function):
    """k and v [B, H, S, D] of every rank here -> those of all nodes [B, H, N, D], its own super rows among them."""

    @staticmethod
    def forward(ctx, exchange, layouts, *inputs):
        ctx.exchange, ctx.layouts = exchange, layouts
        size = layouts[0].block_size
        rows = [torch.stack(pair) for pair in zip(inputs[0::2], inputs[1::2], strict=True)]  # [2, B, H, S, D]
        with record_function("exchange wait"):
            gathered = exchange.gather([x[:, :, :, :size].contiguous() for x in rows])
        whole = (
            layout.join(blocks.unbind(), x[:, :, :, size:], dim=3)
            for layout, blocks, x in zip(layouts, gathered, rows, strict=True)
        )
        return tuple(x for pair in whole for x in pair)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        layout = ctx.layouts[0]
        sums = [torch.stack(pair) for pair in zip(grads[0::2], grads[1::2], strict=True)]  # [2, B, H, N, D]
        padding = layout.block_size * layout.world_size - layout.num_nodes
        parts = [
            nn.functional.pad(x[:, :, :, : layout.num_nodes], (0, 0, 0, padding))
            .unflatten(3, (layout.world_size, layout.block_size))
            .movedim(3, 0)
            .contiguous()
            for x in sums
        ]
        with record_function("exchange wait"):
            home = ctx.exchange.sum_home(parts)
        whole = (torch.cat([own, x[:, :, :, layout.num_nodes :]], dim=3) for own, x in zip(home, sums, strict=True))
        return None, None, *(x for pair in whole for x in pair)


@dataclass(frozen=True)
class _Rank:
    """One rank that lives in this process: its rows, and its step, which has no segments yet."""

    layout: NodeLayout
    step: Step
    q: Tensor
    k: Tensor
    v: Tensor

    def step_at(self, s: int) -> Step:
        """The s-th step of the ring."""
        source = (self.layout.rank - s) % self.layout.world_size
        return replace(self.step, segments=self.layout.segments(source))

    def regular(self, x: Tensor, y: Tensor) -> Tensor:
        """The rows that travel, of two tensors [B, H, S, D], as one message [2, B, H, R, D]."""
        return torch.stack([x[:, :, : self.layout.block_size], y[:, :, : self.layout.block_size]])

    def gradients(self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, learned_grad: bool) -> Gradients:
        """Zeros to add to, those of the learned part if wanted, with what every step reads."""
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (self.q, self.k, self.v))
        learned, d_learned = self.step.learned, None
        if learned_grad and learned is not None:
            d_learned = learned_gradient(self.step, self.q, learned)
        delta = ENGINES[self.step.engine].delta(self.step, d_out, out, d_lse)
        return Gradients(d_out=d_out, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=True)


def _wait(arriving: Callable[[], list[Tensor]]) -> list[Tensor]:
    with record_function("exchange wait"):
        return arriving()


def _prepared(rank: _Rank) -> _Rank:
    return replace(rank, step=ENGINES[rank.step.engine].prepare(rank.step, rank.q))


def _ring_forward(ranks: list[_Rank], exchange: Exchange) -> list[tuple[Tensor, Tensor]]:
    """out [B, H, M, D] and lse [B, H, M] of every rank."""
    ranks = [_prepared(rank) for rank in ranks]
    world_size = ranks[0].layout.world_size
    results, states = [], []
    for q in (rank.q for rank in ranks):
        m, l, lse = (q.new_empty(q.shape[:3], dtype=state_dtype(q)) for _ in range(3))
        acc, out = q.new_empty(q.shape, dtype=state_dtype(q)), torch.empty_like(q)
        results.append((out, lse))
        states.append(State(first=False, last=False, m=m, l=l, acc=acc, out=out, lse=lse))
    blocks = [rank.regular(rank.k, rank.v) for rank in ranks]
    free = [torch.empty_like(block) for block in blocks]
    for s in range(world_size):
        first, last = s == 0, s == world_size - 1
        arriving = None if last else exchange.shift(blocks, free)
        for rank, block, state in zip(ranks, blocks, states, strict=True):
            k, v = (rank.k, rank.v) if first else block
            with record_function("ring step"):
                attention_step_(rank.q, k, v, *rank.step_at(s).flat(), *state.at(first=first, last=last).flat())
        if arriving is not None:
            blocks, free = _wait(arriving), blocks
    return results


def _ring_backward(ranks: list[_Rank], own: list[Gradients], exchange: Exchange) -> None:
    """Fill in the gradients of every rank; dk and dv are those of its own block."""
    world_size = ranks[0].layout.world_size
    ranks = [_prepared(rank) for rank in ranks]
    blocks = [rank.regular(rank.k, rank.v) for rank in ranks]
    free = [torch.empty_like(block) for block in blocks]

    def visiting_sums() -> list[Tensor]:
        return [torch.empty_like(block, dtype=sums.dk.dtype) for block, sums in zip(blocks, own, strict=True)]

    # dk and dv [2, B, H, R, D] of the visiting blocks: computed in one buffer while the other one is sent
    buffers, received = [visiting_sums() for _ in range(min(world_size - 1, 2))], visiting_sums()
    following: Callable[[], list[Tensor]] | None = None  # what the ranks before this one added to the visiting block
    for s in range(world_size):
        first, last = s == 0, s == world_size - 1
        arriving = None if last else exchange.shift(blocks, free)
        visiting = [] if first else buffers[s % len(buffers)]
        for i, (rank, block, sums) in enumerate(zip(ranks, blocks, own, strict=True)):
            k, v = (rank.k, rank.v) if first else block
            if not first:
                dk, dv = visiting[i].zero_()
                sums = replace(sums, dk=dk, dv=dv)
            with record_function("ring step"):
                attention_step_backward_(rank.q, k, v, *rank.step_at(s).flat(), *sums.flat())
        if following is not None:
            torch._foreach_add_(visiting, _wait(following))
        if not first:
            following = exchange.shift(visiting, received)
        if arriving is not None:
            blocks, free = _wait(arriving), blocks
    if following is not None:  # home
        for rank, sums, (dk, dv) in zip(ranks, own, _wait(following), strict=True):
            sums.dk[:, :, : rank.layout.block_size] += dk
            sums.dv[:, :, : rank.layout.block_size] += dv


class _RingAttention(torch.autograd.Function):
    """Tensors in: q, k, v and the learned part of the bias, or None, of every rank here; out: their out and lse."""

    @staticmethod
    def forward(ctx, exchange, layouts, steps, *inputs):
        ctx.exchange, ctx.layouts, ctx.steps = exchange, layouts, steps
        ranks = _RingAttention._ranks(ctx, inputs)
        results = [x for result in _ring_forward(ranks, exchange) for x in result]
        ctx.save_for_backward(*inputs, *results)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        tensors = ctx.saved_tensors  # activation checkpointing lets them be read once
        inputs, results = tensors[: 4 * len(ctx.layouts)], tensors[4 * len(ctx.layouts) :]
        ranks = _RingAttention._ranks(ctx, inputs)
        learned_grad = ctx.needs_input_grad[6]
        own = [
            rank.gradients(out, lse, d_out, d_lse, learned_grad)
            for rank, out, lse, d_out, d_lse in zip(
                ranks, results[0::2], results[1::2], grads[0::2], grads[1::2], strict=True
            )
        ]
        _ring_backward(ranks, own, ctx.exchange)
        flat = [x for of_rank in own for x in (of_rank.dq, of_rank.dk, of_rank.dv, of_rank.d_learned)]
        return *(None,) * 3, *(None if d is None else d.to(x.dtype) for d, x in zip(flat, inputs, strict=True))

    @staticmethod
    def _ranks(ctx, inputs):
        """The learned part of a step is an input of its own, for autograd's sake."""
        ranks = []
        for i, (layout, step) in enumerate(zip(ctx.layouts, ctx.steps, strict=True)):
            q, k, v, learned = inputs[4 * i : 4 * i + 4]
            ranks.append(_Rank(layout, replace(_with_rows(step, layout, q), learned=learned), q, k, v))
        return ranks
