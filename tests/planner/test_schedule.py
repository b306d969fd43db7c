"""The order of work against torch's own schedules, and step times against closed forms."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import megagraph as mg
from megagraph.planner.schedule import Work, in_flight, order, simulate
from megagraph.planner.split import gpipe_seconds, gpipe_tail

PLANS = {
    "gpipe": mg.Plan(pp=3, num_microbatches=4),
    "1f1b": mg.Plan(pp=3, num_microbatches=5, schedule="1f1b"),
    "interleaved": mg.Plan(pp=3, num_microbatches=6, schedule="interleaved", stages_per_rank=2),
}


@pytest.mark.parametrize(("pp", "per_rank", "num"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 3, 12)])
def test_interleaved_order_is_that_of_torch(pp, per_rank, num):
    class Torch(ScheduleInterleaved1F1B):
        def __init__(self):  # only what the order is computed from
            self.pp_group_size, self.n_local_stages, self._n_microbatches = pp, per_rank, num
            self.number_of_rounds = max(1, num // pp)
            self.microbatches_per_round = num // self.number_of_rounds

    plan = mg.Plan(pp=pp, stages_per_rank=per_rank, num_microbatches=num, schedule="interleaved")
    for rank in range(pp):
        actions = [a for a in Torch()._calculate_single_rank_operations(rank) if a is not None]
        want = [Work(a.computation_type.name != "FORWARD", a.stage_index, a.microbatch_index) for a in actions]
        assert order(plan, rank) == want


@pytest.mark.parametrize("name", PLANS)
def test_every_work_is_done_once_and_in_order(name):
    plan = PLANS[name]
    stages = plan.pp * plan.stages_per_rank
    timeline = simulate(plan, [1.0] * stages, [2.0] * stages, 0.25)
    assert len(timeline.ends) == 2 * stages * plan.num_microbatches
    for work, end in timeline.ends.items():
        if not work.backward and work.stage:
            assert end >= timeline.ends[Work(False, work.stage - 1, work.microbatch)] + 1.25
        if work.backward and work.stage < stages - 1:
            assert end >= timeline.ends[Work(True, work.stage + 1, work.microbatch)] + 2.25
    assert timeline.seconds >= plan.num_microbatches * plan.stages_per_rank * 3.0


def test_gpipe_closed_form_is_what_the_schedule_takes():
    forward, backward = [1.0, 3.0, 2.0], [5.0, 2.0, 4.0]
    for num in (1, 2, 7):
        plan = mg.Plan(pp=3, num_microbatches=num)
        timeline = simulate(plan, forward, backward, 0.0)
        assert timeline.seconds == gpipe_seconds(forward, backward, num)
        tail = gpipe_tail(backward, num)
        assert timeline.rank_ends == (timeline.seconds - tail[0] + tail).tolist()


def test_schedules_with_even_stages():
    plan = mg.Plan(pp=4, num_microbatches=8, schedule="1f1b")
    assert simulate(plan, [1.0] * 4, [2.0] * 4, 0.0).seconds == gpipe_seconds([1.0] * 4, [2.0] * 4, 8) == 33.0
    halves = mg.Plan(pp=4, num_microbatches=8, schedule="interleaved", stages_per_rank=2)
    # two stages a rank, of half the size each: half the bubble
    assert simulate(halves, [0.5] * 8, [1.0] * 8, 0.0).seconds == pytest.approx(24.0 + 9.0 / 2)


def test_in_flight():
    assert in_flight(PLANS["gpipe"]) == [(4,)] * 3
    assert in_flight(PLANS["1f1b"]) == [(3,), (2,), (1,)]
    for plan in (PLANS["1f1b"], PLANS["interleaved"]):
        for rank, kept in enumerate(in_flight(plan)):
            running, most = 0, 0
            for work in order(plan, rank):
                running += -1 if work.backward else 1
                most = max(most, running)
            assert sum(kept) == most
