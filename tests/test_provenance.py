"""Where runs come from."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megagraph as mg
from megagraph import files, provenance
from megagraph.ablation import evaluate
from megagraph.config import AUTO
from megagraph.data.store import open_store, write_store
from megagraph.evaluate import choose_split
from megagraph.history import History
from megagraph.run import Run
from tests.checkpoint_cases import config, graph, stop_at

ROOT = Path(__file__).parent.parent


def test_a_run_keeps_where_it_comes_from(tmp_path, monkeypatch):
    write_store(graph(), tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    mg.Trainer(config(tmp_path / "run", epochs=1, dataset="store")).fit()
    (start,) = Run.open(tmp_path / "run").starts
    versions = {name: start[name] for name in ("python", "torch", "numpy", "megagraph")}
    assert versions == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "megagraph": mg.__version__,
    }
    assert start["command"] == shlex.join(sys.argv) and start["directory"] == str(tmp_path)
    assert start["hosts"] == [socket.gethostname()] and start["processes"] == 1 and "threads" in start["device"]
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = os.environ.get("MEGAGRAPH_COMMIT") or done.stdout.strip()
    assert start["commit"].removesuffix("-dirty") == commit and len(start["tree"]) == 16
    stored = open_store(tmp_path / "store")
    split = choose_split(stored, config(tmp_path))
    assert start["data"] == {
        "name": "synthetic",
        "path": str(tmp_path / "store"),
        "fingerprint": stored.fingerprint(),
        "nodes": 100,
        "edges": graph().num_edges // 2,
        "features": 8,
        "classes": 3,
        "several_labels": False,
        "train_nodes": 60,
        "val_nodes": 20,
        "test_nodes": 20,
        "majority_micro_f1": None,
        "class_names": None,
        "columns": None,
        "majority_accuracy": float(
            (graph().labels[split.test] == np.bincount(graph().labels[split.train]).argmax()).mean()
        ),
    }


def test_a_resumed_run_appends_what_changed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with stop_at(3):
        mg.Trainer(config(run)).fit(graph())
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setattr(sys, "argv", ["megagraph", "train", "--resume", "a run"])
    mg.Trainer.resume(run).fit(graph())
    first, second = Run.open(run).starts
    assert first["hosts"] != ["another"] and first["data"]["path"] is None
    expected = {"hosts": ["another"], "command": "megagraph train --resume 'a run'", "date": second["date"]}
    assert second == expected
    monkeypatch.undo()
    mg.Trainer.resume(run, epochs=4).fit(graph())
    assert Run.open(run).starts[2].keys() == {"date", "command", "hosts"}  # it is back


def test_one_that_is_damaged_missing_or_of_another_run_is_refused(tmp_path):
    run = tmp_path / "run"
    with stop_at(8):
        mg.Trainer(config(run)).fit(graph())
    path = run / "provenance.json"
    good = path.read_text()
    for bad in (good.replace('"processes": 1', '"processes": 2'), "", "[]"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"expected the origin of a run.*provenance\.json"):
            mg.Trainer.resume(run).fit(graph())
    files.write_json(path, {"run_id": Run.of(run).id, "starts": [1]})
    with pytest.raises(ValueError, match="a list of its starts, got"):
        mg.Trainer.resume(run).fit(graph())
    files.write_json(path, {"run_id": "other", "starts": []})
    with pytest.raises(ValueError, match="that of another run"):
        mg.Trainer.resume(run).fit(graph())
    path.unlink()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    calls = [
        lambda: mg.Trainer.resume(run).fit(graph()),
        lambda: mg.Trainer(config(run, resume=AUTO)).fit(graph()),
        lambda: History.of(Run.of(run)),
        lambda: mg.predict(run, graph()),
        lambda: evaluate(run, graph()),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match=r"must be the folder of a run, but it holds no provenance\.json"):
            call()
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_a_package_that_was_installed_into_another_checkout_has_no_commit(tmp_path, monkeypatch):
    package = tmp_path / "env" / "megagraph"
    package.mkdir(parents=True)
    subprocess.run(
        "git init -q && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m a",
        shell=True,
        cwd=tmp_path,
        check=True,
    )
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    assert provenance._git("rev-parse", "HEAD") and provenance._commit.__wrapped__() == ""
