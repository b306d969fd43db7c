"""What --tensorboard and --wandb write, read by TensorBoard itself and from the records of an offline run."""

from __future__ import annotations

import json
import os
import struct
import sys

import pytest

import megagraph as mg
from megagraph.board import TensorBoard
from megagraph.run import Run
from tests.checkpoint_cases import config, graph, stop_at

SEEN = {"loss": "step/loss", "learning_rate": "step/learning_rate", "gradient_norm": "step/gradient_norm"}
OF_EPOCHS = {"loss": "epoch/loss", "val_accuracy": "validation/accuracy", "test_accuracy": "test/accuracy"}


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def records(path) -> list[bytes]:
    """Records of a file of wandb: after 7 bytes, blocks of 32 KiB as LevelDB writes its log; here less than one."""
    data, place, found = path.read_bytes(), 7, []
    assert len(data) < 1 << 15
    while place < len(data):
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        assert kind == 1  # whole
        found.append(data[place + 7 : place + 7 + size])
        place += 7 + size
    return found


@pytest.fixture
def wandb():
    """It starts a process, and says in the environment where it is."""
    module, before = pytest.importorskip("wandb"), dict(os.environ)
    yield module
    module.teardown()
    for name in os.environ.keys() - before:
        del os.environ[name]


def sent(folder) -> tuple[set[tuple[str, str, str]], list[dict[str, float]]]:
    """What the starts of a run of wandb have sent: id, name and project, and the lines."""
    from wandb.proto.wandb_internal_pb2 import Record

    about, lines = set(), []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, records(path)):
            if record.HasField("run"):
                about.add((record.run.run_id, record.run.display_name, record.run.project))
            if record.HasField("history"):
                items = record.history.item
                lines.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return about, lines


def test_both_have_the_numbers_of_metrics_also_of_a_resumed_run(tmp_path, monkeypatch, wandb):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    with stop_at(9):  # the last checkpoint is that of step 8
        mg.Trainer(config(run, tensorboard=True, wandb=True)).fit(graph())
    mg.Trainer.resume(run, learning_rate=5e-3).fit(graph())
    found, lines = scalars(run / "tensorboard"), Run.open(run).metrics()
    about, told = sent(run / "wandb")
    assert about == {(Run.open(run).id, "run", "megagraph")}
    steps, epochs = ([line for line in lines if kind in line] for kind in ("step", "epoch"))
    assert len(steps) == 18 and len(epochs) == 3
    expected = {tag: {line["step"]: line[name] for line in steps} for name, tag in SEEN.items()}
    expected |= {tag: {6 * i + 5: line[name] for i, line in enumerate(epochs)} for name, tag in OF_EPOCHS.items()}
    for tag, points in expected.items():
        assert found[tag] == [(step, pytest.approx(x, rel=1e-6)) for step, x in points.items()], tag
        assert {line["step"]: line[tag] for line in told if tag in line} == points, tag  # the last of each step
    assert "validation/roc_auc" not in found and not [tag for tag in found if "from_step" in tag]


def test_nothing_of_it_where_nobody_asks(tmp_path):
    mg.Trainer(config(tmp_path / "run", max_steps=1)).fit(graph())
    assert not [name for name in ("tensorboard", "wandb") if (tmp_path / "run" / name).exists()]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_one_error_before_the_work_where_it_is_not_installed(tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith((package, "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"--{package} needs the package {package}, pip install {package}"):
        mg.Trainer(config(tmp_path / "run", dataset="not even looked for", **{package: True})).fit()
    assert not (tmp_path / "run").exists()


def test_one_error_before_the_work_where_nobody_is_logged_in(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"--wandb: No API key configured.*WANDB_MODE=offline"):
        mg.Trainer(config(tmp_path / "run", dataset="not even looked for", wandb=True)).fit()
    assert not (tmp_path / "run").exists()


def test_a_board_that_cannot_be_closed_hides_no_error(tmp_path, monkeypatch, caplog):
    def fail(self):
        raise OSError("no more space")

    monkeypatch.setattr(TensorBoard, "close", fail)
    run, _ = Run.enter(config(tmp_path / "run"))
    run.boards.append(TensorBoard(run.folder))
    with pytest.raises(RuntimeError, match="the real one"), run.kept():
        raise RuntimeError("the real one")
    assert "--tensorboard may lack the last numbers, as it could not be closed: no more space" in caplog.text
    assert not run.folder.exists()  # nor a lock in it


def test_an_epoch_that_is_the_first_line_of_a_start_counts_at_its_last_step(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    board = TensorBoard(tmp_path)
    board.log({"changes": {}, "from_step": 3})
    board.log({"epoch": 0, "val_accuracy": 0.5, "val_roc_auc": None})
    board.log({"step": 3, "loss": 2.0})
    board.close()
    assert scalars(tmp_path / "tensorboard") == {"validation/accuracy": [(2, 0.5)], "step/loss": [(3, 2.0)]}
