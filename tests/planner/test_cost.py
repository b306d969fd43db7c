"""The cost model on a machine that follows its terms, its file, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest

import megagraph as mg
from megagraph import files
from megagraph.cli.planner import describe
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.planner.fitting import COMPUTED, _layered, held_out_third, predict_peak, row_terms, time_errors
from megagraph.planner.memory import stage_bytes
from megagraph.planner.terms import attention_terms, layer_terms, stage_parameters
from tests.planner import synthetic
from tests.planner.gpipe import gpipe_seconds

CONFIG = mg.ModelConfig(
    in_features=32, num_classes=5, layers=8, dim=64, ffn_dim=64, heads=8, bias="bucket", bias_size=8
)


@pytest.fixture(scope="module")
def cost():
    return mg.planner.fit(synthetic.rows())


def stage_seconds(cost, plan):
    """Forward and backward of every stage."""
    return cost.stage_tables(cost.rank_work(CONFIG, plan)).stages([len(stage) for stage in plan.stages(CONFIG.layers)])


def test_fit_finds_the_coefficients(cost):
    assert cost.held_out["time_mape"] < 1e-9 and cost.held_out["time_r2_log"] > 1 - 1e-9
    assert cost.held_out["memory_mape"] < 1e-9 and cost.held_out["memory_r2"] > 1 - 1e-9
    for way, want in (("forward", synthetic.FORWARD), ("backward", synthetic.BACKWARD)):
        for name, value in want.items():
            assert cost.seconds[way][name] == pytest.approx(value, rel=1e-6), (way, name)
    assert cost.links["node"] == pytest.approx(synthetic.LINK)
    assert cost.stall_seconds == 2e-3


def test_save_and_load(cost, tmp_path):
    cost.save(tmp_path / "cost.json")
    assert mg.planner.CostModel.load(tmp_path / "cost.json") == cost


def test_a_file_of_before_is_read_unless_it_has_a_break(cost, tmp_path):
    old = asdict(cost) | {"paper": {"c_fp": 1.0}, "broken": None}
    old["workload"] |= {"mean_nodes": None, "prefetch": 0}
    files.write_json(tmp_path / "cost.json", old)
    assert mg.planner.CostModel.load(tmp_path / "cost.json") == cost
    files.write_json(tmp_path / "cost.json", old | {"broken": {"constant": 1.0, "gamma": 1.5}})
    with pytest.raises(ValueError, match=r"cost\.json has a break in layers, .*; run megagraph fit again"):
        mg.planner.CostModel.load(tmp_path / "cost.json")


def test_parameters_are_those_of_the_model():
    model = HierarchicalGT(CONFIG)
    assert stage_parameters(CONFIG, [CONFIG.layers]) == sum(p.numel() for p in model.parameters())


def test_one_device_is_the_sum_of_its_terms(cost):
    m, rows = 64, 528
    seconds = 2e-3  # loader
    for coefficients in (synthetic.FORWARD, synthetic.BACKWARD):
        terms = _layered(
            7.0,
            *(
                layer_terms(m, rows, queries, CONFIG) | attention_terms(m, queries, rows, CONFIG, ring=False)
                for queries in (rows, 512)
            ),
        )
        terms |= {"embedding.call": 1, "embedding.product": m * rows * 32 * 64, "embedding.element": m * rows * 64}
        terms |= {"head.call": 1, "head.product": m * 512 * 64 * 5}
        seconds += synthetic.dot(coefficients, terms)
    seconds += 1e-5 + 1e-9 * stage_parameters(CONFIG, [8])[0]
    assert cost.step_seconds(CONFIG, mg.Plan()) == pytest.approx(seconds)
    assert sum(cost.explain(CONFIG, mg.Plan()).values()) == pytest.approx(seconds)


def test_pipeline_terms(cost):
    plan = mg.Plan(pp=4, layers=(1, 3, 2, 2), num_microbatches=8)
    forward, backward = stage_seconds(cost, plan)
    transfer = 5e-5 + 1e-9 * 4 * 8 * 528 * 64
    want = gpipe_seconds(forward, backward, 8)
    terms = cost.explain(CONFIG, plan)
    passes = terms["slowest rank computes"] + terms["bubble and transfers"]
    # six messages on the way of the first micro-batch, and before each other one's work the wait for its own, whose
    # sender hears first that it is awaited
    assert want + 6 * transfer <= passes <= (want + (6 + 2 * 7) * (5e-5 + transfer)) * (1 + 1e-9)
    free = replace(cost, links={"node": cost.links["node"] | {"transfer.call": 0.0, "transfer.byte": 0.0}})
    terms = free.explain(CONFIG, plan)
    assert terms["slowest rank computes"] + terms["bubble and transfers"] == pytest.approx(want)
    assert terms["all-reduce"] == 0
    # an all-reduce hides behind the stages before: the first one is the last to start
    replicated = cost.explain(CONFIG, replace(plan, dp=2, num_microbatches=4))
    first = 4 * stage_parameters(CONFIG, plan.layers)[0]
    assert replicated["all-reduce"] >= 2 * 5e-5 + 1e-9 * first


def test_ranks_of_unequal_speed(cost):
    """One rank of two takes twice as long: a step is that of the slower one, which a pipeline gives fewer layers."""
    free = {"node": dict.fromkeys(cost.links["node"], 0.0)}
    rows = [
        row | dict(rank=rank, seconds=row["seconds"] * (1 + rank))
        for row in synthetic.rows()
        for rank in (0, 1)
        if row["kind"] in COMPUTED
    ]
    rows += [row for row in synthetic.rows() if row["kind"] not in COMPUTED]
    found = mg.planner.fit(rows)
    assert found.slowness == pytest.approx((0.5**0.5, 2**0.5))
    benched = [row for row in synthetic.rows() if row["kind"] == "attention"]  # of no rank
    assert mg.planner.fit([*rows, *benched]).slowness == pytest.approx(found.slowness)
    odd = rows[0] | {"seconds": 100 * rows[0]["seconds"]}
    assert mg.planner.fit([odd, *rows[1:]]).slowness == pytest.approx(found.slowness)
    assert found.held_out["time_mape"] < 1e-6
    found, alike = replace(found, links=free, stall_seconds=0.0), replace(cost, links=free, stall_seconds=0.0)
    workload = mg.planner.Workload(**synthetic.WORKLOAD)
    for plan in (mg.Plan(dp=2), mg.Plan(cp=2)):
        got, fast = found.explain(CONFIG, plan, workload), alike.explain(CONFIG, plan)
        assert got["slowest rank computes"] == pytest.approx(2 * fast["slowest rank computes"])
    best = mg.planner.search(found, CONFIG, 2, 1e15, workload=workload, fixed={"pp": 2, "schedule": "gpipe"}).best.plan
    every = [replace(best, layers=(first, 8 - first)) for first in range(1, 8)]
    assert found.step_seconds(CONFIG, best, workload) == min(found.step_seconds(CONFIG, p, workload) for p in every)
    assert best.layers[0] > best.layers[1]
    said = found.extrapolated(CONFIG, mg.Plan(dp=4), workload)
    assert "ranks of unequal speed were measured, and not these" in said


def test_memory_by_schedule(cost):
    gpipe = mg.Plan(pp=4, num_microbatches=8)
    ofob = replace(gpipe, schedule="1f1b")
    more = [a - b for a, b in zip(cost.memory_bytes(CONFIG, gpipe), cost.memory_bytes(CONFIG, ofob), strict=True)]
    assert all(x > 0 for x in more) and more == sorted(more)  # 4, 5, 6, 7 micro-batches fewer in flight
    # at a fixed batch GPipe keeps the same, whatever K; the workspace and what waits to be sent differ
    parts = [
        stage_bytes(cost.memory, cost.rank_work(CONFIG, replace(gpipe, num_microbatches=num)), np.full((4, 1), 2.0))
        for num in (2, 8)
    ]
    assert parts[0]["activations"] == pytest.approx(parts[1]["activations"])
    kept, again = (cost.memory_bytes(CONFIG, mg.Plan(checkpoint=checkpoint))[0] for checkpoint in (False, True))
    assert again < 0.5 * kept
    sharded, whole = (cost.memory_bytes(CONFIG, mg.Plan(dp=2, shard=shard))[0] for shard in (True, False))
    assert whole - sharded == pytest.approx(4 * stage_parameters(CONFIG, [8])[0] * 1.5)


def test_a_process_takes_more_than_its_tensors(cost):
    rows = [row for row in synthetic.rows() if row["kind"] == "memory"]
    grown = [
        {**row, "kind": "process", "process_bytes": factor * row["peak_bytes"]}
        for row, factor in zip(rows, (1.2, 1.3, 2.0), strict=False)
    ]
    larger = mg.planner.fit([*synthetic.rows(), *grown])
    for plan in (mg.Plan(cp=2), mg.Plan(pp=4, num_microbatches=8, schedule="interleaved", stages_per_rank=2)):
        expected = 1.3 * np.array(cost.memory_bytes(CONFIG, plan))
        assert larger.memory_bytes(CONFIG, plan) == pytest.approx(expected, rel=1e-6)
    fewer = [row | {"process_bytes": row["process_bytes"] / 2} for row in grown]
    assert mg.planner.fit([*synthetic.rows(), *fewer]).memory["process.byte"] == 1.0


def test_a_workspace_that_is_small_beside_its_peak_does_not_matter():
    """One of a tenth of what it should be, where the peak is largest, leaves the peaks of others as they are."""
    rows = [row for row in synthetic.rows() if row["kind"] == "memory"]
    odd = max(rows, key=lambda row: row["peak_bytes"])
    workspace = 16 * odd["sequences"] * odd["rows"] * odd["dim"] + 1e6
    odd["peak_bytes"] -= 0.9 * workspace
    assert workspace < 0.11 * odd["peak_bytes"]
    found = mg.planner.fit(rows).memory
    assert all(predict_peak(found, row) == pytest.approx(row["peak_bytes"], rel=0.01) for row in rows if row is not odd)


def test_a_link_takes_its_burst_at_once(cost):
    """What a message is longer than that takes time."""
    call, byte, burst = 5e-5, 1e-9, 65536
    rows = [
        row | {"seconds": call + byte * max(0, row["bytes"] - burst)}
        for row in ({"kind": "transfer", "link": "node", "bytes": 2.0**i, "device": "paper"} for i in range(10, 24))
    ]
    others = [row for row in synthetic.rows() if row["kind"] != "transfer"]
    found = mg.planner.fit([*others, *rows]).links["node"]
    assert [found[f"transfer.{part}"] for part in ("call", "byte", "burst")] == pytest.approx([call, byte, burst])
    assert "transfer.burst" not in cost.links["node"]


def test_what_was_not_measured_is_said(cost):
    assert cost.extrapolated(CONFIG, mg.Plan(dp=64, num_microbatches=1)) == []
    assert cost.extrapolated(replace(CONFIG, dim=512), mg.Plan(dp=64))[0].startswith(
        "dim = 512 is outside the measured"
    )
    alone = mg.planner.fit([row for row in synthetic.rows() if row["kind"] not in ("transfer", "hop", "all_reduce")])
    assert "all-reduce ranks was not measured" in alone.extrapolated(CONFIG, mg.Plan(dp=2))


def test_zero_bubble_takes_the_backward_pass_of_attention_twice(cost):
    plan = mg.Plan(pp=2, num_microbatches=2, schedule="1f1b")
    once, twice = (stage_seconds(cost, replace(plan, schedule=name)) for name in ("1f1b", "zero_bubble"))
    again = synthetic.dot(synthetic.BACKWARD, attention_terms(32, 528, 528, CONFIG, ring=False))
    assert (twice[0] == once[0]).all()
    assert twice[1][0] - once[1][0] == pytest.approx(4 * again)


def test_rows_that_time_no_layer_say_so():
    model, given = CONFIG, asdict(mg.planner.Workload(**synthetic.WORKLOAD))
    memory = [row | {"model": asdict(model), "workload": given} for row in synthetic.rows() if row["kind"] == "memory"]
    assert "no layer was timed" in describe(mg.planner.fit(memory))


def test_work_of_the_first_and_last_stage_in_layers(cost):
    forward, backward = stage_seconds(cost, mg.Plan(pp=4, layers=(2, 2, 2, 2)))
    layer = (forward[1] + backward[1]) / 2
    first, last = cost.extra_layers(CONFIG, cost.workload)
    assert first == pytest.approx((forward[0] + backward[0]) / layer - 2, rel=1e-2)
    assert last == pytest.approx((forward[3] + backward[3]) / layer - 2, rel=1e-2)


def test_held_out_rows_are_judged_by_a_fit_that_has_not_seen_them():
    """Rows of which the third that is held out took twice as long, and twice the bytes: half is missing from each."""
    rows = synthetic.rows()
    timed = [row for row in rows if row["kind"] in COMPUTED]
    sizes = [row for row in rows if row["kind"] == "memory"]
    for some, field in ((timed, "seconds"), (sizes, "peak_bytes")):
        fitted, judged = held_out_third(some)
        assert len(judged) == len(some) // 3 and {id(row) for row in fitted + judged} == {id(row) for row in some}
        for row in judged:
            row[field] *= 2
    held_out = mg.planner.fit(rows).held_out
    assert held_out["time_mape"] == pytest.approx(0.5, abs=1e-6)
    assert held_out["memory_mape"] == pytest.approx(0.5, abs=1e-6)


ROW = dict(kind="layers", layers=1, sequences=2, rows=7, columns=2.5, num_super=1, pairs=12, dim=4, ffn_dim=4, heads=2)
ROW |= dict(bias="bucket", bias_size=3, direction="forward", seconds=1.0)


@pytest.mark.parametrize(("targets", "scores"), [(None, 6 + 7), (7, 6 + 7), (6, 6), (2, 6)])
def test_a_last_layer_of_regular_rows_has_none_of_super_rows(targets, scores):
    """6 regular rows to a super node, and that one, where it is computed, to all 7; 2 heads of 2 sequences."""
    terms = row_terms(ROW | dict(targets=targets))
    assert terms["attention.score"] == 2 * 2 * scores and terms["pair.score"] == 2 * 2 * 12


@pytest.mark.parametrize(("targets", "read_out"), [(None, 7), (5, 5)])
def test_the_loss_has_a_workspace_of_the_rows_that_are_read_out(targets, read_out):
    row = ROW | dict(kind="memory", targets=targets, in_features=1, num_classes=3, feature_rows=1, global_tokens=0)
    sizes = [predict_peak(memory, row) for memory in ({}, {"workspace.class": 1.0})]
    assert sizes[1] - sizes[0] == 2 * read_out * 3


KERNELS = 24  # that a layer starts, one after the other
HOST = {"forward": 20e-6, "backward": 30e-6}  # seconds of one launch


def queue_seconds(layers: int, work: float, launch: float) -> float:
    """A device that begins a kernel when it has come and the one before is done, event by event; a layer's kernels are
    of unequal length."""
    parts = np.arange(1, KERNELS + 1) / np.arange(1, KERNELS + 1).sum()
    host = device = 0.0
    for part in np.tile(parts, layers):
        host += launch
        device = max(device, host) + part * work
    return max(host, device)


def work_of(m: int, nodes: int, dim: int, heads: int, way: str) -> float:
    products, scores = m * nodes * (6 + 2) * dim**2, m * nodes**2 * heads
    return (1.0 if way == "forward" else 2.2) * (1e-13 * products + 2e-12 * scores + 3e-11 * m * nodes * dim)


def gpu_rows(sizes):
    for m, nodes, (dim, heads), way in sizes:
        row = dict(kind="layers", sequences=m, rows=nodes, columns=nodes, dim=dim, ffn_dim=dim, heads=heads, layers=4)
        row |= dict(targets=None, bias="bucket", bias_size=8, direction=way, device="a GPU", device_type="cuda")
        yield row | dict(unit="s", seconds=queue_seconds(4, work_of(m, nodes, dim, heads, way), HOST[way]))


def test_a_step_takes_what_its_launches_take_or_what_its_device_does():
    shapes = ((64, 8), (128, 8), (128, 4))
    rows = list(gpu_rows(product((1, 4, 16, 64, 256), (32, 128, 512), shapes, HOST)))
    unseen = list(gpu_rows(product((2, 32, 128), (64, 256), shapes, HOST)))
    cost = mg.planner.fit(rows)
    assert time_errors(cost.seconds, unseen)["time_mape"] < 0.01  # the queue fills and runs empty at the ends
    summed = mg.planner.fit([row | {"device_type": "cpu"} for row in rows])
    assert cost.memory["batches"] == 2 and "batches" not in summed.memory  # the next one is copied there meanwhile
    assert time_errors(summed.seconds, unseen)["time_mape"] > 0.05
    for way, launch in HOST.items():
        found = cost.seconds[way]
        assert found.get("layer.launch", 0.0) + found.get("attention.launch", 0.0) == pytest.approx(
            KERNELS * launch, rel=0.05
        )
        assert "layer.call" not in found

    def step(sequences: int) -> float:
        workload = mg.planner.Workload(batch_sequences=sequences, num_nodes=128, num_super=0, num_targets=128)
        return cost.step_seconds(CONFIG, mg.Plan(), workload)

    assert step(2) == step(1) > 0.99 * 8 * KERNELS * sum(HOST.values())
    assert step(2000) == pytest.approx(2 * step(1000))
