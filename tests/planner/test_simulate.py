"""A pipeline on paper against torch's schedules read line by line and run tick by tick, and against closed forms."""

from __future__ import annotations

import random

import pytest

import megagraph as mg
from megagraph.planner.links import Wire
from megagraph.planner.schedule import Work
from megagraph.planner.simulate import simulate
from tests.planner.gpipe import gpipe_seconds, gpipe_tail
from tests.planner.torch_schedules import gpipe, interleaved, one_forward_one_backward, ticks

SHAPES = [
    *(("gpipe", pp, 1, num) for pp, num in ((2, 1), (2, 5), (3, 4), (4, 3))),
    *(("1f1b", pp, 1, num) for pp, num in ((2, 2), (2, 5), (3, 3), (4, 7))),
    *(("interleaved", pp, per_rank, num) for pp, per_rank, num in ((2, 2, 4), (3, 2, 3), (2, 3, 2))),
]


@pytest.mark.parametrize("behind_data", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_takes_as_long_as_torch_s_own_lines_do(shape, behind_data):
    schedule, pp, per_rank, num = shape
    rng = random.Random(repr(shape))
    for longest in (1, 60, 400):  # messages that do not matter, that do, and that take all the time
        stages = pp * per_rank
        forward, backward = ([rng.randint(20, 100) for _ in range(stages)] for _ in range(2))
        wires = [Wire(rng.randint(1, longest), rng.randint(0, 7)) for _ in range(stages - 1)]
        plan = mg.Plan(pp=pp, stages_per_rank=per_rank, num_microbatches=num, schedule=schedule)

        def wire(name, pp=pp, wires=wires):
            backward, stage, _ = name
            to = stage - 1 if backward else stage + 1
            return stage % pp, to % pp, *wires[min(stage, to)]

        def seconds(name, forward=forward, backward=backward):
            return (backward if name[0] else forward)[name[1]]

        lines = {
            "gpipe": lambda rank: gpipe(rank, pp, num),
            "1f1b": lambda rank: one_forward_one_backward(rank, pp, num),
            "interleaved": lambda rank: interleaved(rank, pp, num, per_rank),
        }[schedule]
        want = ticks([lines(rank) for rank in range(pp)], seconds, wire, behind_data)
        assert simulate(plan, forward, backward, wires, behind_data=behind_data).seconds == want


def test_a_link_is_busy_while_it_sends():
    """1 s of link each way and 0.1 s of work a stage and way: however it is cut, no step is shorter than the links."""
    for num in (1, 2, 8, 32):
        plan = mg.Plan(pp=2, num_microbatches=num)
        assert simulate(plan, [0.1 / num] * 2, [0.1 / num] * 2, [Wire(1 / num)]).seconds >= 2.2
    for schedule in ("1f1b", "interleaved"):
        per_rank = 1 + (schedule == "interleaved")
        plan = mg.Plan(pp=2, num_microbatches=8, schedule=schedule, stages_per_rank=per_rank)
        stages = 2 * per_rank
        long = simulate(plan, [0.01] * stages, [0.01] * stages, [Wire(1 / 8)] * (stages - 1)).seconds
        assert long >= 1.0 * (stages - 1) / per_rank + 0.02


def test_a_link_that_was_idle_makes_up_for_it():
    """Messages of 10 s, of which 4 s go at once where the link has idled for as long."""
    plan = mg.Plan(pp=2, num_microbatches=3)
    timeline = simulate(plan, [13.0, 1.0], [1.0, 1.0], [Wire(10.0, 0.0, 4.0)])
    got = [timeline.arrivals[Work(False, 0, k)] for k in range(3)]
    assert got == [13 + 10 - 4, 26 + 10 - 4, 39 + 10 - 4]
    timeline = simulate(plan, [11.0, 0.0], [1.0, 1.0], [Wire(10.0, 0.0, 4.0)])
    got = [timeline.arrivals[Work(False, 0, k)] for k in range(3)]
    assert got == [11 + 6, 22 + 6, 33 + 6]
    timeline = simulate(plan, [2.0, 0.0], [1.0, 1.0], [Wire(10.0, 0.0, 4.0)])
    assert [timeline.arrivals[Work(False, 0, k)] for k in range(3)] == [8, 18, 28]


def test_pipelines_share_a_link_message_by_message():
    """5 s a message: the second pipeline is as much behind the first. Forward it ends at 1 + 4 * 5 + 1; its first
    gradient is there 1 + 5 later, its second one after that of the first pipeline, and is worked on."""
    plan = mg.Plan(pp=2, num_microbatches=2)
    shared = simulate(plan, [1.0, 1.0], [1.0, 1.0], [Wire(5.0, out=0, back=1)], pipelines=2)
    assert shared.seconds == 22 + (1 + 5) + 5 + 5 + 1
    alone = simulate(plan, [1.0, 1.0], [1.0, 1.0], [Wire(5.0, out=0, back=1)])
    assert alone == simulate(plan, [1.0, 1.0], [1.0, 1.0], [Wire(5.0)])


def test_gpipe_s_closed_form_is_what_the_schedule_takes_without_messages():
    forward, backward = [1.0, 3.0, 2.0], [5.0, 2.0, 4.0]
    for num in (1, 2, 7):
        timeline = simulate(mg.Plan(pp=3, num_microbatches=num), forward, backward, [Wire()] * 2)
        assert timeline.seconds == gpipe_seconds(forward, backward, num)
        tail = gpipe_tail(backward, num)
        assert timeline.rank_ends == (timeline.seconds - tail[0] + tail).tolist()


def test_1f1b_with_even_stages_takes_what_gpipe_does():
    plan = mg.Plan(pp=4, num_microbatches=8, schedule="1f1b")
    timeline = simulate(plan, [1.0] * 4, [2.0] * 4, [Wire()] * 3)
    assert timeline.seconds == gpipe_seconds([1.0] * 4, [2.0] * 4, 8) == 33.0


def test_every_work_is_done_once_and_after_what_it_needs():
    plan = mg.Plan(pp=3, num_microbatches=6, schedule="interleaved", stages_per_rank=2)
    timeline = simulate(plan, [1.0] * 6, [2.0] * 6, [Wire(0.25, 0.125)] * 5)
    assert len(timeline.ends) == 2 * 6 * 6
    for work, end in timeline.ends.items():
        if not work.backward and work.stage:
            assert end >= timeline.ends[Work(False, work.stage - 1, work.microbatch)] + 1.375
        if work.backward and work.stage < 5:
            assert end >= timeline.ends[Work(True, work.stage + 1, work.microbatch)] + 2.375
