"""One command for all experiments: quick ones run on generated graphs, say so, and leave the full rows alone."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import tyro

from bench import provenance
from bench.paper import __main__ as paper
from bench.paper import cluster, compared, cost_model, device_runs, epoch_time, pareto, raw_files, trials
from bench.paper.page import page
from bench.provenance import RESULTS, ROOT, rows_of
from megagraph.data.datasets import load_graph

NOT_YET = ("device-steps",)  # run in full


@pytest.mark.parametrize("name", paper.EXPERIMENTS)
def test_every_experiment_is_a_module_and_names_its_rows(name):
    experiment = paper.EXPERIMENTS[name]
    for command in (*experiment.commands, *(experiment.quick or ())):
        importlib.import_module(f"bench.paper.{command.split()[0]}")
    found = [any(RESULTS.glob(pattern)) for pattern in experiment.rows]
    assert not any(found) if name in NOT_YET else all(found)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"names": ("nothing",)}, "expected experiments of accuracy, .* got nothing"),
        ({}, "expected names of experiments, or --all"),
        ({"names": ("losses",)}, "expected --root"),
        ({"names": ("losses",), "quick": True, "out": RESULTS}, "expected a folder of its own for quick rows"),
    ],
)
def test_what_is_refused(arguments, said):
    with pytest.raises(SystemExit, match=said):
        paper.main(**arguments)


def test_generated_graphs_are_read_as_the_real_ones(tmp_path):
    raw_files.write(tmp_path)
    raw_files.write(tmp_path)  # what is there stays
    for name, sizes in {"cora": (2708, 1433, 7), "citeseer": (3327, 3703, 6)}.items():
        graph = load_graph(name, tmp_path)
        assert (graph.num_nodes, graph.in_features, graph.num_classes) == sizes
        assert len(graph.split.train) == 20 * graph.num_classes and len(graph.split.test) == 1000
        sources = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
        same = graph.labels[sources] == graph.labels[graph.indices]
        assert same.mean() > 0.7  # edges are those of the nodes that labels are of
    words = load_graph(str(tmp_path / "wordnet30/raw/wordnet30.npz"), None)
    assert (words.num_nodes, words.in_features, words.num_classes) == (117_659, 512, 45)


def test_the_page_has_the_trainings_that_are_reported_and_medians_beside_ranges():
    text = page(RESULTS, ".")
    for name in ("cora", "wordnet30"):
        lines = re.findall(rf"^\| {name} \| random \| (\S+) \|.* (\d+) \|$", text, re.MULTILINE)
        rows = {system: compared.reported(name, system) for system in trials.SETS[name].systems}
        assert sorted(lines) == sorted((system, str(len(found))) for system, found in rows.items() if found)
    (epoch,) = rows_of(RESULTS / "cpu/epoch_time/citeseer.json")
    cell = "| {ratio_median:.3g} ({ratio_range[0]:.3g} to {ratio_range[1]:.3g}) |".format(**epoch)
    assert f" {cell} 1 |" in text


def test_what_was_stopped_or_is_quick_is_not_done(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)

    def asked(quick: bool = False, generated: bool = False) -> bool:
        return paper.done("losses", tmp_path, quick, generated)

    paper.finish("losses", tmp_path)
    provenance.write_rows("step_losses", [{"value": 1.0}], folder="cpu")
    assert not asked()  # it was stopped
    paper.finish("losses", tmp_path)
    assert asked() and not asked(quick=True) and not asked(generated=True)
    provenance.write_rows("step_losses", [{"value": 2.0}], folder="cpu")
    assert not asked()  # it was begun again
    monkeypatch.setattr(provenance, "QUICK", True)
    provenance.write_rows("step_losses", [{"value": 2.0}], folder="cpu")
    paper.finish("losses", tmp_path)
    assert asked(quick=True) and not asked()


@pytest.mark.parametrize("again", [False, True])
def test_again_reaches_what_would_go_on(again, tmp_path, monkeypatch):
    ran = []

    def run(command, env):
        ran.append(command[2:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(paper.subprocess, "run", run)
    paper.main(names=("cluster",), again=again, out=tmp_path)
    assert ran == [["bench.paper.cluster", "run", *["--again"] * again], ["bench.paper.cluster", "judge"]]
    assert not list(tmp_path.iterdir())  # no rows, nothing is finished


def test_beds_with_rows_of_other_sources_are_trained(tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    monkeypatch.setattr(cluster, "FOLDER", tmp_path / "cpu/cluster")
    monkeypatch.setattr(cluster.network, "refusal", lambda: None)
    monkeypatch.setattr(cluster.network, "run", lambda bed, command, timeout: trained.append(command[-1]))
    old, new, none = list(cluster.BEDS)[:3]
    provenance.write_rows(f"cluster/{new}", [{}], folder="cpu")
    (tmp_path / f"cpu/cluster/{old}.json").write_text("[{}]")
    for again, names in ((False, [old, none]), (True, [old, new, none])):
        trained.clear()
        cluster.run((old, new, none), again)
        assert trained == names


@pytest.mark.parametrize("module", [cluster, pareto])
def test_beds_that_cannot_be_made_are_no_success(module, monkeypatch):
    monkeypatch.setattr(module.network, "refusal", lambda: "network namespaces need root")
    with pytest.raises(SystemExit, match="no hosts: network namespaces need root"):
        module.run()


def test_times_of_another_torch_are_not_gone_on_with(tmp_path, monkeypatch):
    for module in (provenance, cost_model):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "cpu/cost_model_subset").mkdir(parents=True)
    found = []
    for seconds, torch, rounds in ((1.0, "1.0", 2), (2.0, "2.0", 3), (3.0, "2.0", 4)):
        origin = dict(device="a CPU", python="3", torch=torch, commit="abc")
        monkeypatch.setattr(provenance, "provenance", lambda origin=origin: dict(origin))
        monkeypatch.setattr(cost_model, "training_pass", lambda point, device, seconds=seconds: lambda: seconds)
        monkeypatch.setattr(cost_model, "ROUNDS", rounds)
        cost_model.measure("time", subset=True)
        rows = rows_of(tmp_path / "cpu/cost_model_subset/time.json")
        assert len(rows) == 8 and {row["torch"] for row in rows} == {torch}
        found.append(rows[0]["all_seconds"])
    assert found == [[1.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 3.0]]


def test_steps_to_warm_up_are_in_no_epoch(monkeypatch):
    """The seconds of a step are its number."""
    loader = SimpleNamespace(epoch=lambda epoch: [None] * 7)
    pair = (SimpleNamespace(seconds=[]), SimpleNamespace(seconds=[]))
    monkeypatch.setattr(epoch_time.time, "perf_counter", lambda: 0.0)
    found = [*epoch_time.in_turn(pair, loader, lambda own, batch, step: own.seconds.append(float(step)))]
    warm = epoch_time.WARMUP_STEPS
    assert found == [([float(sum(range(warm + n, warm + n + 7)))] * 2, 0.0) for n in (0, 7, 14)]


def test_a_training_that_failed_is_said_and_the_others_are_kept(tmp_path, monkeypatch, capsys):
    def train(name, root, out):
        if name == "citeseer":
            raise SystemExit("megagraph train ended with 1")
        return {"run": name}

    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    monkeypatch.setattr(device_runs, "train", train)
    with pytest.raises(SystemExit, match="failed, and without a row:\nciteseer: megagraph train ended with 1"):
        device_runs.main(tmp_path)
    assert len(rows_of(next(tmp_path.rglob("runs.json")))) == len(device_runs.RUNS) - 1


@pytest.mark.slow
def test_a_quick_experiment_writes_its_own_rows_and_is_not_run_again(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = (RESULTS / "cpu" / "step_losses.json").read_bytes()
    for said in ("+ python -m bench.paper.step_memory losses", "losses: has rows of these sources"):
        tyro.cli(paper.main, args=["losses", "--quick", "--out", str(tmp_path)])
        assert said in capfd.readouterr().out
    (row,) = json.loads((tmp_path / "cpu" / "step_losses.json").read_text())
    assert row["quick"] and row["generated"] and row["dataset"] == "cora" and row["difference"] < 1e-9
    page = (tmp_path / "results.md").read_text()
    table, origin = page.index("| dataset | difference |"), page.index("- `cpu/step_losses.json`, 1 row, ")
    assert table < origin and page[origin:].splitlines()[0].endswith(", quick, generated")
    assert (tmp_path / "sources" / f"{row['sources']}.sha256").exists()
    assert (RESULTS / "cpu" / "step_losses.json").read_bytes() == before
    tyro.cli(paper.main, args=["losses", "--list", "--quick", "--out", str(tmp_path)])
    tyro.cli(paper.main, args=["losses", "--list", "--out", str(tmp_path)])
    line = "losses                 losses of both on the same batches"
    assert capfd.readouterr().out.splitlines() == [f"{line}: done", line]
