"""What is said without training is what is trained."""

from __future__ import annotations

import functools
import json

import pytest

import megagraph as mg
from megagraph import auto
from megagraph.dry_run import dry_run
from megagraph.run import Run
from tests.checkpoint_cases import config, graph
from tests.processes import Command

SHAPES = {
    "ego": dict(),
    "at most": dict(max_steps=4, epochs=1),
    "learned": dict(embedding="learned", workers=1),
    "cluster": dict(batching="cluster", sequence_nodes=128, super_nodes=8, batch_size=1, dtype="fp32"),
    "full": dict(batching="full", dtype="fp32"),
    "partitions": dict(batching="full", partitions=3, dtype="fp32"),
}


NOTES = {"ego": "of its PageRank on others", "cluster": "clusters, edge cut", "full": "pairs of nodes attend"}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_said_is_what_is_trained(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(auto, "measure", functools.partial(auto.measure, cache=tmp_path / "cache"))
    given = config(tmp_path / "run", **SHAPES[shape])
    said = dry_run(given, graph())
    assert not [*tmp_path.iterdir()]
    summary = mg.Trainer(given).fit(graph())
    for name in ("parameters", "sequence_nodes", "steps"):
        assert said[name] == getattr(summary, name), name
    assert said["steps_of_an_epoch"] == {"cluster": 1, "full": 1, "partitions": 3}.get(shape, 6)
    assert said["sequences_of_an_epoch"] == {"cluster": 1, "full": 1, "partitions": 3}.get(shape, 2 * 60)
    assert any(NOTES[given.batching] in note for note in said["notes"])
    (start,) = Run.open(tmp_path / "run").starts
    assert said["graph"] == start["data"]
    expected = "learned embedding" if shape == "learned" else "no profile of this machine is kept"
    assert expected in said["no_prediction"]


def test_a_plan_of_several_processes_is_asked_about_by_one(tmp_path):
    given = config(tmp_path / "run", plan="3,1,2", microbatches=2)
    said = dry_run(given, graph())
    assert (
        said["plan"].startswith("pp 3, cp 1, dp 2") and "a plan of 6 processes is predicted by" in said["no_prediction"]
    )
    with pytest.raises(ValueError, match="every replica must have a sequence for each"):
        dry_run(config(tmp_path / "run", plan="1,1,9", microbatches=9), graph())
    with pytest.raises(ValueError, match="cuda_graphs is for a GPU, got device cpu"):
        dry_run(config(tmp_path / "run", cuda_graphs=True), graph())


def test_the_command(tmp_path):
    flags = ["--layers", 1, "--dim", 16, "--heads", 2, "--batching", "cluster", "--sequence-nodes", 128]
    done = Command("train", *flags, "--out", tmp_path / "run", "--dry-run").finish()
    assert done.returncode == 0 and json.loads(done.stdout)["graph"]["nodes"] == 2000, done.stderr
    assert not (tmp_path / "run").exists()
