"""The short form of bench.restarts: one kill and one signal."""

from __future__ import annotations

import shutil

import pytest

from bench import restarts
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store


@pytest.mark.slow
def test_a_kill_and_a_signal(tmp_path, monkeypatch):
    write_store(synthetic_graph(num_nodes=600, num_classes=3, in_features=16, seed=0), tmp_path / "store")
    killed = restarts.kill(tmp_path, "step", "1,1,1", 0, seed=1)
    assert killed["holds"] and killed["killed"] and killed["restarts"] == 1, killed
    told = restarts.tell(tmp_path, "1,1,1", "rank", seed=1)
    assert told["holds"], told
    # and it can fail: one loss is another, and a run that is not the undisturbed one
    whole, other = restarts.undisturbed(tmp_path, "1,1,1"), tmp_path / "other"
    shutil.copytree(whole, other)
    assert restarts.equal(whole, other)
    head, loss, tail = (other / "metrics.jsonl").read_text().partition('"loss": ')
    (other / "metrics.jsonl").write_text(f"{head}{loss}1{tail}")
    assert not restarts.equal(whole, other)
    monkeypatch.setattr(restarts, "outcome", lambda run: ([run.name], {}))
    assert not restarts.kill(tmp_path, "exit", "1,1,1", 0, seed=1)["holds"]
