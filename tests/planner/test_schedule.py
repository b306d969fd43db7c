"""The order of work against torch's own schedules, and what a rank keeps."""

from __future__ import annotations

import pytest

import megagraph as mg
from megagraph.planner.schedule import Work, in_flight, order_of, slots_of
from tests.planner.torch_schedules import torch_slots, torch_zero_bubble

PLANS = {
    "gpipe": mg.Plan(pp=3, num_microbatches=4),
    "1f1b": mg.Plan(pp=3, num_microbatches=5, schedule="1f1b"),
    "interleaved": mg.Plan(pp=3, num_microbatches=6, schedule="interleaved", stages_per_rank=2),
}


@pytest.mark.parametrize(("pp", "per_rank", "num"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (3, 3, 6), (4, 3, 12), (2, 4, 2)])
def test_interleaved_slots_are_those_of_torch(pp, per_rank, num):
    for rank in range(pp):
        actions = torch_slots(pp, per_rank, num, rank)
        want = [a and Work(a.computation_type.name != "FORWARD", a.stage_index, a.microbatch_index) for a in actions]
        assert list(slots_of(pp, per_rank, num, rank)) == want
        assert order_of(pp, per_rank, num, False, rank) == tuple(work for work in want if work is not None)


def test_in_flight():
    assert in_flight(PLANS["gpipe"]) == [(4,)] * 3
    assert in_flight(PLANS["1f1b"]) == [(3,), (2,), (1,)]
    for plan in (PLANS["1f1b"], PLANS["interleaved"]):
        for rank, kept in enumerate(in_flight(plan)):
            running, most = 0, 0
            for work in order_of(plan.pp, plan.stages_per_rank, plan.num_microbatches, False, rank):
                running += -1 if work.backward else 1
                most = max(most, running)
            assert sum(kept) == most


@pytest.mark.parametrize(("pp", "per_rank", "num"), [(2, 1, 2), (4, 1, 8), (3, 1, 9), (2, 2, 4), (3, 2, 3), (4, 3, 12)])
def test_zero_bubble_keeps_micro_batches_until_gradients_of_weights(pp, per_rank, num):
    plan = mg.Plan(pp=pp, stages_per_rank=per_rank, num_microbatches=num, schedule="zero_bubble", shard=True)
    for rank, predicted in enumerate(in_flight(plan)):
        kept, most = [0] * per_rank, (0,) * per_rank
        for action in torch_zero_bubble(pp, per_rank, num, rank):
            kind = action and action.computation_type.name
            kept[action.stage_index // pp if action else 0] += {"FORWARD": 1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
            most = max(most, tuple(kept), key=sum)
        assert predicted == most
