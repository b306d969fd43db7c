"""What --tensorboard writes, read by TensorBoard itself."""

from __future__ import annotations

import sys

import pytest

import megagraph as mg
from megagraph.board import Board
from megagraph.run import Run
from tests.checkpoint_cases import config, graph, stop_at

SEEN = {"loss": "step/loss", "learning_rate": "step/learning_rate", "gradient_norm": "step/gradient_norm"}
OF_EPOCHS = {"loss": "epoch/loss", "val_accuracy": "validation/accuracy", "test_accuracy": "test/accuracy"}


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_metrics_also_of_a_resumed_run(tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    with stop_at(9):  # the last checkpoint is that of step 8
        mg.Trainer(config(run, tensorboard=True)).fit(graph())
    mg.Trainer.resume(run, learning_rate=5e-3).fit(graph())
    found, lines = scalars(run / "tensorboard"), Run.open(run).metrics()
    steps, epochs = ([line for line in lines if kind in line] for kind in ("step", "epoch"))
    assert len(steps) == 18 and len(epochs) == 3
    for name, tag in SEEN.items():
        assert found[tag] == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in steps], tag
    for name, tag in OF_EPOCHS.items():
        expected = [(6 * i + 5, pytest.approx(line[name], rel=1e-6)) for i, line in enumerate(epochs)]
        assert found[tag] == expected, tag
    assert "validation/roc_auc" not in found and not [tag for tag in found if "from_step" in tag]


def test_nothing_of_it_where_nobody_asks(tmp_path):
    mg.Trainer(config(tmp_path / "run", max_steps=1)).fit(graph())
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_one_error_before_the_work_where_it_is_not_installed(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="--tensorboard needs the package tensorboard, pip install tensorboard"):
        mg.Trainer(config(tmp_path / "run", tensorboard=True, dataset="not even looked for")).fit()
    assert not (tmp_path / "run").exists()


def test_an_epoch_that_is_the_first_line_of_a_start_counts_at_its_last_step(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    board = Board(tmp_path)
    board.log({"changes": {}, "from_step": 3})
    board.log({"epoch": 0, "val_accuracy": 0.5, "val_roc_auc": None})
    board.log({"step": 3, "loss": 2.0})
    board.close()
    assert scalars(tmp_path / "tensorboard") == {"validation/accuracy": [(2, 0.5)], "step/loss": [(3, 2.0)]}
