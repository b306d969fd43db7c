"""Steps on paper as spans: bubbles of schedules by their closed forms, and every rank's step as long as predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

import megagraph as mg
from megagraph import timeline
from megagraph.planner import on_paper
from tests.planner.test_by_hand import CONFIG, cost_model

FOUR = replace(CONFIG, layers=4)
# 2 s forward and 10 s backward of a layer, whatever its sequences; nothing else takes time
ALIKE = {"forward": {"layer.call": 2.0}, "backward": {"layer.call": 10.0}}


@pytest.mark.parametrize(
    "plan",
    [
        mg.Plan(pp=2, num_microbatches=4),
        mg.Plan(pp=4, num_microbatches=2, dp=2),
        mg.Plan(pp=2, cp=2, num_microbatches=4, schedule="1f1b"),
        mg.Plan(pp=2, num_microbatches=4, schedule="interleaved", stages_per_rank=2),
    ],
    ids=str,
)
def test_bubbles_are_those_of_the_schedule(plan):
    spans = on_paper.spans(cost_model(ALIKE), FOUR, plan)
    assert timeline.measured_bubble(spans) == pytest.approx(timeline.bubble_in_theory(plan), rel=1e-9)
    assert any(span.name == "all-reduce" for span in spans) == (plan.cp * plan.dp > 1)  # no other has gradients to sum
    for rank in range(plan.world_size):
        named = {name: [s for s in spans if s.rank == rank and s.name == name] for name in (*timeline.STAGE, "bubble")}
        works = plan.num_microbatches * plan.stages_per_rank
        assert [len(named[name]) for name in timeline.STAGE] == [works, works]
        busy = sum(s.stop - s.start for name in timeline.STAGE for s in named[name])
        assert busy == pytest.approx(12 * plan.num_microbatches * 4 / plan.pp, rel=1e-9)
        for wait in named["bubble"]:
            ours = [s for name in timeline.STAGE for s in named[name]]
            assert all(s.stop <= wait.start + 1e-9 or s.start >= wait.stop - 1e-9 for s in ours)


def test_without_a_pipeline_each_micro_batch_goes_back_before_the_next_one():
    spans = on_paper.spans(cost_model(ALIKE), FOUR, mg.Plan(num_microbatches=3))
    assert [s.name for s in spans if s.name in timeline.STAGE] == 3 * list(timeline.STAGE)


def test_what_comes_before_and_after_the_passes():
    """Two replicas, one twice as slow: 3 s of building half a batch, 12 or 24 s of a layer, then the sum."""
    cost = replace(
        cost_model(ALIKE, link={"all_reduce.call": 1.0}), stall_seconds=6.0, slowness=(1.0, 2.0), model=CONFIG
    )
    spans = on_paper.spans(cost, replace(CONFIG, layers=1), mg.Plan(dp=2))
    found = {(s.rank, s.name): (s.start, s.stop) for s in spans}
    assert found == {
        (0, "train step"): (0, 29),
        (0, "stall"): (0, 3),
        (0, "stage forward"): (3, 5),
        (0, "stage backward"): (5, 15),
        (0, "all-reduce"): (15, 29),
        (1, "train step"): (0, 29),
        (1, "stall"): (0, 3),
        (1, "stage forward"): (3, 7),
        (1, "stage backward"): (7, 27),
        (1, "all-reduce"): (27, 29),
    }
