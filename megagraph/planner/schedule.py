"""The order in which the ranks of a pipeline work, and how long it takes: what torch's schedules do, without running
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from megagraph.planner.plan import Plan


class Work(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    backward: bool
    stage: int
    microbatch: int


def order(plan: Plan, rank: int) -> list[Work]:
    """What a rank of the pipeline does, first to last (torch.distributed.pipelining's own order).

    Zero-bubble is ordered like the schedule it refines, 1F1B or interleaved, and so predicted a little too long.
    """
    return list(order_of(plan.pp, plan.stages_per_rank, plan.num_microbatches, plan.schedule == "gpipe", rank))


@cache
def order_of(pp: int, per_rank: int, num: int, all_forward_first: bool, rank: int) -> tuple[Work, ...]:
    if all_forward_first:
        return tuple(Work(backward, rank, k) for backward in (False, True) for k in range(num))
    if per_rank == 1:
        stage_of_forward = stage_of_backward = [rank] * num
        warmup = min(num, pp - rank)
    else:
        per_round = num // max(1, num // pp)
        turns = [turn // per_round % per_rank for turn in range(num * per_rank)]
        stage_of_forward = [turn * pp + rank for turn in turns]
        stage_of_backward = [(per_rank - 1 - turn) * pp + rank for turn in turns]
        warmup = min((per_rank - 1) * per_round + 2 * (pp - 1 - rank), num * per_rank)
        warmup = min(warmup + 1, num * per_rank)  # the steady state begins with a forward pass
    forward, backward = (
        _numbered(stages, is_backward) for stages, is_backward in ((stage_of_forward, False), (stage_of_backward, True))
    )
    steady = [work for pair in zip(backward, forward[warmup:], strict=False) for work in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


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


@dataclass(frozen=True)
class Timeline:
    """When every work of a step ends, and each rank's last one."""

    ends: dict[Work, float]
    rank_ends: list[float]

    @property
    def seconds(self) -> float:
        return max(self.rank_ends)


def simulate(plan: Plan, forward: Sequence[float], backward: Sequence[float], transfer_seconds: float) -> Timeline:
    """Run the schedule on paper.

    Args:
        forward, backward: seconds of one micro-batch on every stage of the model.
        transfer_seconds: from a stage to the next, and back.
    """
    last = len(forward) - 1
    orders = [order(plan, rank) for rank in range(plan.pp)]
    ends: dict[Work, float] = {}
    done = [0] * plan.pp
    clock = [0.0] * plan.pp
    while True:
        moved = False
        for rank, works in enumerate(orders):
            while done[rank] < len(works):
                work = works[done[rank]]
                ready = 0.0
                if work.backward:
                    before = Work(work.stage < last, work.stage + 1 if work.stage < last else last, work.microbatch)
                else:
                    before = Work(False, work.stage - 1, work.microbatch)
                if before.stage >= 0:
                    end = ends.get(before)
                    if end is None:
                        break
                    ready = end + (transfer_seconds if before.stage != work.stage else 0.0)
                clock[rank] = max(clock[rank], ready) + (backward if work.backward else forward)[work.stage]
                ends[work] = clock[rank]
                done[rank] += 1
                moved = True
        if not moved:
            break
    assert all(count == len(works) for count, works in zip(done, orders, strict=True)), "the schedule waits for itself"
    return Timeline(ends, clock)
