"""One command for all experiments: quick ones run on generated graphs, say so, and leave the full rows alone."""

from __future__ import annotations

import importlib
import json
import re

import numpy as np
import pytest
import tyro

from bench.paper import __main__ as paper
from bench.paper import compared, raw_files, trials
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
    assert "`cpu/step_losses.json`, 1 row, " in page and ", quick, generated\n\n| dataset | difference |" in page
    assert (tmp_path / "sources" / f"{row['sources']}.sha256").exists()
    assert (RESULTS / "cpu" / "step_losses.json").read_bytes() == before
    tyro.cli(paper.main, args=["--list", "--out", str(tmp_path)])
    assert "losses                 losses of both on the same batches: done" in capfd.readouterr().out
