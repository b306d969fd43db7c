"""What is said while work goes on, on which stream, and what is not."""

from __future__ import annotations

import io
import logging
import sys
from dataclasses import replace

import pytest

import megagraph as mg
from megagraph import progress
from megagraph.cli import _take_log_level
from megagraph.data import prepare
from megagraph.data.graph import random_split
from megagraph.progress import Progress, log
from tests.checkpoint_cases import config, graph, stop_at
from tests.processes import Command, launch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _own_logger():
    kept = log.level, log.handlers
    log.handlers = []  # of a command that another test has run in this process
    yield
    log.setLevel(kept[0])
    log.handlers = kept[1]


def test_lines_where_there_is_no_terminal(monkeypatch, caplog, capsys):
    caplog.set_level("INFO", "megagraph")
    assert [*Progress(range(1200), "evaluation", 1200)] == [*range(1200)]
    assert not caplog.messages  # it took no time
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    told = Progress(range(1200), "evaluation", 1200)
    for _ in told:
        told.set_postfix(loss="0.5", refresh=False)
    assert caplog.messages[0] == "evaluation: 0 of 1,200 batches"
    assert caplog.messages[-1] == "evaluation: 1,200 of 1,200 batches, loss=0.5"
    assert capsys.readouterr() == ("", "")


def test_a_bar_at_a_terminal_with_lines_above_it(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert _take_log_level(["train", "--log-level", "info", "--epochs", "3"]) == ["train", "--epochs", "3"]
    for step in Progress(range(3), "epoch 0", 3):
        if step == 1:
            log.info("a line")
    said = terminal.getvalue()
    assert "epoch 0:   0%|" in said and " batches/s" in said
    assert "a line" in [line.rpartition("\r")[2].strip() for line in said.split("\n")]


def test_nothing_is_said_where_nobody_asked(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    log.setLevel(logging.NOTSET)
    assert len([*Progress(range(3), "evaluation", 3)]) == 3
    assert capsys.readouterr() == ("", "")


def test_a_run_says_what_it_trains_and_how_far_it_is(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "megagraph")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(prepare, "_LARGE", 0)
    summary = mg.Trainer(config(tmp_path / "run", epochs=1)).fit(graph())
    said = "\n".join(caplog.messages)
    whole = graph()
    for part in (
        f"synthetic: 100 nodes, {whole.num_edges // 2} edges, 8 features, 3 classes; 60 nodes to train, 20 to validate",
        f"hierarchical: {summary.parameters:,} parameters, sequences of N = {summary.sequence_nodes} nodes, on cpu, "
        "plan pp 1, cp 1, dp 1; prepared in ",
        f"run folder {tmp_path / 'run'}",
        "preparing synthetic: PageRank around every node",
        "epoch 0: 6 of 6 batches, loss=",
        "evaluation: 4 of 4 batches",
    ):
        assert part in said, part
    assert "--split public" not in said
    caplog.clear()
    mg.predict(tmp_path / "run", whole)
    assert "prediction: 10 of 10 batches" in caplog.messages


def test_a_resumed_epoch_counts_the_batches_before(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "megagraph")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with stop_at(8):
        mg.Trainer(config(tmp_path / "run", epochs=2)).fit(graph())
    caplog.clear()
    mg.Trainer.resume(tmp_path / "run").fit(graph())
    said = [line.partition(" batches")[0] for line in caplog.messages if line.startswith("epoch 1: ")]
    assert said[0] in ("epoch 1: 2 of 6", "epoch 1: 3 of 6") and said[-1] == "epoch 1: 6 of 6"


def test_a_run_says_that_a_graph_has_a_split_that_it_does_not_take(tmp_path, caplog):
    caplog.set_level("INFO", "megagraph")
    whole = graph()
    whole = replace(whole, split=random_split(whole.labels, 7))
    said = "the split is a random one; synthetic has one of its own, which --split public takes"
    for split in ("random", "public"):
        mg.Trainer(config(tmp_path / split, epochs=1, split=split)).fit(whole)
        assert (said in caplog.messages) == (split == "random")
        caplog.clear()


SMALL = ["--layers", "1", "--dim", "16", "--heads", "2", "--samples", "1", "--max-steps", "1", "--device", "cpu"]


@pytest.mark.parametrize(("level", "expected"), [("info", True), ("error", False)])
def test_log_level(tmp_path, level, expected):
    done = Command("--log-level", level, "train", *SMALL, "--out", tmp_path / "run").finish()
    assert done.returncode == 0 and ("2,000 nodes" in done.stderr) == expected
    assert expected or done.stderr == ""


def test_one_process_of_a_run_speaks():
    for done in launch(2, "train", "--log-level", "loud"):
        assert done.returncode == 1 and "--log-level: invalid choice: 'loud' (choose from" in done.stderr
