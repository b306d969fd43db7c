"""``--plan auto``: what is kept of the command line, and a run that measures, searches and trains."""

from __future__ import annotations

import functools
import json
import math
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import megagraph as mg
from megagraph import auto
from megagraph.data.datasets import synthetic_graph
from megagraph.dry_run import dry_run
from megagraph.evaluate import batches
from megagraph.planner import profile
from tests.planner import synthetic

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows():
    """Rows of a machine that is known, for a model of 8 layers."""
    measured = synthetic.rows()
    measured[0]["model"] = dict(in_features=32, num_classes=5, layers=8, dim=64, ffn_dim=64, bias="bucket", bias_size=8)
    return measured


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pp": 2},
        {"cp": 2, "dp": 1},
        {"schedule": "1f1b"},
        {"microbatches": 8},
        {"checkpoint": True},
        {"shard": True},
    ],
    ids=str,
)
def test_the_search_keeps_what_is_given(rows, given, monkeypatch, caplog):
    caplog.set_level("INFO", "megagraph")
    monkeypatch.setattr(auto, "world_size", lambda: 4)
    config = mg.TrainConfig(plan="auto", layers=8, memory_gib=64.0, **given)
    best = auto.choose(config, rows, CPU)
    assert best.plan.world_size == 4
    names = {"microbatches": "num_microbatches"}
    assert all(getattr(best.plan, names.get(name, name)) == value for name, value in given.items())
    cost = mg.planner.fit(rows)
    fixed = {names.get(name, name): value for name, value in given.items()}
    expected = mg.planner.search(cost, cost.model, 4, 64 * 2**30, fixed=fixed).best
    assert best == expected
    assert f"plan: {best.plan}; predicted" in caplog.text


PLANS = (
    mg.Plan(),
    mg.Plan(dp=3),
    mg.Plan(cp=4, comm="allgather", checkpoint=True),
    mg.Plan(pp=2, layers=(3, 5), num_microbatches=4, schedule="1f1b", shard=True),
    mg.Plan(pp=2, dp=2, layers=(8, 8)),
    mg.Plan(pp=2, stages_per_rank=2, layers=(1, 2, 3, 2), num_microbatches=6, schedule="interleaved"),
    mg.Plan(pp=3, stages_per_rank=2, num_microbatches=3, schedule="interleaved", checkpoint=True),
    mg.Plan(pp=4, cp=2, dp=2, num_microbatches=8, schedule="zero_bubble", shard=True),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_goes_through_the_fields_of_a_configuration_and_comes_back(plan):
    searched = mg.TrainConfig(plan="auto", pp=2, memory_gib=8.0, microbatches=2, schedule="1f1b", seed=3)
    for config in (searched, mg.TrainConfig(plan="2,1,1", stage_layers="1,3", comm="allgather", shard=True, seed=3)):
        told = config.with_plan(plan)
        assert told.parallel_plan() == plan
        assert told.with_plan(told.parallel_plan()) == told
        assert mg.TrainConfig.from_json(json.loads(json.dumps(asdict(told), default=str))).parallel_plan() == plan
        assert told.numbers() == config.numbers()
    assert mg.TrainConfig().with_plan(mg.Plan()) == mg.TrainConfig()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_comes_from_its_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    config = mg.TrainConfig(plan=str(tmp_path / "plan.json"), seed=3)
    assert config == mg.TrainConfig(seed=3).with_plan(plan) and config.parallel_plan() == plan


def test_flags_beside_the_file_of_a_plan(tmp_path):
    mg.Plan(cp=2).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"comm, dp must not be given beside --plan .*plan\.json, which says all"):
        mg.TrainConfig(plan=str(tmp_path / "plan.json"), comm="allgather", dp=2)
    with pytest.raises(FileNotFoundError):
        mg.TrainConfig(plan=str(tmp_path / "nothing.json"))


def test_every_candidate_of_a_search_comes_back_too(rows):
    cost = mg.planner.fit(rows)
    for candidate in mg.planner.search(cost, cost.model, 4, 64 * 2**30).candidates:
        assert mg.TrainConfig().with_plan(candidate.plan).parallel_plan() == candidate.plan


def test_nothing_fits(rows, monkeypatch):
    monkeypatch.setattr(auto, "world_size", lambda: 4)
    monkeypatch.setattr(auto, "memory_bytes", lambda device, given: 0.005 * 2**30)
    with pytest.raises(mg.planner.NoFeasiblePlan, match=r"no plan of 4 processes fits 5\.12 MiB"):
        auto.choose(mg.TrainConfig(plan="auto"), rows, CPU)


