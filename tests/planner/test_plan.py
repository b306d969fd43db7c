"""Plans, their files, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

import megagraph as mg

PLAN = mg.Plan(pp=2, cp=3, dp=4, layers=(1, 5), num_microbatches=2, shard=True)


def test_stages():
    assert PLAN.world_size == 24
    assert PLAN.stages(6) == [range(0, 1), range(1, 6)]
    assert [len(stage) for stage in mg.Plan(pp=4).stages(10)] == [2, 2, 3, 3]
    assert mg.Plan().stages(3) == [range(3)]


def test_save_and_load(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    assert mg.Plan.load(tmp_path / "plan.json") == PLAN


def test_load_refuses_other_files(tmp_path):
    (tmp_path / "plan.json").write_text('{"pp": 2, "tp": 8}')
    with pytest.raises(ValueError, match=r"must hold a plan with the fields \['cp', .*got {'pp': 2, 'tp': 8}"):
        mg.Plan.load(tmp_path / "plan.json")


BAD_PLANS = {
    "degree": (dict(cp=0), "cp must be at least 1, got 0"),
    "stages": (dict(layers=(6,)), r"layers must give each of the pp = 2 stages at least 1 layer, got \(6,\)"),
    "empty stage": (dict(layers=(6, 0)), r"at least 1 layer, got \(6, 0\)"),
    "micro-batches": (
        dict(pp=1, layers=()),
        r"num_microbatches must be 1 without a pipeline \(pp = 1\), got 2",
    ),
    "schedule": (dict(schedule="zigzag"), "schedule must be 'gpipe', got 'zigzag'"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plan(case):
    changes, message = BAD_PLANS[case]
    with pytest.raises(ValueError, match=message):
        replace(PLAN, **changes)
