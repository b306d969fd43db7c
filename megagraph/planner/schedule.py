"""The order in which the ranks of a pipeline work, as torch's schedules have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from megagraph.planner.plan import Plan

AHEAD = ("interleaved", "zero_bubble")  # schedules of torch's that do not wait for what they send


class Work(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    backward: bool
    stage: int
    microbatch: int


@cache
def order_of(pp: int, per_rank: int, num: int, all_forward_first: bool, rank: int) -> tuple[Work, ...]:
    """What a rank of the pipeline does, first to last (torch.distributed.pipelining's own order).

    Zero-bubble is ordered like the schedule it refines, 1F1B or interleaved, and so predicted a little too long.
    """
    if all_forward_first:
        return tuple(Work(backward, rank, k) for backward in (False, True) for k in range(num))
    if per_rank > 1:
        return tuple(work for work in slots_of(pp, per_rank, num, rank) if work is not None)
    forward, backward = (_numbered([rank] * num, is_backward) for is_backward in (False, True))
    warmup = min(num, pp - rank)
    steady = [work for pair in zip(backward, forward[warmup:], strict=False) for work in pair]
    return (*forward[:warmup], *steady, *backward[num - warmup :])


@cache
def slots_of(pp: int, per_rank: int, num: int, rank: int) -> tuple[Work | None, ...]:
    """What a rank does in each time slot of the interleaved schedule, were all works as long as each other."""
    per_round = num // max(1, num // pp)
    turns = [turn // per_round % per_rank for turn in range(num * per_rank)]
    forward = _numbered([turn * pp + rank for turn in turns], False)
    backward = _numbered([(per_rank - 1 - turn) * pp + rank for turn in turns], True)
    warmup = min((per_rank - 1) * per_round + 2 * (pp - 1 - rank), len(turns))
    until_the_first_comes_back = per_rank * pp + 2 * (pp - 1 - rank) - (warmup + rank)
    steady = len(turns) - warmup
    slots: list[Work | None] = [None] * rank + forward[:warmup] + [None] * until_the_first_comes_back
    slots += [work for pair in zip(forward[warmup:], backward[:steady], strict=True) for work in pair]
    slots += [work for last in backward[steady:] for work in (None, last)]
    return tuple(slots)


def _numbered(stages: Sequence[int], backward: bool) -> list[Work]:
    """The works of a rank, each stage's micro-batches in turn."""
    counts: dict[int, int] = {}
    works = []
    for stage in stages:
        works.append(Work(backward, stage, counts.get(stage, 0)))
        counts[stage] = works[-1].microbatch + 1
    return works


def in_flight(plan: Plan) -> list[tuple[int, ...]]:
    """For every rank: micro-batches that each of its stages keeps for backward when the rank keeps the most [n_i]."""
    num, pp = plan.num_microbatches, plan.pp
    if pp == 1:
        return [(1,)]
    if plan.schedule == "zero_bubble":  # until the gradients of its weights, which come later by a rank's number
        return [(pp,) * plan.stages_per_rank] * pp
    if plan.stages_per_rank == 1:
        return [(num if plan.schedule == "gpipe" else min(num, pp - rank),) for rank in range(pp)]
    return count_in_flight(pp, plan.stages_per_rank, num)


@cache
def count_in_flight(pp: int, per_rank: int, num: int) -> list[tuple[int, ...]]:
    peaks = []
    for rank in range(pp):
        kept = [0] * per_rank
        most, peak = 0, tuple(kept)
        for work in order_of(pp, per_rank, num, False, rank):
            kept[work.stage // pp] += -1 if work.backward else 1
            if sum(kept) > most:
                most, peak = sum(kept), tuple(kept)
        peaks.append(peak)
    return peaks