def test_what_a_process_may_take_is_less_the_program_itself(tmp_path, monkeypatch):
    """The least counts of its part of the machine, its control group, and what is given."""
    resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    program, slack = 1024 * int(resident.split()[1]), 2**26
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(auto, "_group_limit", lambda: math.inf)
    for processes in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert auto.memory_bytes(CPU) == pytest.approx(there / processes - program, abs=slack)
        assert auto.memory_bytes(CPU, program + 2**30) == pytest.approx(2**30, abs=slack)
    monkeypatch.setattr(auto, "_group_limit", lambda: float(4 * (program + 2**29)))
    assert auto.memory_bytes(CPU) == pytest.approx(2**29, abs=slack)
    with pytest.raises(ValueError, match=r"more than the \d\.\d\d GiB that it takes already, got 5\.12 MiB"):
        auto.memory_bytes(CPU, 0.005 * 2**30)


def test_processes_that_share_a_gpu_share_what_is_free(monkeypatch):
    """Two of three ranks have this one; each was given all of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Mock(uuid="here"))
    monkeypatch.setattr(auto, "all_gather", lambda own: [own, own, "elsewhere"])
    assert auto.memory_bytes(torch.device("cuda", 0)) == 80 / 2 + 5


def test_limits_of_control_groups(tmp_path):
    """The least counts of the limits of both versions of control groups, and of the groups around."""
    groups, mounted = tmp_path / "cgroup", tmp_path / "fs"
    for place, text in (
        ("memory.max", "max"),
        ("a/memory.max", "7000"),
        ("a/b/memory.max", "9000"),
        ("memory/old/memory.limit_in_bytes", "8000"),
        ("cpu/old/memory.limit_in_bytes", "1"),
    ):
        (mounted / place).parent.mkdir(parents=True, exist_ok=True)
        (mounted / place).write_text(text + "\n")
    for lines, expected in (("0::/a/b", 7000), ("3:cpu:/old\n2:memory:/old", 8000), ("0::/", math.inf), ("", math.inf)):
        groups.write_text(lines + "\n" * bool(lines))
        assert auto._group_limit(groups, mounted) == expected
    assert auto._group_limit(tmp_path / "none", mounted) == math.inf


def test_a_profile_that_does_not_predict_itself_is_refused_unless_it_is_asked_for(rows, monkeypatch):
    draw = random.Random(0)
    noisy = [
        row | dict(seconds=row["seconds"] * draw.lognormvariate(0, 3)) if "seconds" in row else row for row in rows
    ]
    monkeypatch.setattr(auto, "world_size", lambda: 1)
    with pytest.raises(ValueError, match=r"predicts its own rows to 50%, got \d+%.*--any-fit"):
        auto.choose(mg.TrainConfig(plan="auto"), noisy, CPU)
    assert auto.choose(mg.TrainConfig(plan="auto", any_fit=True), noisy, CPU).plan.world_size == 1


@pytest.mark.parametrize("batching", ["ego", "full"])
def test_a_run_measures_searches_and_trains(batching, tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "measure", functools.partial(auto.measure, seconds=1.0, cache=tmp_path / "cache"))
    monkeypatch.setattr(profile, "FIT_ERROR", 1e9)  # a second is short
    graph = synthetic_graph(num_nodes=300, num_classes=3, in_features=16)
    config = mg.TrainConfig(
        plan="auto",
        batching=batching,
        partitions=2 if batching == "full" else 1,
        layers=2,
        dim=16,
        ffn_dim=16,
        heads=4,
        batch_size=16,
        samples=2,
        sample_nodes=5,
        epochs=1,
        max_steps=3,
        any_fit=True,
        out=tmp_path / "run",
    )
    summary = mg.Trainer(config).fit(graph)
    assert mg.Plan.load(tmp_path / "run" / "plan.json") == mg.Plan(layers=(2,))
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["predicted_step_seconds"] == summary.predicted_step_seconds > 0
    assert written["measured_step_seconds"] > 0 and written["predicted_memory_bytes"] > 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["plan"] == "1,1,1"
    (kept,) = (tmp_path / "cache").glob("*.json")
    predicted = mg.planner.fit(json.loads(kept.read_text()))
    model, workload = predicted.profiled()
    assert mg.planner.search(predicted, model, 1, 2**40).best.step_seconds == pytest.approx(
        summary.predicted_step_seconds
    )
    if batching == "full":  # a step is on one of two partitions
        whole = batches(replace(config, partitions=1), graph).structure.num_pairs
        assert 0.3 * 300 < workload.num_nodes < 0.7 * 300 and 0.1 * whole < workload.pairs < 0.7 * whole
        assert len(workload.halo) == 3 and max(workload.halo) < workload.num_nodes
    for asked in (config, config.with_plan(mg.Plan(layers=(2,)))):
        said = dry_run(asked, graph)
        assert said["plan"] == str(mg.Plan(layers=(2,)))
        assert said["predicted_step_seconds"] == pytest.approx(summary.predicted_step_seconds)
        assert said["predicted_memory_bytes"] == pytest.approx(summary.predicted_memory_bytes, abs=1)
