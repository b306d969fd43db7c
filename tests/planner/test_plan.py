"""Plans, their files, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

import megagraph as mg

PLAN = mg.Plan(pp=2, cp=3, comm="allgather", dp=4, layers=(1, 5), num_microbatches=2, shard=True)
LOOPED = mg.Plan(pp=2, stages_per_rank=2, num_microbatches=4, schedule="interleaved", checkpoint=True)


def test_stages():
    assert PLAN.world_size == 24
    assert PLAN.stages(6) == [range(0, 1), range(1, 6)]
    assert [len(stage) for stage in mg.Plan(pp=4).stages(10)] == [2, 2, 3, 3]
    assert mg.Plan().stages(3) == [range(3)]
    assert [len(stage) for stage in LOOPED.stages(5)] == [1, 1, 1, 2]


def test_save_and_load(tmp_path):
    for plan in (PLAN, LOOPED):
        plan.save(tmp_path / "plan.json")
        assert mg.Plan.load(tmp_path / "plan.json") == plan


BAD_PLANS = {
    "degree": (dict(cp=0), "cp must be an integer of at least 1, got 0"),
    "comm": (dict(comm="alltoall"), "comm must be 'ring', 'allgather', 'halo' or 'ulysses', got 'alltoall'"),
    "halo alone": (dict(cp=1, comm="halo"), "comm must be 'ring' for cp = 1, where nothing is sent, got 'halo'"),
    "stages": (
        dict(layers=(6,)),
        r"layers must give each of the pp \* stages_per_rank = 2 \* 1 stages at least 1 layer, got \(6,\)",
    ),
    "empty stage": (dict(layers=(6, 0)), r"at least 1 layer, got \(6, 0\)"),
    "virtual stages": (
        dict(stages_per_rank=2, schedule="interleaved", layers=(1, 5)),
        r"each of the pp \* stages_per_rank = 2 \* 2 stages at least 1 layer, got \(1, 5\)",
    ),
    "schedule without a pipeline": (
        dict(pp=1, layers=(), num_microbatches=1, schedule="1f1b"),
        "schedule must be 'gpipe' without a pipeline",
    ),
    "schedule": (
        dict(schedule="zigzag"),
        "schedule must be one of gpipe, 1f1b, interleaved, zero_bubble, got 'zigzag'",
    ),
    "gpipe of several stages": (
        dict(stages_per_rank=2, layers=()),
        "stages_per_rank must be 1 under schedule 'gpipe', got 2; take 'interleaved'",
    ),
    "1f1b of several stages": (
        dict(stages_per_rank=3, layers=(), schedule="1f1b"),
        "stages_per_rank must be 1 under schedule '1f1b', got 3",
    ),
    "interleaved of one stage": (
        dict(schedule="interleaved"),
        "stages_per_rank must be at least 2 under schedule 'interleaved', got 1; take '1f1b'",
    ),
    "1f1b micro-batches": (
        dict(schedule="1f1b", num_microbatches=1),
        "num_microbatches must be at least pp = 2 under schedule '1f1b', got 1",
    ),
    "interleaved micro-batches": (
        dict(schedule="interleaved", stages_per_rank=2, layers=(), num_microbatches=3),
        "num_microbatches must be a multiple of pp = 2 under schedule 'interleaved', got 3",
    ),
    "zero_bubble micro-batches": (
        dict(schedule="zero_bubble", num_microbatches=3),
        "num_microbatches must be a multiple of pp = 2 under schedule 'zero_bubble', got 3",
    ),
    "zero_bubble replicated": (
        dict(schedule="zero_bubble", shard=False),
        r"shard must be true under schedule 'zero_bubble' where cp \* dp > 1",
    ),
    "zero_bubble checkpointed": (
        dict(schedule="zero_bubble", checkpoint=True),
        "checkpoint must be false under schedule 'zero_bubble'; take '1f1b' or 'interleaved'",
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plan(case):
    changes, message = BAD_PLANS[case]
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **changes)


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match=r"at most the number of layers, 3, got 2 \* 2"):
        LOOPED.stages(3)
