"""Several labels a node, from files to predictions, as a user has them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import polars
import pytest
import torch

import megagraph as mg
from megagraph.cli import main
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import open_store
from megagraph.evaluate import batches, choose_split, make_loader, make_model
from megagraph.objective import METRICS, OF_LABELS, measures
from megagraph.run import Run

NAMES = ("wet", "cold", "dark", "far; high")
SHARES = (0.7, 0.5, 0.3, 0.2)  # of the nodes that have them
TRAIN = "--layers 1 --dim 16 --ffn-dim 16 --heads 2 --samples 2 --sample-nodes 6 --epochs 8 --learning-rate 0.02"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Labels are linear in the features of a node; a tenth of them, and all of node 7, are not known."""
    folder, rng = tmp_path_factory.mktemp("several"), np.random.default_rng(0)
    graph = synthetic_graph(num_nodes=300, in_features=8, seed=0)
    scores = graph.features @ rng.standard_normal((8, 4))
    there = np.stack([own > np.quantile(own, 1 - share) for own, share in zip(scores.T, SHARES, strict=True)], axis=1)
    known = rng.random(there.shape) > 0.1
    known[7] = False
    words = np.where(known, np.where(there, "True", "False"), "")
    ids = [f"node {i}" for i in range(300)]
    table = {"id": ids} | {f"x{i}": x for i, x in enumerate(graph.features.T)} | dict(zip(NAMES, words.T, strict=True))
    polars.DataFrame(table).write_csv(folder / "nodes.csv")
    edges = graph.adjacency.tocoo()
    polars.DataFrame({"a": [ids[i] for i in edges.row], "b": [ids[i] for i in edges.col]}).write_csv(
        folder / "edges.csv"
    )
    return folder


def run(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["megagraph", *words])
    main()
    return capsys.readouterr().out


def test_from_files_to_predictions(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    flags = ["--nodes", "nodes.csv", "--edges", "edges.csv", "--label", *NAMES, "--out", "graph"]
    said = run(monkeypatch, capsys, "data", "import", *flags)
    assert "300 nodes" in said and "8 features (float32), 4 labels, several a node" in said
    summary = json.loads(run(monkeypatch, capsys, "train", "--dataset", "graph", *TRAIN.split(), "--out", "run"))
    assert summary["majority_micro_f1"] > 0.4 and summary["majority_accuracy"] is None
    assert summary["test_micro_f1"] > summary["majority_micro_f1"] + 0.2
    assert summary["test_average_precision"] > 0.75 and summary["test_accuracy"] is None

    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "epoch" in line]
    measured = {f"{part}_{name}" for part in ("val", "test") for name in OF_LABELS}
    assert all(measured <= line.keys() and "val_accuracy" not in line for line in epochs)
    best = max(epochs, key=lambda line: line["val_micro_f1"])
    assert summary["best_epoch"] == best["epoch"]
    for name in METRICS:
        assert summary[f"test_{name}"] == best.get(f"test_{name}")
        assert summary[f"best_val_{name}"] == best.get(f"val_{name}")

    evaluated = json.loads(run(monkeypatch, capsys, "evaluate", "run", "--ablate", "features"))
    assert evaluated["whole"] == {name: best[name] for name in measured}
    graph, opened = open_store("graph"), Run.open("run")
    split = choose_split(graph, opened.config)
    nodes = np.concatenate([split.val, split.test])
    whole, without = (by_hand(opened, graph, nodes, features) for features in (1, 0))
    changed = ((whole >= 0.5) != (without >= 0.5))[nodes].mean()
    expected = measures(without, graph.labels, split) | {"changed_labels": changed}
    assert evaluated["features"] == pytest.approx(expected, abs=2e-3) and changed > 0.1

    assert "300 nodes x 4 labels" in run(monkeypatch, capsys, "predict", "run", "--out", "p.npy")
    run(monkeypatch, capsys, "predict", "run", "--out", "p.csv")
    probabilities = np.load("p.npy")
    assert probabilities.shape == (300, 4) and not np.allclose(probabilities.sum(axis=1), 1.0, atol=0.1)
    np.testing.assert_allclose(probabilities, by_hand(opened, graph, np.arange(300), 1), rtol=1e-5)
    table = polars.read_csv("p.csv")
    assert table.columns == ["node", "labels", *(f"probability_{name}" for name in NAMES)]
    assert table["node"].to_list() == [f"node {i}" for i in range(300)]
    np.testing.assert_allclose(table.drop("node", "labels").to_numpy(), probabilities, rtol=1e-5)
    given = [[name for name, p in zip(NAMES, row, strict=True) if p >= 0.5] for row in probabilities]
    assert table["labels"].fill_null("").to_list() == [";".join(names) for names in given]
    assert len({*map(tuple, given)}) > 5
    run(monkeypatch, capsys, "predict", "run", "--out", "p.parquet")
    lists = polars.read_parquet("p.parquet")
    assert lists.columns == table.columns and lists["node"].to_list() == table["node"].to_list()
    assert lists["labels"].to_list() == given

    run(monkeypatch, capsys, "data", "export", "graph", "--out", "tables")
    run(
        monkeypatch,
        capsys,
        "data",
        "import",
        "--nodes",
        "tables/nodes.csv",
        "--edges",
        "tables/edges.csv",
        "--out",
        "again",
    )
    np.testing.assert_array_equal(open_store("again").labels, graph.labels)
    assert open_store("again").names.classes == NAMES

    one = synthetic_graph(num_nodes=60, num_classes=4, in_features=8, seed=0)
    with pytest.raises(ValueError, match="trained on 4 labels, several a node, got a graph with 4 classes, one a node"):
        mg.ablation.evaluate("run", one)


def by_hand(opened, graph, nodes, features):
    """The mean probability over the sequences of every node, by a model made anew."""
    model = make_model(opened.config, opened.model_config).eval()
    model.load_state_dict(opened.weights())
    total, count = np.zeros((graph.num_nodes, 4)), np.zeros((graph.num_nodes, 1))
    for batch in make_loader(opened.config, batches(opened.config, graph), nodes).epoch(0):
        with torch.no_grad():
            scores = model(**batch.model_inputs() | {"features": features * batch.features})[:, 0].double()
        np.add.at(total, batch.target_nodes[:, 0].numpy(), 1 / (1 + np.exp(-scores.numpy())))
        np.add.at(count, batch.target_nodes[:, 0].numpy(), 1.0)
    return total / np.maximum(count, 1)


def test_weights_and_numbers_to_predict_are_refused_and_nothing_is_written(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    edges = Path("edges.csv").read_text().splitlines()
    Path("weighted.csv").write_text("\n".join(f"{line},{i}" for i, line in enumerate(edges)))
    for changes, message in (
        (["--edges", "weighted.csv", "--label", *NAMES], "take them away, or drop the weakest edges"),
        (["--edges", "edges.csv", "--label", "x0", "x1"], r"\(regression\) are not supported, cut them into classes"),
        (
            ["--edges", "edges.csv", "--label", "wet", "--label", "cold"],
            "expected --label once, with all of its values",
        ),
        (["--edges", "edges.csv", "--label", "x0"], "regression is not supported; cut them into classes"),
    ):
        monkeypatch.setattr(
            "sys.argv", ["megagraph", "data", "import", "--nodes", "nodes.csv", *changes, "--out", "no"]
        )
        with pytest.raises(SystemExit):
            main()
        assert re.search(message, capsys.readouterr().err), message
        assert not (folder / "no").exists()
