"""Profiles of a tiny model, and the chain from rows to plan and plots on the command line."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import replace

import pytest
import torch

import megagraph as mg
from bench.provenance import RESULTS
from bench.shapes import NUM_BUCKETS, NUM_CHANNELS
from megagraph import auto
from megagraph.cli import main
from megagraph.cli.planner import profile as profile_command
from megagraph.cli.planner import read_rows
from megagraph.planner import profile as module
from megagraph.planner.measure.clock import average
from megagraph.planner.measure.computing import Probe
from megagraph.planner.measure.design import Point, design, of_every_width, random_inputs
from megagraph.planner.measure.memory import memory_rows, observe_memory
from megagraph.planner.profile import profile
from megagraph.planner.rows import FIELDS, bench_rows, check_rows
from tests.planner import synthetic
from tests.processes import launch_each

CONFIG = mg.ModelConfig(in_features=8, num_classes=3, layers=2, dim=16, ffn_dim=32, heads=4, bias_size=3)
WORKLOAD = mg.planner.Workload(batch_sequences=4, num_nodes=24, num_super=2, num_targets=1)


def test_profile_measures_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIT_ERROR", 1e9)  # a second is short
    arguments = dict(device=torch.device("cpu"), batches=range(4), budget_seconds=1.0, cache=tmp_path)
    rows = profile(CONFIG, WORKLOAD, **arguments)
    of_others = {"transfer", "hop", "all_reduce", "attention", "model"}
    assert {row["kind"] for row in check_rows(rows)} == set(FIELDS) - of_others
    assert {row["unit"] for row in rows} == {"s"} and all(row["device"] and row["torch"] for row in rows)
    assert profile(CONFIG, WORKLOAD, **arguments) == rows  # from the cache: times would differ
    cost = mg.planner.fit(rows)
    assert cost.model == CONFIG and cost.workload == WORKLOAD and not cost.links
    assert "transfer bytes was not measured" in cost.extrapolated(CONFIG, mg.Plan(pp=2))
    whole = Point(sequences=4, nodes=26, config=CONFIG, targets=1, feature_rows=4 * 26)
    observed = observe_memory(whole, torch.device("cpu"))["peak_bytes"]
    assert cost.memory["process.byte"] >= 1
    expected = observed * cost.memory["process.byte"]
    assert cost.memory_bytes(CONFIG, mg.Plan()) == pytest.approx([expected], rel=0.035)


def test_what_compiles_takes_nothing_of_the_time(monkeypatch):
    """Kernels of a GPU compile for every size: a profile of eight seconds had the first one only."""
    seen, step, memory, spent = set(), Probe.step, module.memory_rows, [0.0]

    def clock():  # one that no other work on the machine disturbs
        spent[0] += 1e-4
        return spent[0]

    monkeypatch.setattr(time, "perf_counter", clock)

    def first_is_slow(probe):
        spent[0] += 1e-3 if probe.point in seen else 1.0
        seen.add(probe.point)
        step(probe)

    def slow_memory(*given):
        spent[0] += 4.0
        return memory(*given)

    monkeypatch.setattr(Probe, "step", first_is_slow)
    monkeypatch.setattr(module, "memory_rows", slow_memory)
    rows = profile(CONFIG, WORKLOAD, device=torch.device("cpu"), budget_seconds=4.0)
    names = ("sequences", "rows", "dim", "heads")
    measured = {tuple(row[name] for name in names) for row in rows if row["kind"] == "layers"}
    points = design(CONFIG, WORKLOAD, torch.device("cpu"))
    assert measured == {(p.sequences, p.nodes, p.config.dim, p.config.heads) for p in points}
    assert all(row["samples"] > 1 for row in rows if row["kind"] == "ring")


@pytest.mark.parametrize(
    ("dtype", "kind"), [("bf16", "hierarchical"), ("fp64", "hierarchical"), ("fp32", "graphormer")]
)
def test_bytes_of_other_dtypes_and_models(dtype, kind):
    """Bytes of sizes that no row has are those that an observer sees; as fp32 they would be a half off."""
    config = replace(CONFIG, bias="bucket", layers=3, dim=32, in_features=16, max_degree=100)
    workload = replace(WORKLOAD, batch_sequences=8, num_nodes=126, dtype=dtype, model=kind)
    cpu = torch.device("cpu")
    cost = mg.planner.fit(json.loads(json.dumps(memory_rows(of_every_width(design(config, workload, cpu)), cpu))))
    for sequences, nodes in ((6, 128), (3, 90)):
        point = Point(
            sequences=sequences,
            nodes=nodes,
            config=config,
            targets=1,
            feature_rows=sequences * nodes,
            dtype=dtype,
            model=kind,
        )
        observed = observe_memory(point, cpu)["peak_bytes"]
        given = replace(workload, batch_sequences=sequences, num_nodes=nodes - 2)
        assert cost.memory_bytes(config, mg.Plan(), given) == pytest.approx([observed], rel=0.02)


def test_bytes_of_several_labels_a_node():
    """Their loss keeps of every score itself, the label and whether it counts, in fp32."""
    config = replace(CONFIG, bias="bucket", num_classes=300, multi_label=True)
    workload = replace(WORKLOAD, num_nodes=126, num_targets=126)
    cpu = torch.device("cpu")
    cost = mg.planner.fit(json.loads(json.dumps(memory_rows(of_every_width(design(config, workload, cpu)), cpu))))
    assert cost.memory["kept.class"] == pytest.approx(3 * 4, rel=0.05)
    whole = Point(sequences=4, nodes=128, config=config, targets=126, feature_rows=4 * 128, num_super=2)
    observed = observe_memory(whole, cpu)["peak_bytes"]
    assert cost.memory_bytes(config, mg.Plan(), workload) == pytest.approx([observed], rel=0.03)


def test_a_profile_is_of_its_dtype_model_and_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FIT_ERROR", 1e9)
    arguments = dict(device=torch.device("cpu"), budget_seconds=0.2, cache=tmp_path)
    config = replace(CONFIG, bias="bucket")
    for workload in (WORKLOAD, replace(WORKLOAD, dtype="bf16"), replace(WORKLOAD, model="graphormer")):
        rows = profile(config, workload, **arguments)
        assert {row["dtype"] for row in rows} == {workload.dtype} and mg.planner.fit(rows).workload == workload
    profile(config, WORKLOAD, workers=2, **arguments)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_profile_that_is_old_or_predicts_nothing_is_measured_again(tmp_path, monkeypatch):
    arguments = dict(device=torch.device("cpu"), budget_seconds=0.2, cache=tmp_path)
    monkeypatch.setattr(module, "FIT_ERROR", -1.0)
    profile(CONFIG, WORKLOAD, **arguments)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(module, "FIT_ERROR", 1e9)
    rows = profile(CONFIG, WORKLOAD, **arguments)
    (path,) = tmp_path.iterdir()
    os.utime(path, (0, time.time() - 29 * 86400))
    assert profile(CONFIG, WORKLOAD, **arguments) == rows
    os.utime(path, (0, time.time() - 31 * 86400))
    assert profile(CONFIG, WORKLOAD, **arguments) != rows


def test_what_is_kept_only_is_not_measured(tmp_path, monkeypatch):
    def never(*given):
        raise AssertionError("measured")

    monkeypatch.setattr(module, "_measure", never)
    assert profile(CONFIG, WORKLOAD, device=torch.device("cpu"), cache=tmp_path, kept_only=True) == []
    assert not list(tmp_path.iterdir())


def test_rows_say_how_many_ranks_a_node_has(monkeypatch):
    monkeypatch.setattr(module, "ranks_of_nodes", lambda: [[0, 1], [2, 3]])
    monkeypatch.setattr(module, "_measure", lambda *given: synthetic.rows())
    rows = profile(CONFIG, WORKLOAD, device=torch.device("cpu"))
    assert mg.planner.fit(rows).origin["ranks_per_node"] == "2"


# in the smallest sizes weights are most of the peak, the more with those of a convolution
@pytest.mark.parametrize(("convolution", "tolerance"), [(False, 0.05), (True, 0.1)])
def test_profile_of_listed_pairs(convolution, tolerance):
    """What is measured of parts of a graph says what all of it takes; the peak is that of an observer."""
    workload = mg.planner.Workload(
        batch_sequences=1, num_nodes=600, num_super=3, num_targets=600, pairs=3000, halo=(40, 70, 90)
    )
    config = replace(CONFIG, bias="bucket", bias_size=6, convolution=convolution)
    points = design(config, workload, torch.device("cpu"))
    assert {point.pairs // (point.nodes - 3) for point in points} == {5, 20}
    assert {point.nodes for point in points} == {20 + 3, 37 + 3, 150 + 3}
    rows = profile(config, workload, device=torch.device("cpu"), budget_seconds=1.0)
    assert {row["kind"] for row in check_rows(rows)} >= {"layers", "memory", "process", "optimizer"}
    cost = mg.planner.fit(json.loads(json.dumps(rows)))
    assert cost.workload == workload and "tokens = 603 is outside" in cost.extrapolated(config, mg.Plan())[0]
    whole = Point(sequences=1, nodes=603, config=config, targets=600, feature_rows=603, num_super=3, pairs=3000)
    observed = observe_memory(whole, torch.device("cpu"))["peak_bytes"]
    assert cost.memory_bytes(config, mg.Plan()) == pytest.approx(
        [observed * cost.memory["process.byte"]], rel=tolerance
    )
    assert mg.planner.search(cost, config, 2, 2**30).best.plan.num_microbatches == 1


def test_design_varies_every_size():
    points = design(CONFIG, WORKLOAD, torch.device("cpu"))
    for name in ("sequences", "rows", "dim", "heads"):
        assert len({point.fields()[name] for point in points}) > 1, name


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["megagraph", *map(str, arguments)])
    main()


def test_a_profile_is_of_the_gpu_of_its_process(tmp_path, monkeypatch):
    """Clocks and bytes of a profile are those of the current GPU, which was the first one on every rank."""
    selected, measured_on = [], []

    def measure(config, graph, builder, nodes, device, **options):
        measured_on.extend(selected)
        return synthetic.rows()

    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(mg.TrainConfig, "torch_device", lambda config: torch.device("cuda", 1))
    monkeypatch.setattr(auto, "measure", measure)
    monkeypatch.setattr(auto, "memory_bytes", lambda device: 2**30)
    (tmp_path / "cluster.json").touch()  # stays as it is
    run(monkeypatch, "profile", "--rows", tmp_path / "rows.json", "--cluster", tmp_path / "cluster.json")
    assert measured_on == [torch.device("cuda", 1)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "profile.json"
    measured = synthetic.rows()
    measured[0]["model"] = dict(in_features=32, num_classes=5, layers=8, dim=64, ffn_dim=64, bias="bucket", bias_size=8)
    path.write_text(json.dumps(measured))
    return path


def test_from_rows_to_plan_and_plots(rows, tmp_path, monkeypatch, capsys):
    cost, plan = tmp_path / "cost.json", tmp_path / "plan.json"
    run(monkeypatch, "fit", rows, "--out", cost)
    assert "held out: time MAPE 0.0%" in capsys.readouterr().out
    limits = ("--world-size", 4, "--memory-gib", 64)
    run(monkeypatch, "search", cost, *limits, "--pp", 2, "--explain", "2, 1,2", "--out", plan)
    said = capsys.readouterr().out
    chosen = mg.Plan.load(plan)
    assert said.endswith(f"{plan}: {chosen}\n")
    assert chosen.pp == 2 and chosen.world_size == 4 and sum(chosen.layers) == 8
    step = float(re.search(r"best +([\d.e+-]+) s", said)[1])
    model = mg.planner.CostModel.load(cost)
    assert step == pytest.approx(model.step_seconds(model.model, chosen), rel=1e-3)
    for term in ("slowest rank computes", "bubble and transfers", "all-reduce", "loader stall"):
        assert term in said
    for kind, more in (("costmodel", ("--rows", rows)), ("pareto", limits), ("stages", (plan,))):
        run(monkeypatch, "plot", kind, cost, *more, "--out", tmp_path / f"{kind}.png")
        assert (tmp_path / f"{kind}.png").stat().st_size > 5000


def test_what_is_explained_is_the_best_plan_with_these_degrees(tmp_path, monkeypatch, capsys):
    path = RESULTS / "cpu" / "real_plans" / "cost.json"
    limits = ("--world-size", 4, "--memory-gib", 4)
    cost = mg.planner.CostModel.load(path)
    found = mg.planner.search(cost, cost.profiled()[0], 4, 2**32, fixed={"pp": 2, "cp": 2, "dp": 1})
    run(monkeypatch, "search", path, *limits, "--explain", "2,2,1")
    said = capsys.readouterr().out
    plan, *terms = said[said.index("\npp 2, cp 2, dp 1") + 1 :].splitlines()
    assert plan == str(found.best.plan)
    seconds = [float(words[1]) for line in terms if (words := line.rsplit(maxsplit=2))[-1] == "s"]
    assert len(seconds) == 6 and sum(seconds) == pytest.approx(found.best.step_seconds, rel=1e-3)


def test_a_cost_model_is_drawn_beside_the_rows_that_it_was_fitted_to(rows, tmp_path, monkeypatch, capsys):
    cost, both, other = (tmp_path / f"{name}.json" for name in ("cost", "both", "other"))
    measured = json.loads(rows.read_text())
    both.write_text(json.dumps([row | {"dtype": dtype} for dtype in ("fp32", "bf16") for row in measured]))
    other.write_text(json.dumps([row | {"device": "another"} for row in measured]))
    run(monkeypatch, "fit", both, "--dtype", "bf16", "--out", cost)
    run(monkeypatch, "plot", "costmodel", cost, "--rows", both, "--out", tmp_path / "a.png")
    run(monkeypatch, "fit", rows, "--out", cost)
    with pytest.raises(SystemExit):
        run(monkeypatch, "plot", "costmodel", cost, "--rows", other, "--out", tmp_path / "b.png")
    assert re.search(r"rows must be those that .*cost.json was fitted to, .* got another", capsys.readouterr().err)
    assert (tmp_path / "a.png").exists() and not (tmp_path / "b.png").exists()


def test_a_search_that_finds_nothing_ends_with_one_line(rows, tmp_path, monkeypatch, capsys):
    cost = tmp_path / "cost.json"
    run(monkeypatch, "fit", rows, "--out", cost)
    with pytest.raises(SystemExit):
        run(monkeypatch, "search", cost, "--world-size", 4, "--memory-gib", 0.005)
    assert re.match(r"megagraph: error: no plan of 4 processes fits 5.12 MiB.*the lightest", capsys.readouterr().err)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_every_committed_file_fits_or_says_in_a_line_why_not_and_what_to_do(path):
    try:
        cost = mg.planner.fit(read_rows((path,)))
    except ValueError as error:
        assert re.fullmatch(r".*(expected|must).*(megagraph profile|--dtype|megagraph fit).*", str(error)), str(error)
    else:
        assert cost.held_out or cost.links


def test_rows_of_the_attention_bench_are_rows_of_attention(tmp_path):
    row = dict(contender="megagraph_blocked", B=1, H=2, M=8, N=16, D=4, form="bucket", dtype="float32", unit="s")
    row |= dict(direction="forward", median=1e-3, device="paper", torch="2", commit="c")
    made = bench_rows([row, row | dict(contender="eager"), row | dict(median=None)])
    assert [(r["kind"], r["dtype"]) for r in check_rows(made)] == [("attention", "fp32")]
    assert made[0]["dim"] == 8 and made[0]["seconds"] == 1e-3
    assert made[0]["impl"] == "blocked"
    forms = [row | dict(form=form) for form in ("bucket", "projected")]
    assert [r["bias_size"] for r in bench_rows(forms)] == [NUM_BUCKETS, NUM_CHANNELS]
    benchmarks = [{"extra_info": one} for one in (row, row | dict(contender="megagraph_reference"))]
    (tmp_path / "bench.json").write_text(json.dumps({"benchmarks": benchmarks}))  # as pytest-benchmark writes it
    (tmp_path / "profile.json").write_text(
        json.dumps([dict(kind="stall", seconds=0.0, device="paper", impl="blocked")])
    )
    read = check_rows(read_rows((tmp_path / "bench.json", tmp_path / "profile.json")))
    assert [(r["kind"], r["impl"]) for r in read] == [("stall", "blocked"), ("attention", "blocked")]


def test_rows_of_several_dtypes_are_fitted_one_dtype_at_a_time(tmp_path, monkeypatch, capsys):
    row = dict(contender="megagraph_triton", B=1, H=2, M=8, N=16, D=4, form="bucket", unit="s", device="a GPU")
    row |= dict(direction="forward", median=1e-3, torch="2", commit="c")
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row | dict(dtype=dtype) for dtype in ("bfloat16", "float32", "float16")]))
    with pytest.raises(SystemExit):
        run(monkeypatch, "fit", path, "--out", tmp_path / "cost.json")
    assert re.search(r"one dtype, got \['a GPU triton bf16', 'a GPU triton fp32'\].*--dtype", capsys.readouterr().err)
    run(monkeypatch, "fit", path, "--dtype", "bf16", "--out", tmp_path / "cost.json")
    assert mg.planner.CostModel.load(tmp_path / "cost.json").origin["dtype"] == "bf16"


def test_what_is_interrupted_now_and_then_takes_its_mean():
    """A process that may run half of the time: a call of 2 s is whole or takes 7 s, and ten take 45 s. One in ten calls
    of a machine that others use takes a minute."""
    assert average([2.0, 7.0] * 5 + [60.0])["seconds"] == pytest.approx((5 * 2 + 4 * 7) / 9)
    assert average([3.0, 1.0, 2.0, 2.0])["seconds"] == 2.0


@pytest.mark.parametrize("bias", ["bucket", "projected"])
def test_a_profile_measures_sequences_as_full_as_batches_are(bias):
    config = replace(CONFIG, bias=bias, global_tokens=1)
    point = Point(sequences=300, nodes=13, config=config, targets=1, feature_rows=50, num_super=3, filled=0.55)
    inputs = random_inputs(point, torch.device("cpu"))
    padding, structure = inputs["key_padding_mask"], inputs["structure"]
    assert random_inputs(point, torch.device("meta"))["structure"].stride(-2) == 16  # as a batch's
    assert not padding[:, 10:].any() and not padding[:, 0].any() and (padding[:, 1:10] >= padding[:, :9]).all()
    assert padding[:, :10].double().mean().item() == pytest.approx(0.45, abs=0.01)
    hidden = padding[:, None] | padding[:, :, None]
    empty = structure == 255 if bias == "bucket" else ~structure.any(dim=1)
    assert torch.equal(empty, hidden)
    whole = random_inputs(replace(point, filled=1.0), torch.device("cpu"))
    assert not whole["key_padding_mask"].any()
    assert {point.filled for point in design(CONFIG, replace(WORKLOAD, filled=0.5), torch.device("cpu"))} == {0.5}
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="filled must be"):
            replace(WORKLOAD, filled=wrong)


def test_ranks_measure_the_same(tmp_path):
    out = ("--rows", tmp_path / "rows.json", "--cluster", tmp_path / "cluster.json")
    words = ("profile", *out, "--seconds", 1, "--timeout", 30, "--seed")
    for done in launch_each([(*words, seed) for seed in (0, 1)]):
        assert done.returncode == 1 and "seed is 0 on rank 0 and 1 on rank 1" in done.stderr, done.stderr


def test_a_profile_waits_no_longer_than_it_is_told():
    assert profile_command(mg.TrainConfig(timeout=7.0)).timeout_seconds == 7.0
